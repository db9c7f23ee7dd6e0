import math
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor

from hf_sphere.geometry import log_vmf_normalizer
from hf_sphere.nn import class_softmax
from hf_sphere.nn.class_softmax import log_class_sum

DIMS = pytest.mark.parametrize("dim", [2, 3, 16, 64])


class Problem(NamedTuple):
    """Arguments of the sum; the points are given by their angles to the mean directions.

    Attributes:
        direction: (B, d), unit vectors.
        angle: (S, B).
        tangents: (ceil(S/2), B, d), unit vectors across the directions.
        weights: (K, d).
        beta: Scalar.
    """

    direction: Tensor
    angle: Tensor
    tangents: Tensor
    weights: Tensor
    beta: Tensor

    @property
    def points(self) -> Tensor:
        """Points (S, B, d); the second half uses the negated tangents of the first half."""
        tangents = torch.cat([self.tangents, -self.tangents])[: len(self.angle)]
        return self.angle.cos()[..., None] * self.direction + self.angle.sin()[..., None] * tangents

    def turned_to(self, direction: Tensor) -> "Problem":
        """Return the problem with new directions and the tangents rotated along with them."""
        products = (self.tangents * direction).sum(-1, keepdim=True)
        axis = (self.direction + direction) / (1 + (self.direction * direction).sum(-1, keepdim=True))
        return self._replace(direction=direction, tangents=self.tangents - products * axis)

    def to(self, dtype: torch.dtype) -> "Problem":
        return Problem(*(value.to(dtype) for value in self))


