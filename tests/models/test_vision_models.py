"""What all image models have in common: saving, loading, execution modes, and training by the Trainer."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModel, Trainer, TrainingArguments

from hf_sphere import (
    SphereVisionConfig,
    SphereVisionForFewShotClassification,
    SphereVisionForImageClassification,
    SphereVisionForJointPrediction,
    SphereVisionForRegression,
    SphereVisionModel,
)
from hf_sphere.models.sphere_vision.modeling_sphere_vision import SphereVisionOutput
from hf_sphere.nn.heads import prototype
from hf_sphere.training.evaluation import loss_is_sum

KINDS: dict[str, Any] = {
    "classification": SphereVisionForImageClassification,
    "regression": SphereVisionForRegression,
    "joint": SphereVisionForJointPrediction,
    "few-shot": SphereVisionForFewShotClassification,
}

every_kind = pytest.mark.parametrize("kind", KINDS)


def small_config(**options: Any) -> SphereVisionConfig:
    """Configuration of a linear map from 6 x 6 pixels to 8 units, projected to 4; values from -10 to 30."""
    sizes: dict[str, Any] = {"backbone": "linear_embedding", "backbone_kwargs": {"width": 8}, "num_channels": 1}
    sizes |= {"image_size": 6, "embedding_dim": 4, "value_range": [-10.0, 30.0], "num_labels": 5}
    return SphereVisionConfig(**sizes | options)


def small_model(kind: str, **options: Any) -> Any:
    torch.manual_seed(2)
    return KINDS[kind](small_config(**options)).eval()


def inputs(kind: str, count: int = 7, side: int = 6) -> dict[str, Tensor]:
    """Images and targets; for few-shot classification an episode with examples of five classes."""
    generator = torch.Generator().manual_seed(1)
    classes, values = torch.arange(count) % 5, torch.linspace(-10.0, 30.0, count)
    batch = {"pixel_values": torch.randn(count, 1, side, side, generator=generator), "labels": classes}
    if kind == "regression":
        batch["labels"] = values
    elif kind == "joint":
        batch["regression_labels"] = values
    elif kind == "few-shot":
        batch["support_pixel_values"] = torch.randn(5, 2, 1, side, side, generator=generator)
    return batch


def tensors_of(output: Any) -> dict[str, Tensor]:
    return {name: value for name, value in output.items() if value is not None}


# Saving and loading


@every_kind
def test_saved_model_and_its_encoder_compute_the_same(kind, tmp_path):
    model, batch = small_model(kind), inputs(kind)
    model.save_pretrained(tmp_path)
    loaded, info = KINDS[kind].from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    before, after = tensors_of(model(**batch)), tensors_of(loaded.eval()(**batch))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert model(**{name: value for name, value in batch.items() if "labels" not in name}).loss is None
    encoder, images = AutoModel.from_pretrained(tmp_path).eval(), batch["pixel_values"]
    assert type(encoder) is SphereVisionModel
    assert torch.equal(encoder(images).embeddings, model.sphere_vision(images).embeddings)


@every_kind
def test_config_round_trips(kind, tmp_path):
    options = {"value_range": [-1.5, 2], "regression_kwargs": {"out_of_range": "clip"}, "task_weight": 0.75}
    options |= {"image_size": [6, 7], "backbone_kwargs": {"width": 9}, "few_shot_kwargs": {"temperature": 2}}
    given = small_config(**options)
    before = given.to_dict()
    config = KINDS[kind](given).config
    assert given.to_dict() == before  # a model changes a copy
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.to_diff_dict() == config.to_diff_dict()
    assert {name: getattr(loaded, name) for name in options} == options
    assert (loaded.head is None) == (kind in ("regression", "few-shot"))


# Execution modes


@every_kind
def test_bfloat16_model_computes_values_and_few_shot_logits_in_float32(kind):
    """bfloat16 cannot distinguish single years between 1000 and 1932."""
    output = small_model(kind).to(torch.bfloat16)(**inputs(kind))
    assert output.embeddings.dtype == torch.bfloat16
    assert output.loss.isfinite()
    values = output.logits if kind == "few-shot" else output.predictions
    assert values is None or values.dtype == torch.float32


@every_kind
def test_model_compiles_with_fullgraph(kind):
    model, batch = small_model(kind), inputs(kind)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(**batch)
    torch.testing.assert_close(tensors_of(compiled), tensors_of(model(**batch)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["regression", "joint"])
def test_model_exports(kind):
    model, images = small_model(kind), inputs(kind)["pixel_values"]
    exported = torch.export.export(model, (images,)).module()(images)
    torch.testing.assert_close(exported.predictions, model(images).predictions, rtol=1e-4, atol=1e-5)


@every_kind
def test_gradient_checkpointing_preserves_gradients(kind):
    assert not small_model(kind).supports_gradient_checkpointing
    model = small_model(kind, backbone="resnet20_cifar", backbone_kwargs=None, image_size=16).train()
    batch, gradients = inputs(kind, side=16), []
    for checkpointing in (False, True):
        if checkpointing:
            # The older name, deprecated since 5.23, is the only one in earlier versions.
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.zero_grad()
        torch.manual_seed(0)
        model(**batch).loss.backward()
        gradients.append(model.sphere_vision.backbone.conv1.weight.grad.clone())
    torch.testing.assert_close(*gradients)


# Training by the Trainer


def trainer_of(kind: str, folder: Any) -> Trainer:
    """A trainer on forty images whose mean increases with the value and whose texture depends on the class."""
    batch = inputs(kind, 40)
    values = torch.linspace(-10.0, 30.0, 40)
    textures = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(3))
    batch["pixel_values"] = textures[torch.arange(40) % 5] + values[:, None, None, None] / 20
    examples = [{name: value[index] for name, value in batch.items()} for index in range(40)]
    args = TrainingArguments(
        output_dir=str(folder), num_train_epochs=15, per_device_train_batch_size=8, learning_rate=0.02,
        report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    return Trainer(small_model(kind), args, train_dataset=examples, eval_dataset=examples)


@pytest.mark.parametrize("kind", ["classification", "regression", "joint"])
def test_transformers_trainer_trains_evaluates_and_predicts(kind, tmp_path):
    trainer = trainer_of(kind, tmp_path)
    labels = ["labels", "regression_labels"] if kind == "joint" else ["labels"]
    assert sorted(trainer.label_names) == labels
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.5 * before
    predicted = trainer.predict(trainer.eval_dataset)
    predictions = predicted.predictions if kind == "joint" else [predicted.predictions]
    shapes = {"classification": [(40, 5)], "regression": [(40,)], "joint": [(40, 5), (40,)]}[kind]
    assert [value.shape for value in predictions] == shapes  # so keys such as the embeddings are ignored


# Regression, and joint models of classes and values on one sphere


PIXELS = inputs("joint")["pixel_values"]
every_value_kind = pytest.mark.parametrize("kind", ["regression", "joint"])


def value_model(kind: str, **options: Any) -> Any:
    return small_model(kind, **{"head": "prototype" if kind == "joint" else None} | options)


@pytest.mark.parametrize("model_class", [SphereVisionForJointPrediction, SphereVisionForImageClassification])
def test_loading_skips_the_prototype_search(model_class, tmp_path, monkeypatch):
    model_class(small_config(head="prototype")).save_pretrained(tmp_path)

    monkeypatch.setattr(prototype, "_place", Mock(side_effect=AssertionError("loading searched")))
    model_class.from_pretrained(tmp_path)
    with pytest.raises(AssertionError, match="loading searched"):  # control for the line above
        model_class(small_config(head="prototype"))


@every_value_kind
def test_predictions_follow_the_angle_to_the_first_axis(kind):
    model = value_model(kind)
    cosines = F.normalize(model.sphere_vision(PIXELS).embeddings.double(), dim=-1)[:, 0]
    expected = -10.0 + 40.0 * (cosines + 1) / 2
    output = model(PIXELS)
    torch.testing.assert_close(output.predictions.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.embeddings.norm(dim=-1), torch.ones(7))
    with torch.no_grad():
        model.sphere_vision.projection.bias[0] += 3.0  # along the pole
    moved = model(PIXELS)
    assert (moved.predictions > output.predictions).all()
    assert kind == "regression" or torch.equal(moved.logits, output.logits)


@pytest.mark.settings(weight=lambda weight: {"weight": weight})
@pytest.mark.parametrize("weight", [None, 0, 0.3, 1])
def test_loss_and_gradient_are_the_weighted_sum_of_those_of_both_tasks(weight):
    kind = "regression" if weight is None else "joint"
    model, batch = value_model(kind, **{} if weight is None else {"task_weight": weight}), inputs(kind)
    embeddings = torch.randn(7, 4, generator=torch.Generator().manual_seed(2), requires_grad=True)
    model.sphere_vision.forward = lambda pixels, **options: SphereVisionOutput(embeddings=embeddings)
    values = batch["labels" if weight is None else "regression_labels"].double()
    # Mean over the images of (r - cos(z, first axis))^2.
    expected = ((values + 10.0) / 20.0 - 1 - F.normalize(embeddings.double(), dim=-1)[:, 0]).square().mean()
    if weight is not None:  # mean of (1 - cosine to the true prototype)^2, orthogonal to the first axis
        points = F.normalize(embeddings.double()[:, 1:], dim=-1)
        cosines = (points * model.head.prototypes.double()[batch["labels"]]).sum(-1)
        expected = (1 - weight) * expected + weight * (1 - cosines).square().mean()
    loss = model(**batch).loss
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(each, embeddings)[0] for each in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert weight != 1 or gradients[0][:, 0].abs().max() == 0  # orthogonal to the pole


def test_prototypes_are_orthogonal_to_the_pole():
    model = value_model("joint")
    across = F.pad(model.head.prototypes, (1, 0))  # where `head_inputs` places them
    assert torch.equal(model.head_inputs(across), model.head.prototypes)
    assert (across @ model.regression.pole).abs().max() == 0


@pytest.mark.parametrize("head", ["softmax", "spherized"])
def test_other_heads_receive_the_coordinates_orthogonal_to_the_pole(head):
    model, batch = value_model("joint", head=head, task_weight=1.0), inputs("joint")
    output = model(**batch)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, batch["labels"]))


@pytest.mark.parametrize("counted", [0, 2])  # by a Trainer, which omits the values, or not
def test_values_of_minus_100_have_a_loss_when_the_targets_of_a_step_are_counted(counted):
    model = KINDS["regression"](small_config(value_range=[-180.0, 180.0], head=None))
    images, values = torch.rand(2, 1, 6, 6), torch.full((2,), -100.0)
    expected = model(images, labels=values).loss
    torch.testing.assert_close(model(images, labels=values, num_items_in_batch=counted).loss, expected)


def test_class_156_of_labels_of_8_bits_has_a_loss_when_the_targets_of_a_step_are_counted():
    model = KINDS["classification"](small_config(num_labels=200))
    images, labels = torch.rand(2, 1, 6, 6), torch.full((2,), 156)
    expected = model(images, labels=labels).loss
    torch.testing.assert_close(model(images, labels=labels.to(torch.uint8), num_items_in_batch=2).loss, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@every_value_kind
def test_model_reports_whether_the_loss_is_a_sum(kind, reduction):
    options: dict[str, Any] = {"regression_kwargs": {"reduction": reduction}}
    options |= {"head_kwargs": {"reduction": reduction}} if kind == "joint" else {}
    model, batch = value_model(kind, **options), inputs(kind)
    assert loss_is_sum(model) == (reduction == "sum")
    factor = 7.0 if reduction == "sum" else 1.0
    mean = value_model(kind)
    mean.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(**batch).loss, factor * mean(**batch).loss)
