from types import SimpleNamespace

import pytest
import torch

import hf_sphere
from hf_sphere.training import CLASSIFICATION, FEW_SHOT, JOINT, REGRESSION, RETRIEVAL
from hf_sphere.training.image_run import ARGUMENTS
from hf_sphere.training.tasks import measure_classification, measure_joint, measure_regression

TASKS = [CLASSIFICATION, REGRESSION, JOINT, RETRIEVAL, FEW_SHOT]
every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)

LOGITS = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [5.0, 0.0]])
CLASSES = torch.tensor([0, 1, 1, 0])
PREDICTIONS, VALUES = torch.tensor([1.0, 2.5, -1.0, 4.0]), torch.tensor([1.5, 2.0, 2.0, 4.0])


def test_the_accuracy_is_the_share_of_largest_logits_in_the_right_place():
    assert measure_classification(SimpleNamespace(logits=LOGITS), {"labels": CLASSES})["accuracy"] == 0.75


def test_the_error_of_values_is_the_mean_of_its_size_in_their_unit():
    measured = measure_regression(SimpleNamespace(predictions=PREDICTIONS), {"labels": VALUES})
    assert measured["mean_absolute_error"] == 1.0


def test_joint_prediction_is_measured_by_both():
    output = SimpleNamespace(logits=LOGITS, predictions=PREDICTIONS)
    measured = measure_joint(output, {"labels": CLASSES, "regression_labels": VALUES})
    assert {name: value.item() for name, value in measured.items()} == {"accuracy": 0.75, "mean_absolute_error": 1.0}


def test_a_share_of_many_images_is_exact():
    correct = torch.arange(10_000) < 9_913
    output = SimpleNamespace(logits=torch.stack([~correct, correct], dim=1).float())
    assert measure_classification(output, {"labels": torch.ones(10_000, dtype=torch.long)})["accuracy"] == 0.9913


@every_task
def test_the_model_class_is_one_of_the_librarys(task):
    assert getattr(hf_sphere, task.model_class.__name__) is task.model_class


@every_task
def test_each_task_has_its_arguments(task):
    names = {argument.__name__ for argument in ARGUMENTS[task.name]}
    assert ("RegressionArguments" in names or "JointArguments" in names) == task.has_values
    assert bool({"RetrievalArguments", "FewShotArguments"} & names) == task.is_open_set
    assert ("ModelArguments" in names) == (task is not FEW_SHOT)  # it has no head


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (CLASSIFICATION, (True, False)),
        (REGRESSION, (False, True)),
        (JOINT, (True, True)),
        (RETRIEVAL, (True, False)),
        (FEW_SHOT, (True, False)),
    ],
)
def test_a_task_knows_its_targets(task, expected):
    assert (task.has_classes, task.has_values) == expected


def test_only_retrieval_and_few_shot_may_evaluate_on_other_classes():
    assert [task for task in TASKS if task.is_open_set] == [RETRIEVAL, FEW_SHOT]


@pytest.mark.parametrize("task", [task for task in TASKS if not task.is_open_set], ids=lambda task: task.name)
def test_what_a_task_is_judged_by_is_measured(task):
    output = SimpleNamespace(logits=LOGITS, predictions=PREDICTIONS)
    labels = {"labels": CLASSES if task.has_classes else VALUES, "regression_labels": VALUES}
    measured = set(task.measure(output, labels)) | {"loss"}
    assert {task.metric, *task.headline} <= measured


@every_task
def test_only_an_accuracy_and_a_recall_are_better_when_higher(task):
    assert task.higher_is_better == (task.metric in ("accuracy", "recall_at_1"))
