"""Losses whose expectation is 0 under the uniform distribution on the sphere."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st
from scipy.special import eval_gegenbauer
from torch import Tensor

from hf_sphere.losses import HeatKernelLoss, KoLeoLoss, SlicedUniformityLoss
from hf_sphere.losses.uniformity import expected_log_distance
from hf_sphere.nn import class_softmax

MAKE = {
    "heat": HeatKernelLoss,
    "koleo": KoLeoLoss,
    "sliced": SlicedUniformityLoss,
}


@pytest.fixture
def small_blocks(monkeypatch):
    """Compute with several blocks also for small batches."""
    monkeypatch.setattr(class_softmax, "SMALLEST_BLOCK", 2)
    monkeypatch.setitem(class_softmax.BLOCK, "cpu", 8)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(("count", "dim"), [(2, 2), (5, 3), (30, 16), (40, 384), (10, 1024)])
def test_expectation_under_uniform_samples_is_zero(name, count, dim):
    torch.manual_seed(0)
    loss, repeats = MAKE[name](), 400
    values = torch.stack([loss(torch.randn(count, dim, dtype=torch.float64)) for _ in range(repeats)])
    assert abs(values.mean()) < 4 * values.std() / math.sqrt(repeats)
    if count == 30:  # a half of the sphere
        x = torch.randn(200, dim)
        assert loss(torch.cat([x[:, :1].abs(), x[:, 1:]], 1)) > loss(x)


def plain_heat(x: Tensor) -> Tensor:
    points, dim = F.normalize(x, dim=-1), x.shape[1]
    time = math.log(max(dim / 4, 2)) / (dim - 1)
    cosines, total = (points @ points.T)[~torch.eye(len(x), dtype=torch.bool)], 0.0
    for k in range(1, 80):
        if dim == 2:
            harmonics = 2 * torch.cos(k * cosines.acos())
        else:  # the addition theorem
            harmonics = torch.tensor((2 * k + dim - 2) / (dim - 2) * eval_gegenbauer(k, dim / 2 - 1, cosines.numpy()))
        total = total + harmonics * math.exp(-time * k * (k + dim - 2))
    return total.mean()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([2, 3, 5, 64]), st.integers(2, 9))
def test_heat_kernel_is_its_series(small_blocks, dim, count):
    x = torch.randn(count, dim, dtype=torch.float64)
    torch.testing.assert_close(HeatKernelLoss()(x), plain_heat(x), rtol=1e-9, atol=1e-12)


def test_default_heat_kernel_is_nearly_exponential_in_many_dimensions():
    cosines = torch.linspace(-0.9, 0.9, 7, dtype=torch.float64)
    values = []
    for cosine in cosines:
        x = torch.zeros(2, 4096, dtype=torch.float64)
        x[0, 0], x[1, 0], x[1, 1] = 1, cosine, (1 - cosine**2).sqrt()
        values.append(HeatKernelLoss()(x) + 1)
    torch.testing.assert_close(torch.stack(values), (4 * cosines).exp(), rtol=0.03, atol=0)


def test_koleo_without_its_expectation_is_that_of_the_paper(small_blocks):
    x = torch.randn(9, 4, dtype=torch.float64)
    points = F.normalize(x, dim=-1)
    distances = torch.cdist(points, points).fill_diagonal_(torch.inf).amin(1)
    torch.testing.assert_close(KoLeoLoss()(x), expected_log_distance(9, 4) - distances.log().mean())


@pytest.mark.parametrize("count", [2, 3, 50, 8192])
def test_expected_distance_on_the_ordinary_sphere_is_that_of_uniform_heights(count):
    """The smallest of n - 1 uniform numbers has the mean logarithm -(1 + 1/2 + ... + 1/(n - 1))."""
    expected = math.log(2) - sum(1 / k for k in range(1, count)) / 2
    assert expected_log_distance(count, 3) == pytest.approx(expected, abs=1e-12)


def test_sliced_distance_on_the_circle_is_the_best_rotation_of_a_regular_polygon():
    """Transport on a circle to the uniform measure: in the order of the points, at the best shift."""
    turns = torch.tensor([0.05, 0.3, 0.32, 0.9], dtype=torch.float64)
    x = torch.stack([(2 * math.pi * turns).cos(), (2 * math.pi * turns).sin()], dim=1)
    q = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    best = min(
        (turns.roll(-k)[(q * 4).long()] + (q * 4 >= 4 - k) - q - shift).square().mean()
        for k in range(4)
        for shift in torch.linspace(-1, 1, 2001, dtype=torch.float64)
    )
    loss = SlicedUniformityLoss()(x)
    torch.testing.assert_close(loss + 1 / 48, best, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MAKE)
def test_gradients_pass_gradcheck(name, small_blocks):
    x, loss = torch.randn(6, 4, dtype=torch.float64, requires_grad=True), MAKE[name]()

    def of(x: Tensor) -> Tensor:
        torch.manual_seed(0)  # of the circles
        return loss(x)

    assert torch.autograd.gradcheck(of, [x])


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(name, dtype):
    x, loss = torch.randn(6, 4).to(dtype), MAKE[name]()
    x[5] = 0  # which has no direction
    x[1] = x[0]
    inputs, values = x.clone().requires_grad_(), []
    with torch.autocast("cpu", torch.bfloat16):
        for some in (inputs, x.float()):
            torch.manual_seed(0)
            values.append(loss(some))
    values[0].backward()
    assert torch.equal(*values)
    assert inputs.grad.isfinite().all()
