import importlib
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from scipy.integrate import quad
from scipy.special import hyp0f1

from hf_sphere.metrics import alignment, effective_dimension, uniformity

MODULE = importlib.import_module("hf_sphere.metrics.geometry")  # the function has the same name


def unit(count, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, dim, dtype=torch.float64, generator=generator), dim=1)


def plain_alignment(points, labels):
    """The definition, one pair at a time."""
    unit = [point / point.norm() for point in points]
    pairs = itertools.combinations(range(len(points)), 2)
    values = [(unit[i] - unit[j]).norm().item() ** 2 for i, j in pairs if labels[i] == labels[j]]
    return sum(values) / len(values)


def plain_uniformity(points, t):
    unit = [point / point.norm() for point in points]
    values = [math.exp(-t * (x - y).norm().item() ** 2) for x, y in itertools.combinations(unit, 2)]
    return math.log(sum(values) / len(values))


class TestAlignment:
    @given(seed=st.integers(0, 10**6), dim=st.integers(1, 5))
    def test_alignment_is_the_mean_over_pairs_of_a_class(self, seed, dim):
        generator = torch.Generator().manual_seed(seed)
        points = torch.randn(20, dim, dtype=torch.float64, generator=generator)
        labels = torch.randint(-1, 3, (20,), generator=generator)
        assert alignment(points, labels) == pytest.approx(plain_alignment(points, labels))

    def test_collapsed_and_opposite_points_have_the_extremes_and_near_ones_are_accurate(self):
        points = torch.eye(3).repeat_interleave(5, 0) * torch.rand(15, 1)
        assert alignment(points, torch.arange(3).repeat_interleave(5)) == pytest.approx(0.0, abs=1e-12)
        assert alignment([[1.0, 0.0], [-2.0, 0.0]], [4, 4]) == pytest.approx(4.0)
        angle = 1e-7
        points = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64)
        assert alignment(points, torch.zeros(2).long()) == pytest.approx(angle**2, rel=1e-6)


class TestUniformity:
    @given(seed=st.integers(0, 10**6), t=st.sampled_from([0.5, 2.0, 7.0]), dim=st.integers(1, 5))
    def test_uniformity_is_the_log_mean_over_all_pairs(self, seed, t, dim):
        generator = torch.Generator().manual_seed(seed)
        points = torch.randn(20, dim, dtype=torch.float64, generator=generator)
        assert uniformity(points, t=t) == pytest.approx(plain_uniformity(points, t))

    @pytest.mark.parametrize("dim", [2, 3, 16])
    def test_uniform_points_match_the_integral(self, dim):
        # The mean of exp(2 t cos) over the sphere, by integration and as a hypergeometric function.
        t = 2.0
        mass = quad(lambda angle: math.sin(angle) ** (dim - 2), 0, math.pi)[0]
        mean = (
            quad(lambda angle: math.exp(2 * t * math.cos(angle)) * math.sin(angle) ** (dim - 2), 0, math.pi)[0] / mass
        )
        assert mean == pytest.approx(hyp0f1(dim / 2, t**2))
        assert uniformity(unit(4000, dim)) == pytest.approx(math.log(mean) - 2 * t, abs=0.02)

    @pytest.mark.parametrize("count", [2, 5, 100])
    def test_equally_spaced_points_on_the_circle_match_the_closed_form(self, count):
        turn = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
        values = [math.exp(-8 * math.sin(math.pi * k / count) ** 2) for k in range(1, count)]
        expected = math.log(sum(values) / (count - 1))
        assert uniformity(torch.stack([turn.cos(), turn.sin()], 1)) == pytest.approx(expected)

    def test_equal_points_have_the_largest_value_and_opposite_ones_the_smallest_despite_underflow(self):
        assert uniformity(torch.ones(10, 4)) == pytest.approx(0.0, abs=1e-12)
        assert uniformity([[1.0, 0.0], [-1.0, 0.0]], t=1000.0) == pytest.approx(-4000.0)

    def test_the_block_size_has_no_effect(self, monkeypatch):
        points = unit(61, 3)
        whole = uniformity(points)
        monkeypatch.setattr(MODULE, "_BLOCK_NUMEL", 200)
        assert uniformity(points) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("measure", [uniformity, lambda points: alignment(points, torch.zeros(len(points)).long())])
class TestBoth:
    def test_norms_have_no_effect_and_every_dtype_is_computed_in_float64(self, measure):
        points = unit(20, 4)
        for scale in (1e-200, 1e200):
            assert measure(scale * points) == pytest.approx(measure(points))
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert measure(points.to(dtype)) == measure(points.to(dtype).double())


def plain_dimension(points):
    """The definition: eigenvalues of the covariance."""
    eigenvalues = torch.linalg.eigvalsh(torch.atleast_2d(torch.cov(points.T)))
    return (eigenvalues.sum() ** 2 / eigenvalues.square().sum()).item()


@given(seed=st.integers(0, 10**6), count=st.integers(2, 30), dim=st.integers(1, 12))
def test_the_effective_dimension_is_the_participation_ratio_of_the_eigenvalues(seed, count, dim):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, dim, dtype=torch.float64, generator=generator) + 3.0
    assert effective_dimension(points) == pytest.approx(plain_dimension(points))


def test_isotropic_equal_and_points_on_a_line_or_of_known_variances_have_a_known_dimension():
    for dim in (1, 2, 7):
        assert effective_dimension(torch.cat([torch.eye(dim), -torch.eye(dim)])) == pytest.approx(dim)
    for count in (1, 5):
        assert effective_dimension(torch.full((count, 3), 0.1)) == 0.0
    line = torch.linspace(-1, 1, 20)[:, None] * torch.tensor([1.0, -2.0, 0.5]) + torch.tensor([5.0, 0.0, 1.0])
    assert effective_dimension(line) == pytest.approx(1.0)
    points = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 3**0.5], [0.0, -(3**0.5)]])
    assert effective_dimension(points) == pytest.approx((3 + 1) ** 2 / (3**2 + 1**2))


def test_scale_and_mean_have_no_effect():
    points = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for scale in (1e-300, 1e-150, 1e150, 1e300):
        assert effective_dimension(scale * points) == pytest.approx(effective_dimension(points))
    assert effective_dimension(points + 1e6) == pytest.approx(effective_dimension(points), rel=1e-6)
