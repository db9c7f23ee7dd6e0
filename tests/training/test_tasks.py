from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import hf_sphere
from hf_sphere.training import RecipeArguments, find_task, task_names
from hf_sphere.training.evaluation import measure_images
from hf_sphere.training.tasks.classification import ModelArguments
from hf_sphere.training.tasks.image import check_same_architecture
from hf_sphere.utils.arguments import parse_arguments

LOGITS = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [5.0, 0.0]])
CLASSES = torch.tensor([0, 1, 1, 0])
PREDICTIONS, VALUES = torch.tensor([1.0, 2.5, -1.0, 4.0]), torch.tensor([1.5, 2.0, 2.0, 4.0])


def test_metrics_are_exact_fractions_of_correct_argmax_predictions_and_mean_absolute_errors():
    assert measure_images(SimpleNamespace(logits=LOGITS), {"labels": CLASSES})["accuracy"] == 0.75
    measured = measure_images(SimpleNamespace(predictions=PREDICTIONS), {"labels": VALUES})
    assert measured["mean_absolute_error"] == 1.0
    output = SimpleNamespace(logits=LOGITS, predictions=PREDICTIONS)
    measured = measure_images(output, {"labels": CLASSES, "regression_labels": VALUES})
    assert {name: value.item() for name, value in measured.items()} == {"accuracy": 0.75, "mean_absolute_error": 1.0}
    correct = torch.arange(10_000) < 9_913
    output = SimpleNamespace(logits=torch.stack([~correct, correct], dim=1).float())
    assert measure_images(output, {"labels": torch.ones(10_000, dtype=torch.long)})["accuracy"] == 0.9913


@pytest.mark.parametrize("task", [find_task(name) for name in task_names()], ids=task_names())
def test_a_task_declares_training_arguments_of_distinct_names_a_summary_and_its_metric(task):
    assert any(issubclass(kind, RecipeArguments) for kind in task.arguments)
    names = [name for kind in task.arguments for name in kind.__dataclass_fields__]
    assert len(names) == len(set(names))
    assert task.summary.startswith("Train ")
    assert task.metric in ("accuracy", "recall_at_1") or task.metric.endswith(("loss", "error"))
    with pytest.raises(ValueError, match=r"the task must be one of classification, few_shot, .*; got 'clustering'"):
        find_task("clustering")


SAVED = {"scale": 8.0, "label_smoothing": 0.2, "reduction": "sum"}


@pytest.mark.parametrize(
    ("given", "saved", "message"),
    [
        ({"final_activation": False}, {"final_activation": False}, None),
        ({"final_activation": None}, {"final_activation": False}, None),
        ({"final_activation": False}, {"final_activation": True}, "final_activation is False but m has True"),
        ({"head": "cosine"}, {}, "head is cosine but"),
        ({"embedding_dim": 9}, {"embedding_dim": 8}, "embedding_dim is 9 but"),
        ({"prototypes_file": "some.safetensors"}, {}, "prototypes_file does not apply to a saved model"),
        ({"backbone_weights": "some.safetensors"}, {}, "backbone_weights does not apply to a saved model"),
        ({"initial_weights": "some/model"}, {}, "initial_weights does not apply to a saved model"),
        ({"initialization": "xavier"}, {}, "initialization does not apply to a saved model"),
        ({"head_kwargs": {"scale": 8.0}}, {"head": "cosine", "head_kwargs": SAVED}, None),
        ({"head_kwargs": {}}, {"head": "cosine", "head_kwargs": SAVED}, None),
        (
            {"head_kwargs": {"scale": 8.0, "label_smoothing": 0.1}},
            {"head": "cosine", "head_kwargs": SAVED},
            "leave head",
        ),
    ],
)
def test_what_a_saved_model_lacks_is_refused_but_not_what_other_arguments_set(given, saved, message):
    config = hf_sphere.SphereVisionConfig(**{"backbone": "lenet5", "head": "softmax"} | saved)
    args = ModelArguments(model_name_or_path="m", **given)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_same_architecture(args, config)
    if "initialization" in given:  # it has no effect
        check_same_architecture(args, config, evaluates=True)


EPISODES, SMOOTH = "--episode_classes 5 --episode_examples 2 --episodes_per_epoch 9", "label_smoothing"
SAMPLED = "--class_balanced_sampling"
TWICE = [
    ("--class_weights balanced --class_balanced_sampling", "class_weights and class_balanced_sampling"),
    (f"--class_weights balanced {EPISODES}", "class_weights and episode_classes"),
    (f"{SAMPLED} --head_kwargs {{class_weights:[1,2]}}", "head_kwargs class_weights and class_balanced_sampling"),
    ("--class_weights balanced --head_kwargs {class_weights:[1,2]}", "class_weights and head_kwargs class_weights"),
    (f"--{SMOOTH}_factor 0.1 --head_kwargs {{{SMOOTH}:0.2}}", f"{SMOOTH}_factor and head_kwargs {SMOOTH}"),
    ("--loss_reduction sum --head_kwargs {reduction:mean}", "loss_reduction and head_kwargs reduction"),
]


@pytest.mark.parametrize(("words", "names"), TWICE)
@pytest.mark.parametrize("task", ["classification", "joint", "retrieval"])
def test_two_options_for_one_thing_are_an_error_before_the_data_is_loaded(task, words, names):
    words = [word.replace(":", ": ") for word in f"--output_dir run {words}".split()]
    arguments = parse_arguments(find_task(task).arguments, words, "")
    with pytest.raises(ValueError, match=f"^{names} are two ways to change the loss; use only one of them"):
        find_task(task).prepare(None, *arguments)


def test_the_name_of_a_built_in_task_is_taken():
    with pytest.raises(ValueError, match=r"the task 'few_shot': hf_sphere\.training\.tasks.few_shot has this name"):
        replace(find_task("classification"), name="few-shot", prepare=find_task("joint").prepare)
