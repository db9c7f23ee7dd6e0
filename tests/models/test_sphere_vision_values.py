"""Regression models and joint models of classes and values on one sphere."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere import (
    SphereVisionConfig,
    SphereVisionForImageClassification,
    SphereVisionForJointPrediction,
    SphereVisionForRegression,
)
from hf_sphere.models.sphere_vision.modeling_sphere_vision import SphereVisionOutput, SphereVisionPreTrainedModel
from hf_sphere.nn.heads import prototype
from hf_sphere.training.evaluation import loss_is_sum

KINDS = {"regression": SphereVisionForRegression, "joint": SphereVisionForJointPrediction}

every_kind = pytest.mark.parametrize("kind", KINDS)


def small_config(kind: str, **options: Any) -> SphereVisionConfig:
    """Config of a linear map from 6 x 6 pixels to 8 units, projected to 4 coordinates; values from -10 to 30."""
    own: dict[str, Any] = {"backbone": "linear_embedding", "backbone_kwargs": {"width": 8}, "num_channels": 1}
    own |= {"image_size": 6, "embedding_dim": 4, "value_range": [-10.0, 30.0], "num_labels": 5}
    own |= {"head": "prototype" if kind == "joint" else None}
    return SphereVisionConfig(**own | options)


def small_model(kind: str, **options: Any) -> SphereVisionPreTrainedModel:
    return KINDS[kind](small_config(kind, **options)).eval()


def images(count: int = 7) -> Tensor:
    return torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(1))


def targets(kind: str, count: int = 7) -> dict[str, Tensor]:
    values = torch.linspace(-10.0, 30.0, count)
    return (
        {"labels": values} if kind == "regression" else {"labels": torch.arange(count) % 5, "regression_labels": values}
    )


@pytest.mark.parametrize("model_class", [SphereVisionForJointPrediction, SphereVisionForImageClassification])
def test_loading_skips_the_prototype_search(model_class, tmp_path, monkeypatch):
    model_class(small_config("joint")).save_pretrained(tmp_path)

    prototype._place.cache_clear()
    monkeypatch.setattr(prototype, "place_prototypes", Mock(side_effect=AssertionError("loading searched")))
    model_class.from_pretrained(tmp_path)
    with pytest.raises(AssertionError, match="loading searched"):  # control for the line above
        model_class(small_config("joint"))


# Computation


@every_kind
def test_predictions_follow_the_angle_to_the_first_axis(kind):
    model = small_model(kind)
    cosines = F.normalize(model.sphere_vision(images()).embeddings.double(), dim=-1)[:, 0]
    expected = -10.0 + 40.0 * (cosines + 1) / 2
    output = model(images())
    torch.testing.assert_close(output.predictions.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.embeddings.norm(dim=-1), torch.ones(7))
    with torch.no_grad():
        model.sphere_vision.projection.bias[0] += 3.0  # along the pole
    moved = model(images())
    assert (moved.predictions > output.predictions).all()
    assert kind == "regression" or torch.equal(moved.logits, output.logits)


def plain_regression(embeddings: Tensor, values: Tensor) -> Tensor:
    """Mean over the images of (r - cos(z, first axis))^2."""
    places = 2 * (values.double() + 10.0) / 40.0 - 1
    return (places - F.normalize(embeddings.double(), dim=-1)[:, 0]).square().mean()


def plain_classification(embeddings: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
    """Mean over the images of (1 - cosine to the true prototype)^2, orthogonal to the first axis."""
    points = F.normalize(embeddings.double()[:, 1:], dim=-1)
    return (1 - (points * prototypes.double()[labels]).sum(-1)).square().mean()


@pytest.mark.settings(weight=lambda weight: {"weight": weight})
@pytest.mark.parametrize("weight", [None, 0, 0.3, 1])
def test_loss_and_gradient_are_the_weighted_sum_of_those_of_both_tasks(weight):
    kind = "regression" if weight is None else "joint"
    model, batch = small_model(kind, **{} if weight is None else {"task_weight": weight}), targets(kind)
    embeddings = torch.randn(7, 4, generator=torch.Generator().manual_seed(2), requires_grad=True)
    model.sphere_vision.forward = lambda pixels, **options: SphereVisionOutput(embeddings=embeddings)
    values = plain_regression(embeddings, batch["labels" if weight is None else "regression_labels"])
    expected = values
    if weight is not None:
        classes = plain_classification(embeddings, model.head.prototypes, batch["labels"])
        expected = (1 - weight) * values + weight * classes
    loss = model(images(), **batch).loss
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(each, embeddings)[0] for each in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert weight != 1 or gradients[0][:, 0].abs().max() == 0  # orthogonal to the pole


def test_prototypes_are_orthogonal_to_the_pole():
    model = small_model("joint")
    across = F.pad(model.head.prototypes, (1, 0))  # where `head_inputs` places them
    assert torch.equal(model.head_inputs(across), model.head.prototypes)
    assert (across @ model.regression.pole).abs().max() == 0


@pytest.mark.parametrize("head", ["softmax", "spherized"])
def test_other_heads_receive_the_coordinates_orthogonal_to_the_pole(head):
    model, batch = small_model("joint", head=head, task_weight=1.0), targets("joint")
    output = model(images(), **batch)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, batch["labels"]))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@every_kind
def test_model_reports_whether_the_loss_is_a_sum(kind, reduction):
    options: dict[str, Any] = {"regression_kwargs": {"reduction": reduction}}
    options |= {"head_kwargs": {"reduction": reduction}} if kind == "joint" else {}
    model, batch = small_model(kind, **options), targets(kind)
    assert loss_is_sum(model) == (reduction == "sum")
    factor = 7.0 if reduction == "sum" else 1.0
    torch.testing.assert_close(model(images(), **batch).loss, factor * small_loss(kind, model, batch))


def small_loss(kind: str, model: SphereVisionPreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Loss with the same weights and mean reduction."""
    mean = small_model(kind)
    mean.load_state_dict(model.state_dict())
    return mean(images(), **batch).loss


# Validation
