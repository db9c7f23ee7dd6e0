"""Heads whose logits are cosines times a learned scale: cosine and arcface."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor

from hf_sphere import nn as sphere_nn
from hf_sphere.nn import Head

LABELS = torch.tensor([0, 3, 1, 2, 3])
HEADS = pytest.mark.parametrize("name", ["cosine", "arcface"])


def build_head(name: str, dim: int, classes: int, **options) -> Head:
    """Head whose logits are unscaled cosines by default."""
    return sphere_nn.build_head(name, dim, classes, **{"log_temperature": 0.0, **options})


def cosines(x: Tensor, weight: Tensor) -> Tensor:
    """Cosines (B, K) in float64 by definition."""
    x, weight = x.double(), weight.detach().double()
    return x @ weight.T / x.norm(dim=1)[:, None] / weight.norm(dim=1)


def at_angle(angle: float, dim: int = 3) -> tuple[Tensor, Tensor]:
    """Unit vector in float64 at an angle to the first axis, and the direction of increasing angle."""
    x, towards = torch.zeros(dim, dtype=torch.float64), torch.zeros(dim, dtype=torch.float64)
    x[0], x[1] = math.cos(angle), math.sin(angle)
    towards[0], towards[1] = -math.sin(angle), math.cos(angle)
    return x, towards


# Behavior shared by cosine and arcface


@HEADS
def test_logits_are_cosines_times_the_inverse_temperature(name):
    head, x = build_head(name, 6, 4, log_temperature=-2.0), torch.randn(5, 6)
    logits = math.exp(2.0) * cosines(x, head.weight)
    for training in (False, True):  # without a margin
        torch.testing.assert_close(head.train(training)(x, LABELS).logits.double(), logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head(x).embeddings, F.normalize(x, dim=-1))
    if name == "cosine":  # without a margin
        torch.testing.assert_close(head(x, LABELS).loss.double(), F.cross_entropy(logits, LABELS), rtol=1e-5, atol=1e-6)


# The margin


def plain_loss(x: Tensor, head: Head, margin: float) -> Tensor:
    """Cross-entropy with cos(theta + m), computed from the angle."""
    logits = cosines(x, head.weight)
    own = torch.arange(len(x)), LABELS
    logits[own] = (logits[own].acos() + margin).cos()
    return F.cross_entropy(head.log_temperature.double().neg().exp() * logits, LABELS)


@pytest.mark.parametrize(
    ("options", "margin"),
    [({}, 0.5), *(({"margin": m}, m) for m in (0.0, 0.3, 0.5, 1.2)), ({"margin": 0.3, "margin_warmup_epochs": 3}, 0.3)],
    ids=str,
)
def test_loss_is_the_cross_entropy_with_the_margin_added_to_the_angle(options, margin):
    head, x = build_head("arcface", 6, 4, log_temperature=-2.0, **options), torch.randn(5, 6)
    x += 2 * F.normalize(head.weight.detach(), dim=-1)[LABELS]  # keeps all angles below pi - m
    torch.testing.assert_close(head(x, LABELS).loss.double(), plain_loss(x, head, margin), rtol=1e-5, atol=1e-5)


def arcface_at(angle: float, margin: float = 0.5) -> tuple[Tensor, Tensor]:
    """Loss of an embedding at an angle to its class, with two antipodal classes, and its angular derivative."""
    head = build_head("arcface", 3, 2, margin=margin).double()
    head.weight.data = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]], dtype=torch.float64)
    x, towards = at_angle(angle)
    x.requires_grad_()
    loss = head(x[None], torch.tensor([0])).loss
    loss.backward()
    return loss.detach(), x.grad @ towards


def plain_slope(angle: float, margin: float) -> float:
    """Derivative of log(1 + exp(l - cos(theta + m))) with respect to theta; l = -cos(theta) is the other logit."""
    guarded = angle >= math.pi - margin
    own = math.cos(angle) - margin * math.sin(margin) if guarded else math.cos(angle + margin)
    by_angle = math.sin(angle) + (math.sin(angle) if guarded else math.sin(angle + margin))
    return by_angle / (1 + math.exp(own + math.cos(angle)))


@pytest.mark.parametrize("margin", [0.1, 0.5, 1.5])
@pytest.mark.parametrize("angle", [1e-6, 1e-3, 0.5, 1.5, 3.1, math.pi - 1e-3, math.pi - 1e-6])
def test_gradient_is_accurate_at_all_angles(angle, margin):
    assert arcface_at(angle, margin)[1].item() == pytest.approx(plain_slope(angle, margin), rel=1e-6, abs=1e-9)


@given(st.floats(0, math.pi), st.floats(0, math.pi), st.floats(0, math.pi / 2))
def test_loss_increases_with_the_angle(first, second, margin):
    near, far = sorted((first, second))
    assert arcface_at(near, margin)[0] <= arcface_at(far, margin)[0] + 1e-12


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_embedding_at_the_class_weight_or_its_antipode_has_a_finite_gradient(dtype, sign):
    """In float32 rounding turns a sine of 0 into 1e-8, which must not be a divisor."""
    head = build_head("arcface", 64, 100, margin=0.5).to(dtype)
    x = (sign * head.weight.detach()).requires_grad_()
    loss = head(x, torch.arange(100)).loss
    loss.backward()
    assert loss.isfinite()
    assert head.weight.grad.isfinite().all()
    # The angular derivative is bounded by the sum over the true and other classes, divided by the batch size.
    assert (100 * x.grad.norm(dim=-1) * x.detach().norm(dim=-1)).max() < 2.0
    for classes, expected in ((1, 0.0), (2, math.log1p(math.exp(-math.cos(0.5))))):
        head = build_head("arcface", 3, classes, margin=0.5)
        head.weight.data = torch.eye(3)[:classes]
        assert head(torch.eye(3)[:1], torch.tensor([0])).loss.item() == pytest.approx(expected)


def test_margin_is_zero_until_the_end_of_warmup():
    head, x = build_head("arcface", 6, 4, margin=0.5, margin_warmup_epochs=3), torch.randn(5, 6)
    x += 2 * F.normalize(head.weight.detach(), dim=-1)[LABELS]
    for epoch, margin in ((0, 0.0), (2, 0.0), (3, 0.5), (99, 0.5), (1, 0.0)):
        head.set_epoch(epoch)
        torch.testing.assert_close(head(x, LABELS).loss.double(), plain_loss(x, head, margin), rtol=1e-5, atol=1e-5)


# The scale


@HEADS
def test_numeric_scale_is_saved_and_not_trained(name):
    head = sphere_nn.build_head(name, 6, 4, scale=30.0)
    assert [key for key, _ in head.named_parameters()] == ["weight"]
    assert "log_temperature" not in head.parameter_options()
    for other in (sphere_nn.build_head(name, 6, 4, scale=2.0), sphere_nn.build_head(name, 6, 4, scale=2.0).double()):
        other.load_state_dict(head.state_dict())
        assert other.inverse_temperature().item() == pytest.approx(30.0, rel=1e-6)
        other.reset_parameters()
        assert other.inverse_temperature().item() == pytest.approx(2.0, rel=1e-6)


@HEADS
def test_a_learned_scale_is_the_default_of_cosine_and_has_a_gradient_also_in_half_precision(name):
    scale = {"cosine": 16.0, "arcface": 64.0}[name]
    assert ("log_temperature" in sphere_nn.build_head(name, 6, 4).parameter_options()) == (name == "cosine")
    for options in [{"scale": "learned"}, *[{}] * (name == "cosine")]:
        head = sphere_nn.build_head(name, 6, 4, **options)
        head.log_temperature.data.fill_(9.0)
        head.reset_parameters()
        head.bfloat16().inverse_temperature().backward()
        assert head.log_temperature.grad.item() == pytest.approx(-scale, rel=0.01)


@HEADS
@pytest.mark.parametrize(("dtype", "digits"), [(torch.float64, 1e-15), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)])
def test_numeric_scale_multiplies_the_cosines_and_is_exact_after_a_conversion(name, dtype, digits):
    for scale in (10.0, 64.0, 7.3, 0.5):
        head, x = sphere_nn.build_head(name, 6, 4, scale=scale), torch.randn(5, 6)
        torch.testing.assert_close(head(x).logits.double(), scale * cosines(x, head.weight), rtol=1e-5, atol=1e-5)
        assert head.to(dtype).inverse_temperature().item() == pytest.approx(scale, rel=digits)
