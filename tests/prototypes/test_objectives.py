import math

import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from hf_sphere.prototypes import ordering
from hf_sphere.prototypes.methods.placement_task import minimize_on_sphere
from hf_sphere.prototypes.ordering import mean_nearest_cosine, soft_separation

SHAPES = [(2, 2), (5, 3), (37, 4)]


def unit(count, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, dim, dtype=torch.float64, generator=generator), dim=1)


def off_diagonal(points):
    """Return the cosines of each point with the others, (K, K - 1)."""
    count = len(points)
    return (points @ points.T)[~torch.eye(count, dtype=torch.bool)].view(count, count - 1)


def plain_soft_separation(points, sharpness):
    return torch.logsumexp(sharpness * off_diagonal(points).flatten(), dim=0) / sharpness


def plain_mean_nearest_cosine(points):
    return off_diagonal(points).max(dim=1).values.mean()


@pytest.fixture(params=[None, 40, 1], ids=["one block", "several rows per block", "one row per block"])
def blocks(request, monkeypatch):
    """Set the number of cosines per block; the last block is incomplete."""
    if request.param:
        monkeypatch.setattr(ordering, "BLOCK_ENTRIES", request.param)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sharpness", [0.5, 30.0, 1e4])
def test_soft_separation_is_the_log_sum_exp_of_all_cosines(shape, sharpness, blocks):
    points = unit(*shape).requires_grad_()
    expected = plain_soft_separation(points, sharpness)
    value, gradient = soft_separation(points.detach(), sharpness)
    assert value == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, points)[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_mean_nearest_cosine_matches_the_loss_of_the_paper(shape, blocks):
    points = unit(*shape).requires_grad_()
    expected = plain_mean_nearest_cosine(points)
    value, gradient = mean_nearest_cosine(points.detach())
    assert value == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, points)[0], rtol=1e-12, atol=1e-14)


@given(
    count=st.integers(2, 20), dim=st.integers(2, 8), sharpness=st.floats(1e-2, 1e9), seed=st.integers(0, 1000)
)  # fmt: skip
def test_soft_separation_is_slightly_above_the_largest_cosine(count, dim, sharpness, seed):
    points = unit(count, dim, seed)
    largest = off_diagonal(points).max().item()
    value, gradient = soft_separation(points, sharpness)
    assert gradient.isfinite().all()
    assert largest - 1e-12 <= value <= largest + math.log(count * (count - 1)) / sharpness + 1e-12


def test_minimizer_uses_the_gradient_of_the_normalized_points(monkeypatch):
    functions = []
    minimize = scipy.optimize.minimize
    monkeypatch.setattr(
        scipy.optimize, "minimize", lambda function, *given, **options: functions.append(function)
        or minimize(function, *given, **options)
    )  # fmt: skip
    minimize_on_sphere(lambda points: soft_separation(points, 7.0), unit(6, 3), max_iterations=1)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    expected = plain_soft_separation(F.normalize(x, dim=1), 7.0)
    value, slope = functions[0](x.detach().flatten().numpy())
    assert value == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(torch.from_numpy(slope).view(6, 3), torch.autograd.grad(expected, x)[0])
