"""Generic tests of losses, with the inputs that pytorch-metric-learning tests its own with: points at given angles.

Its tests are in neither of its distributions, so that they are written here: our losses are compared with those that
it installs, and its losses run in our adapter.
"""

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses as theirs
from pytorch_metric_learning.losses.base_metric_loss_function import BaseMetricLossFunction
from torch import Tensor

from hf_sphere import losses

NOT_APPLICABLE = {
    "test_loss_runs_in_the_adapter[ManifoldLoss]": "it takes no labels",
    "test_loss_runs_in_the_adapter[VICRegLoss]": "its pairs are two tensors, not labels",
}

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}  # ours compute half dtypes in float32, theirs do not

# Their loss by the name of ours, with the options of both. Their margins are degrees.
SAME = {
    "ArcFaceLoss": ("ArcFaceLoss", {"margin": 30, "scale": 64}, {"margin": math.radians(30), "scale": 64.0}),
    "CosFaceLoss": ("CosFaceLoss", {"margin": 0.3, "scale": 48}, {"margin": 0.3, "scale": 48.0}),
    "SubCenterArcFaceLoss": (
        "SubCenterArcFaceLoss",
        {"margin": 20, "scale": 64, "sub_centers": 3},
        {"margin": math.radians(20), "scale": 64.0, "sub_centers": 3},
    ),
    "CosineSoftmaxLoss": ("NormalizedSoftmaxLoss", {"temperature": 0.05}, {"scale": 20.0}),
    "ProxyAnchorLoss": ("ProxyAnchorLoss", {"margin": 0.2, "alpha": 16}, {"margin": 0.2, "scale": 16.0}),
}
BATCHES = [([20], [4]), ([0, 10, 20], [1, 1, 1]), ([0, 40, 60], [1, 2, 3])]
every_loss = pytest.mark.parametrize("name", SAME)


def points(angles: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the points of the unit circle at angles in degrees."""
    radians = torch.as_tensor(angles, dtype=torch.float64).deg2rad()
    return torch.stack([radians.cos(), radians.sin()], dim=-1).to(dtype)


def build(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return our loss and theirs for ten classes on the circle, with the same class vectors."""
    peer, their_options, our_options = SAME[name]
    their = getattr(theirs, peer)(num_classes=10, embedding_size=2, **their_options).to(dtype)
    ours = getattr(losses, name)(2, 10, **our_options).to(dtype)
    vectors = their.proxies if name == "ProxyAnchorLoss" else their.W.T
    ours.head.weight.data = vectors.detach().reshape(ours.head.weight.shape).clone()
    return ours, their


def value_and_gradient(loss: Any, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    inputs = embeddings.clone().requires_grad_()
    value = loss(inputs, labels)
    value.backward()
    return value.detach(), inputs.grad


@every_loss
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_value_and_gradient_are_theirs(name: str, dtype: torch.dtype) -> None:
    ours, their = build(name, dtype)
    embeddings, labels = 3 * points(range(180), dtype), torch.randint(10, (180,))
    # Theirs in float64, because the gradients of arc cosines have few digits in float32.
    expected = value_and_gradient(their.double(), embeddings.double(), labels)
    tolerance = TOLERANCES.get(dtype, 1e-2)
    for ours_, theirs_ in zip(value_and_gradient(ours, embeddings, labels), expected, strict=True):
        torch.testing.assert_close(ours_.double(), theirs_, rtol=tolerance, atol=tolerance)


@every_loss
def test_logits_are_theirs(name: str) -> None:
    ours, their = build(name, torch.float64)
    embeddings = points(range(180), torch.float64)
    scale = ours.head.scale if name == "ProxyAnchorLoss" else 1.0  # their proxy anchor returns cosines
    torch.testing.assert_close(ours.head(embeddings).logits, their.get_logits(embeddings) * scale)


@every_loss
@pytest.mark.parametrize(("angles", "labels"), BATCHES, ids=str)
def test_batch_of_one_and_absent_classes_have_the_loss_of_theirs(
    name: str, angles: list[int], labels: list[int]
) -> None:
    batch = points(angles, torch.float64), torch.tensor(labels)
    found, expected = (value_and_gradient(loss, *batch) for loss in build(name, torch.float64))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [0.05, 0.1, 1.0])
def test_supervised_contrast_is_theirs(dtype: torch.dtype, temperature: float) -> None:
    x, labels = points([0, 10, 20, 50, 60, 80], dtype), [0, 0, 0, 1, 1, 2]
    found = losses.SupConLoss(temperature)(x, torch.tensor(labels)).double()
    exact = torch.nn.functional.normalize(x.double(), dim=-1)
    expected = theirs.SupConLoss(temperature)(exact, torch.tensor(labels))
    tolerance = max(TOLERANCES.get(dtype, 1e-2), 1e-7)  # they add 1.5e-8 to a denominator
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_supervised_contrast_of_two_views_is_theirs() -> None:
    first, second = points([0, 40, 80, 120]), points([5, 50, 70, 130])
    values = [theirs.SelfSupervisedLoss(kind(0.1))(first, second) for kind in (losses.SupConLoss, theirs.SupConLoss)]
    torch.testing.assert_close(*values)


def test_two_losses_are_summed_with_weights() -> None:
    ours, _ = build("ArcFaceLoss", torch.float32)
    embeddings, labels = points(range(180)), torch.randint(10, (180,))
    both = theirs.MultipleLosses({"a": ours, "b": losses.SupConLoss()}, weights={"a": 1, "b": 0.23})
    expected = ours(embeddings, labels) + 0.23 * losses.SupConLoss()(embeddings, labels)
    torch.testing.assert_close(both(embeddings, labels), expected)


def their_losses() -> list[str]:
    """All losses of pytorch-metric-learning but the wrappers of other losses and those for subclasses."""
    base = [
        name
        for name, kind in vars(theirs).items()
        if inspect.isclass(kind) and issubclass(kind, BaseMetricLossFunction)
    ]
    return [name for name in base if not name.startswith(("Base", "Generic", "WeightRegularizer", "WeightMixin"))]


@pytest.mark.parametrize("name", their_losses())
def test_loss_runs_in_the_adapter(name: str) -> None:
    kind = getattr(theirs, name)
    sizes = {"num_classes": 10, "embedding_size": 2, "num_bins": 20, "n_bins": 20, "descriptors_dim": 2}
    sizes |= {"margin": 0.4, "Tn": 1.0} if name == "RankedListLoss" else {}
    accepted = {parameter for base in kind.__mro__ for parameter in inspect.signature(base.__init__).parameters}
    their = kind(**{key: value for key, value in sizes.items() if key in accepted})
    embeddings, labels = points(range(0, 180, 6)), torch.arange(30) % 10
    ignored = torch.cat([labels, torch.full((2,), -100)])
    both = [embeddings, labels], [torch.cat([embeddings, points([7, 70])]), ignored]
    values = []
    # Copies, since some losses keep statistics of the batches.
    for loss, arguments in zip((copy.deepcopy(their), losses.MetricLearningLoss(their)), both, strict=True):
        torch.manual_seed(0)  # some losses draw pairs
        values.append(value_and_gradient(loss, *arguments))
    torch.testing.assert_close(values[1][0], values[0][0])
    torch.testing.assert_close(values[1][1][:30], values[0][1])
    assert not values[1][1][30:].any()