def problem(
    batch: int, samples: int, classes: int, dim: int, size: float = 1.0, beta: float = 3.0, seed: int = 0
) -> Problem:
    """Random problem in float64, with class concentrations of about `size * sqrt(dim)`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    direction = F.normalize(normal(batch, dim), dim=-1)
    tangents = normal((samples + 1) // 2, batch, dim)
    tangents = F.normalize(tangents - (tangents * direction).sum(-1, keepdim=True) * direction, dim=-1)
    angle = math.pi * torch.rand(samples, batch, dtype=torch.float64, generator=generator)
    return Problem(direction, angle, tangents, size * normal(classes, dim), torch.tensor(beta, dtype=torch.float64))


def ours(of: Problem) -> Tensor:
    labels = torch.zeros(len(of.direction), dtype=torch.int64)
    return log_class_sum(of.direction, of.angle.cos(), of.angle.sin(), of.tangents, of.weights, of.beta, labels)[0]


def plain(of: Problem) -> Tensor:
    """Evaluate the formula literally, with one vector sum per pair of point and class."""
    dim = of.weights.shape[1]
    together = (of.weights + of.beta * of.points[..., None, :]).norm(dim=-1)
    return (log_vmf_normalizer(of.weights.norm(dim=-1), dim) - log_vmf_normalizer(together, dim)).logsumexp(-1)


def gradients(function: Callable[[Problem], Tensor], of: Problem) -> list[Tensor]:
    """Gradients of a weighted sum of the values; tangential ones for the directions."""
    direction, angle, weights, beta = (
        value.detach().requires_grad_() for value in (of.direction, of.angle, of.weights, of.beta)
    )
    moved = of._replace(angle=angle, weights=weights, beta=beta)
    # Our function includes the rotation of the tangents; the formula needs it explicitly.
    moved = moved.turned_to(direction) if function is plain else moved._replace(direction=direction)
    values = function(moved)
    scale = torch.linspace(0.5, 1.5, values.numel(), dtype=values.dtype).view_as(values)
    by_direction, *others = torch.autograd.grad((values * scale).sum(), [direction, angle, weights, beta])
    return [by_direction - (by_direction * of.direction).sum(-1, keepdim=True) * of.direction, *others]


@DIMS
@pytest.mark.parametrize("classes", [1, 7])
@pytest.mark.parametrize(("batch", "samples"), [(1, 1), (1, 2), (2, 3)])
def test_it_and_its_gradient_match_the_formula(batch, samples, classes, dim):
    of = problem(batch, samples, classes, dim)
    before = [value.clone() for value in of]
    torch.testing.assert_close(ours(of), plain(of), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(ours, of), gradients(plain, of))
    assert all(torch.equal(value, kept) for value, kept in zip(of, before, strict=True))


@given(
    st.integers(2, 70), st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.floats(-3, 3), st.floats(-3, 2.3),
    st.integers(0, 999),
)  # fmt: skip
def test_it_matches_the_formula_at_any_concentration_and_temperature(dim, classes, batch, samples, size, beta, seed):
    of = problem(batch, samples, classes, dim, 10**size, 10**beta, seed)
    torch.testing.assert_close(ours(of), plain(of), rtol=1e-10, atol=1e-10)


# Numerically difficult values

HARD = [(size, beta) for size in (1e-6, 3.0, 1e4) for beta in (1e-3, 200.0)]
"""Diffuse, typical and concentrated classes, each with a low and a high inverse temperature."""


@pytest.mark.parametrize("dim", [2, 3, 128])
@pytest.mark.parametrize(("size", "beta"), HARD)
def test_float32_is_close_to_float64_and_has_finite_gradients(size, beta, dim):
    """Concentrations have relative rounding errors of 1e-7, which limits the accuracy of their sums."""
    of = problem(3, 4, 7, dim, size, beta).to(torch.float32)
    scale = max(1.0, size * dim**0.5)
    torch.testing.assert_close(ours(of).double(), plain(of.to(torch.float64)), rtol=1e-5, atol=2e-6 * scale)
    assert all(gradient.isfinite().all() for gradient in gradients(ours, of))
    of = problem(5, 4, 30, dim, 3.0, 16.0).to(torch.float32)
    for found, expected in zip(gradients(ours, of), gradients(plain, of.to(torch.float64)), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


def test_zero_concentration_class_is_uniform_with_zero_gradient():
    of = problem(5, 2, 1, 3)._replace(weights=torch.zeros(1, 3, dtype=torch.float64))
    # The mean of exp(beta x.y) over the sphere in three dimensions is sinh(beta) / beta.
    torch.testing.assert_close(ours(of), (of.beta.sinh() / of.beta).log().expand(2, 5))
    by_direction, by_angle, _, by_beta = gradients(ours, of)
    torch.testing.assert_close(by_direction, torch.zeros_like(by_direction))
    torch.testing.assert_close(by_angle, torch.zeros_like(by_angle))

    torch.testing.assert_close(by_beta, 10 * (1 / of.beta.tanh() - 1 / of.beta))
    # Without a concentration of the points, every class counts one.
    of = problem(5, 2, 7, 16, beta=0.0)
    torch.testing.assert_close(ours(of), torch.full((2, 5), 7.0).double().log())


def test_cancelling_class_and_point_give_finite_values_and_gradients():
    """If concentration and inverse temperature cancel, only the rounding error remains."""
    of = problem(200, 1, 1, 16, beta=30.0).to(torch.float32)
    of = of._replace(weights=-30 * of.points[0])
    assert ours(of).isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(ours, of))


def test_points_at_the_mean_direction_or_its_antipode_have_finite_gradients():
    of = problem(5, 4, 7, 16)
    of = of._replace(angle=torch.tensor([0.0, math.pi] * 2, dtype=torch.float64)[:, None].expand(4, 5))
    torch.testing.assert_close(ours(of), plain(of))
    torch.testing.assert_close(gradients(ours, of), gradients(plain, of))


# Blocks


@pytest.mark.parametrize("block", [1, 32 * 40, 33 * 40, 2**20])
def test_block_size_does_not_change_values_or_gradients(block, monkeypatch):
    of = problem(8, 5, 100, 16)
    monkeypatch.setitem(class_softmax.SAMPLE_BLOCK, "cpu", block)
    blocks = list(class_softmax.class_blocks(100, 40, torch.device("cpu"), class_softmax.SAMPLE_BLOCK))
    assert len(blocks) == {2**20: 1}.get(block, 4)
    torch.testing.assert_close(ours(of), plain(of), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(ours, of), gradients(plain, of))


def test_block_of_negligible_classes_adds_zero(monkeypatch):
    """It contributes exp(-1000) of the sum, which is zero and not NaN."""
    monkeypatch.setitem(class_softmax.SAMPLE_BLOCK, "cpu", 32)
    of = problem(1, 1, 1, 3, beta=1e3)
    of = of._replace(weights=torch.cat([1e4 * of.points[0], -1e4 * of.points[0].expand(40, 3)]))
    torch.testing.assert_close(ours(of), plain(of))
    _, _, by_weights, _ = gradients(ours, of)
    assert (by_weights[1:] == 0).all()


# Autograd


def test_second_derivative_also_as_part_of_a_sum_is_rejected():
    """Otherwise a gradient penalty added to a loss would be silently ignored."""
    of = problem(5, 2, 7, 16)
    value = ours(of._replace(weights=of.weights.requires_grad_())).sum()
    (gradient,) = torch.autograd.grad(value, of.weights, create_graph=True)
    for total in (gradient.sum(), value + gradient.square().sum()):
        with pytest.raises(RuntimeError, match="can be differentiated once"):
            total.backward(retain_graph=True)
    assert (of.direction.grad, of.angle.grad, of.beta.grad) == (None, None, None)


# Memory

MEASURED = """
import resource, torch
from hf_sphere.nn import build_head

def high_water():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

torch.set_num_threads(1)
head = build_head("vmf", 512, 3_000, num_samples=10, kappa_confidence=0.7)
images = torch.randn(128, 512, requires_grad=True)
head.initialize_from_data(images)
build_head("vmf", 512, 3)(images[:3], torch.arange(3)).loss.backward()
before = high_water()
head(images, torch.arange(128)).loss.backward()
print(high_water() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems count the high-water mark in other units")
def test_three_thousand_classes_take_less_than_300_megabytes():
    """128 images with 10 points each: matrices of 15 MB, three kept for the gradient; all pairs would take 8 GB."""
    result = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 3e8
