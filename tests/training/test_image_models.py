"""Building models from arguments and data: new models, saved models and validation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_sphere.data import ImageData, ImageDataOptions, ImageShape, ImagesInMemory
from hf_sphere.models import SphereVisionImageProcessor
from hf_sphere.models.sphere_vision.modeling_sphere_vision import SphereVisionPreTrainedModel
from hf_sphere.nn import HEADS
from hf_sphere.prototypes import place_prototypes
from hf_sphere.training import RecipeArguments
from hf_sphere.training.tasks.classification import HEAD_NAMES, ModelArguments, build_classifier
from hf_sphere.training.tasks.image import Setup, build_model, summarize
from hf_sphere.training.tasks.joint import JointArguments
from hf_sphere.training.tasks.regression import RegressionArguments, check_values, value_settings

NAMES = ["cat", "dog", "owl"]
MODELS = {
    "classification": "SphereVisionForImageClassification",
    "regression": "SphereVisionForRegression",
    "joint": "SphereVisionForJointPrediction",
}
every_task = pytest.mark.parametrize("task", MODELS)
with_classes = pytest.mark.parametrize("task", ["classification", "joint"])
with_values = pytest.mark.parametrize("task", ["regression", "joint"])


def batches(task: str, *values: float) -> ImagesInMemory:
    numbers, images = torch.tensor(values), torch.zeros(len(values), 1, 6, 6, dtype=torch.uint8)
    labels = torch.arange(len(values)) % 3 if task != "regression" else numbers
    options = {"batch_size": 2, "mean": [0.5], "std": [0.3]}
    return ImagesInMemory(images, labels, regression_labels=numbers if task == "joint" else None, **options)


def make_data(task: str, *, evaluation: tuple[float, ...] = (1.0, 2.0), validation=None, names=NAMES) -> ImageData:
    """Data of 6 x 6 pixel images with training values from 0 to 4."""
    return ImageData(
        train=batches(task, 0.0, 3.0, 4.0), evaluation=batches(task, *evaluation), eval_split="test",
        validation=None if validation is None else batches(task, *validation), mean=[0.5], std=[0.3],
        class_names=names if task != "regression" else [], shape=ImageShape(1, 6, 6),
        value_range=(0.0, 4.0) if task != "classification" else None,
    )  # fmt: skip


def build(
    task: str,
    *,
    data: ImageData | None = None,
    values: dict[str, Any] | None = None,
    smoothing: float = 0.0,
    reduction: str | None = None,
    epochs: int = 20,
    **options: Any,
) -> SphereVisionPreTrainedModel:
    """Build the model of a task from model arguments; arguments for values are in `values`."""
    if "model_name_or_path" not in options:
        options = {"backbone": "linear_embedding", "backbone_kwargs": {"width": 8}, "embedding_dim": 4} | options
    training = {"label_smoothing_factor": smoothing, "loss_reduction": reduction, "num_train_epochs": epochs}
    args = RecipeArguments(output_dir="unused", **training)
    setup = Setup(ModelArguments(**options), ImageDataOptions(), args, data or make_data(task), task)
    if task == "classification":
        return build_classifier(setup)
    if task == "regression":
        return build_model(setup, value_settings(setup, RegressionArguments(**values or {})))
    return build_classifier(setup, **value_settings(setup, JointArguments(**values or {})))


def describe(task: str, data: ImageData) -> str:
    """Summarize data and a new model."""
    model = build(task)
    return summarize(model, data, "regression" if task == "regression" else f"{model.config.head} head")


def saved(tmp_path: Path, task: str, **options: Any) -> str:
    """Save a new model and return its path."""
    build(task, **options).save_pretrained(tmp_path / "saved")
    return str(tmp_path / "saved")


# New models


@pytest.mark.parametrize(
    ("task", "head"), [("classification", "spherized"), ("regression", None), ("joint", "prototype")]
)
def test_new_model_fits_the_task_and_the_data(task, head):
    model, processor = build(task), SphereVisionImageProcessor.from_data(make_data(task))
    assert (processor.size["height"], *processor.image_mean, *processor.image_std) == (6, 0.5, 0.3)
    assert (type(model).__name__, model.config.head) == (MODELS[task], head)
    assert (model.config.num_channels, model.config.image_size) == (1, [6, 6])
    assert task == "regression" or model.config.id2label == dict(enumerate(NAMES))
    if task == "classification":
        return
    assert model.config.value_range == [0.0, 4.0]
    model = build(task, reduction="sum", values={"value_range": [-1.0, 9.0], "out_of_range": "clip"})
    assert (model.regression.low, model.regression.high, model.regression.out_of_range) == (-1.0, 9.0, "clip")
    assert {model.regression.reduction} | ({model.head.reduction} if task == "joint" else set()) == {"sum"}
    assert task == "regression" or build(task, values={"task_weight": 0.75}).config.task_weight == 0.75


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("classification", ["3 classes\n", "spherized head"]),
        ("regression", ["values 0 to 4", "embeddings, regression\n"]),
        ("joint", ["3 classes, values 0 to 4", "prototype head, regression on a pole"]),
    ],
)
def test_description_names_targets_and_heads_and_other_classes_to_evaluate_on(task, expected):
    data = make_data(task)
    text = describe(task, data)
    assert [part for part in expected if part not in text] == []
    assert ", ," not in text
    if task == "classification":
        for names, other in (
            (["emu", "fox"], "2 other classes to evaluate on\n"),
            (["emu", "owl"], "2 classes to eval"),
        ):
            assert f"3 classes, {other}" in describe(task, replace(data, eval_class_names=names))


# Values outside the range


@with_values
def test_values_outside_a_given_range_are_rejected_with_their_count_and_a_solution_and_others_clipped(task):
    strict, given = build(task, values={"out_of_range": "error"}), build(task, values={"value_range": [0.0, 2.0]})
    for split in ("evaluation", "validation"):
        data = make_data(task, **{split: (1.0, 4.5, 9.0)})
        said = f"2 of 3 {split} values lie outside the range 0 to 4, for instance 4.5.*value_range.*out_of_range clip"
        with pytest.raises(ValueError, match=said):
            check_values(strict, data)
    check_values(build(task), make_data(task, evaluation=(99.0,)))
    check_values(build(task, values={"value_range": [0.0, 4.0]}), make_data(task))
    with pytest.raises(ValueError, match="2 of 3 training values lie outside the range 0 to 2"):
        check_values(given, make_data(task))
    assert [build(task).regression.out_of_range, given.regression.out_of_range] == ["clip", "error"]
    with pytest.raises(ValueError, match="embedding_dim must be an integer"):
        build(task, embedding_dim=None)


# Prototypes from a file


def file(tmp_path: Path, count: int = 3, dim: int = 4, names: list[str] | None = None) -> str:
    """Place prototypes differently from a head and return their file."""
    placement = place_prototypes(count, dim, seed=7, method="lbfgs", class_names=names, restarts=1)
    placement.save(tmp_path / "prototypes.safetensors")
    return str(tmp_path / "prototypes.safetensors")


@pytest.mark.parametrize("names", [NAMES, None], ids=["named", "unnamed"])
def test_prototypes_are_loaded_from_a_file_and_saved(names, tmp_path):
    expected = place_prototypes(3, 4, seed=7, method="lbfgs", restarts=1).prototypes.float()
    folder = saved(tmp_path, "classification", head="prototype", prototypes_file=file(tmp_path, names=names))
    for options in (
        {"head": "prototype", "prototypes_file": file(tmp_path, names=names)},
        {"model_name_or_path": folder},
    ):
        torch.testing.assert_close(build("classification", **options).head.prototypes, expected)


SHAPE = r"the prototypes must have the shape .*, \(3, 4\); got "


def test_prototypes_that_do_not_fit_are_rejected_with_the_difference(tmp_path):
    for given, said in (
        ((5, 4), SHAPE + r"\(5, 4\)"),
        ((3, 6), SHAPE + r"\(3, 6\)"),
        ((3, 4, ["cat", "owl", "dog"]), r"placed for 3 classes \(cat, owl, dog\), not for 3 .* in this order"),
        ((2, 4, ["cat", "dog"]), r"was placed for 2 classes \(cat, dog\)"),
    ):
        with pytest.raises(ValueError, match=said):
            build("classification", head="prototype", prototypes_file=file(tmp_path, *given))
    with pytest.raises(ValueError, match="needs the head prototype; the model has softmax"):
        build("classification", head="softmax", prototypes_file=file(tmp_path))
    assert build("joint", prototypes_file=file(tmp_path, dim=3)).head.prototypes.shape == (
        3,
        3,
    )  # one dimension is the values'


# Saved models


@every_task
@pytest.mark.parametrize("other", MODELS, ids="of {}".format)
def test_saved_model_is_loaded_with_its_weights_and_that_of_another_task_rejected(task, other, tmp_path):
    folder = saved(tmp_path, other)
    if task != other:
        said = f"saved is a {MODELS[other]}, but this task trains a {MODELS[task]}"
        with pytest.raises(ValueError, match=said):
            build(task, model_name_or_path=folder)
        return
    loaded, weights = build(task, model_name_or_path=folder), load_file(f"{folder}/model.safetensors")
    assert (type(loaded).__name__, loaded.state_dict().keys()) == (MODELS[task], weights.keys())
    assert all(torch.equal(loaded.state_dict()[name], weights[name]) for name in weights)


def test_training_can_start_from_an_encoder(tmp_path):
    model = build("classification")
    model.sphere_vision.save_pretrained(tmp_path)
    loaded = build("classification", model_name_or_path=str(tmp_path))
    assert torch.equal(loaded.sphere_vision.projection.weight, model.sphere_vision.projection.weight)


@with_values
@pytest.mark.parametrize(("before", "now"), [("mean", "sum"), ("sum", "mean")])
def test_saved_model_keeps_its_range_and_weight_unless_others_are_given_and_gets_the_reduction(
    task, before, now, tmp_path
):
    values = {"value_range": [-1.0, 9.0]} | ({"task_weight": 0.75} if task == "joint" else {})
    folder = saved(tmp_path, task, values=values, reduction=before)
    assert build(task, model_name_or_path=folder).config.value_range == [-1.0, 9.0]
    values = {"value_range": [0.0, 5.0]} | ({"task_weight": 0.5} if task == "joint" else {})
    model = build(task, model_name_or_path=folder, values=values, reduction=now)
    assert model.regression.high == 5.0
    assert task == "regression" or model.config.task_weight == 0.5
    assert {model.regression.reduction} | ({model.head.reduction} if task == "joint" else set()) == {now}


def test_saved_model_keeps_value_settings_missing_from_the_arguments_and_a_run_overrides_its_reduction(tmp_path):
    own = {"task_weight": 0.75, "out_of_range": "clip", "value_range": [0.0, 9.0]}
    model = build("joint", model_name_or_path=saved(tmp_path, "joint", values=own, reduction="sum"))
    assert (model.config.task_weight, model.config.value_range) == (0.75, [0.0, 9.0])
    assert (model.regression.out_of_range, model.regression.reduction, model.head.reduction) == ("clip", "sum", "sum")
    for head in ("vmf", "cosine", "arcface", "hyperbolic"):
        options = {"curvature": 0.5} if head == "hyperbolic" else {"log_temperature": -2.0, "temperature_lr": 0.1}
        folder = saved(tmp_path, "classification", head=head, head_kwargs=options)
        assert build("classification", model_name_or_path=folder).config.head_kwargs == options
    head = {"head": "prototype", "head_kwargs": {"reduction": "sum"}}
    folder = saved(tmp_path, "classification", **head)
    assert build("classification", model_name_or_path=folder).head.reduction == "sum"
    for reduction in ("mean", "sum"):
        assert build("classification", **head, reduction=reduction).head.reduction == reduction


@pytest.mark.parametrize("names", [["cat", "dog"], ["owl", "dog", "cat"], ["a", "b", "c", "d"]], ids=len)
@with_classes
def test_saved_model_gets_a_new_head_for_other_classes_and_keeps_its_encoder(task, names, tmp_path, caplog):
    caplog.set_level("INFO")
    folder = saved(tmp_path, task, head="softmax")
    model = build(task, model_name_or_path=folder, data=make_data(task, names=names))
    before = load_file(f"{folder}/model.safetensors")
    after = model.state_dict()
    kept = [name for name in before if not name.startswith("head.")]
    assert kept
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert after["head.linear.weight"].shape[0] == len(names)
    assert len(names) != 3 or not torch.equal(after["head.linear.weight"], before["head.linear.weight"])
    assert list(model.config.label2id) == names
    assert f"New head for {len(names)} classes ({', '.join(names)})" in caplog.text
    if task == "classification":  # it may be of another kind
        options = {"head": "cosine", "head_kwargs": {"scale": 4.0}}
        config = build(task, model_name_or_path=folder, data=make_data(task, names=names), **options).config
        assert (config.head, config.num_labels, config.head_kwargs) == ("cosine", len(names), {"scale": 4.0})


def test_balanced_class_weights_are_those_of_scikit_learn():
    from sklearn.utils.class_weight import compute_class_weight

    labels = torch.tensor([0, 0, 0, 1, 2, 2])
    data = replace(make_data("classification"), train=batches("classification", *range(6)))
    data.train.labels = labels
    weights = build("classification", data=data, class_weights="balanced").head.class_weights
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels.numpy())
    assert weights == pytest.approx(expected)


@every_task
def test_freeze_batch_norm_is_that_of_the_arguments_else_of_the_saved_model(task, tmp_path):
    for before in (False, True):
        folder = saved(tmp_path, task, freeze_batch_norm=before)
        for now, frozen in ((None, before), (not before, not before)):
            model = build(task, model_name_or_path=folder, freeze_batch_norm=now)
            assert model.config.freeze_batch_norm is frozen


def test_bad_input_is_refused(tmp_path):
    folder, data = saved(tmp_path, "classification"), make_data("classification", names=["x", "y"])
    with pytest.raises(ValueError, match=r"the data has 2 classes \(x, y\) but .* was trained on 3 classes"):
        build("classification", model_name_or_path=folder, data=data, epochs=0)
    with pytest.raises(ValueError, match="head 'vmf' has no option label_smoothing; its options are: num_samples"):
        build("classification", head="vmf", smoothing=0.1)
    with pytest.raises(ValueError, match="head 'softmax' has no option reduction"):
        build("classification", head="softmax", reduction="sum")


def test_the_help_names_every_head():
    assert list(HEAD_NAMES) == sorted(HEADS)
