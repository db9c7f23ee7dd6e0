import itertools
import math
from collections import Counter

import pytest
import torch
from clustered import unit
from hypothesis import given, strategies as st
from scipy.integrate import quad
from scipy.special import hyp0f1

from hf_sphere.metrics import alignment, class_angles, class_overlap, effective_dimension, geometry, uniformity
from hf_sphere.metrics.geometry import _draw_pairs


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
        mass, total = (
            quad(lambda angle, s=s: math.exp(s * math.cos(angle)) * math.sin(angle) ** (dim - 2), 0, math.pi)[0]
            for s in (0, 2 * t)
        )
        mean = total / mass
        assert mean == pytest.approx(hyp0f1(dim / 2, t**2))
        assert uniformity(unit(4000, dim, dtype=torch.float64)) == pytest.approx(math.log(mean) - 2 * t, abs=0.02)

    def test_equal_points_have_the_largest_value_and_opposite_ones_the_smallest_despite_underflow(self):
        assert uniformity(torch.ones(10, 4)) == pytest.approx(0.0, abs=1e-12)
        assert uniformity([[1.0, 0.0], [-1.0, 0.0]], t=1000.0) == pytest.approx(-4000.0)

    def test_the_block_size_has_no_effect(self, monkeypatch):
        points = unit(61, 3, dtype=torch.float64)
        whole = uniformity(points)
        monkeypatch.setattr(geometry, "_BLOCK_NUMEL", 200)
        assert uniformity(points) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("measure", [uniformity, lambda points: alignment(points, torch.zeros(len(points)).long())])
class TestBoth:
    def test_norms_have_no_effect_and_every_dtype_is_computed_in_float64(self, measure):
        points = unit(20, 4, dtype=torch.float64)
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


def plain_angles(points, labels):
    """The definition, one pair at a time."""
    angles = {True: [], False: []}
    for (x, a), (y, b) in itertools.combinations(zip(points, labels.tolist(), strict=True), 2):
        angles[a == b].append(math.degrees(math.acos(max(-1.0, min(1.0, (x @ y / x.norm() / y.norm()).item())))))
    return sorted(angles[True]), sorted(angles[False])


@given(seed=st.integers(0, 10**6), dim=st.integers(2, 6))
def test_all_pairs_of_few_points_are_measured(seed, dim):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(15, dim, dtype=torch.float64, generator=generator)
    labels = torch.tensor([7, -2, 3]).repeat(5)
    within, between = class_angles(points, labels)
    expected = plain_angles(points, labels)
    assert within.sort().values.tolist() == pytest.approx(expected[0], abs=1e-5)
    assert between.sort().values.tolist() == pytest.approx(expected[1], abs=1e-5)


def test_right_straight_and_small_angles_are_accurate():
    points = torch.tensor([[1.0, 0.0], [-3.0, 0.0], [0.0, 2.0], [0.0, 5.0]])
    within, between = class_angles(points, torch.tensor([0, 0, 1, 1]))
    assert sorted(within.tolist()) == [pytest.approx(0.0), pytest.approx(180.0)]
    assert between.tolist() == [pytest.approx(90.0)] * 4
    points = torch.tensor([[1.0, 0.0], [math.cos(1e-9), math.sin(1e-9)], [0.0, 1.0]], dtype=torch.float64)
    within, _ = class_angles(points, torch.tensor([0, 0, 1]))
    assert within.tolist() == [pytest.approx(math.degrees(1e-9), rel=1e-6)]


@pytest.mark.parametrize("sizes", [[4, 1, 3], [1, 2, 1], [6, 2]])
def test_pairs_of_a_kind_are_sampled_uniformly(sizes):
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    size = torch.tensor(sizes)[labels]
    start = (torch.tensor(sizes).cumsum(0) - torch.tensor(sizes))[labels]
    for same, pairs in zip((True, False), _draw_pairs(start, size, 40_000, seed=0), strict=True):
        drawn = Counter(tuple(sorted(pair)) for pair in zip(*(numbers.tolist() for numbers in pairs), strict=True))
        possible = [p for p in itertools.combinations(range(len(labels)), 2) if (labels[p[0]] == labels[p[1]]) == same]
        assert sorted(drawn) == possible
        expected = 40_000 / len(possible)
        assert all(abs(count - expected) < 5 * expected**0.5 for count in drawn.values())


def test_a_sample_has_the_requested_size_the_mean_of_all_pairs_and_its_own_generator():
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(200, 3, generator=generator) + 2 * torch.eye(3).repeat(67, 1)[:200]
    labels = torch.randint(5, (200,), generator=generator)  # not sorted by class
    labels[::2] = torch.arange(200)[::2] % 3
    whole, sample = class_angles(points, labels), class_angles(points, labels, max_pairs=10_000)
    for exact, drawn in zip(whole, sample, strict=True):
        assert len(drawn) == 10_000
        assert drawn.mean().item() == pytest.approx(exact.mean().item(), abs=1.5)
    before = torch.get_rng_state()
    first, again, other = (class_angles(points, labels, max_pairs=100, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def plain_overlap(points, labels, correct, threshold: float, distance: str) -> dict[str, float]:
    """The definition, pair by pair."""
    points = points.double()
    pairs = []
    for i in range(len(points)):
        for j in range(i + 1, len(points)):
            apart = (points[i] - points[j]).norm().item()
            if distance == "angular":
                a, b = (points[k] / points[k].norm() for k in (i, j))
                apart = math.degrees(2 * math.asin(min(1.0, (a - b).norm().item() / 2)))
            if labels[i] != labels[j] and apart < threshold:
                pairs.append((i, j))
    overlapping = {index for pair in pairs for index in pair}
    errors = [index for index in overlapping if not correct[index]]
    ratio = len(errors) / len(overlapping) if overlapping else 0.0
    return {"num_overlaps": len(overlapping), "num_pairs": len(pairs), "num_errors": len(errors), "ratio": ratio}


@given(
    count=st.integers(1, 30),
    dim=st.integers(1, 5),
    classes=st.integers(1, 4),
    threshold=st.floats(0.01, 170),
    seed=st.integers(0, 2**31),
)
def test_counts_match_the_definition(count, dim, classes, threshold, seed):
    torch.manual_seed(seed)
    points, labels = torch.randn(count, dim) + 1, torch.randint(classes, (count,))
    correct = torch.rand(count) < 0.5
    for distance, bound in (("angular", threshold), ("euclidean", threshold / 50)):
        counts = class_overlap(points, labels, correct, threshold=bound, distance=distance)
        assert counts == pytest.approx(plain_overlap(points, labels, correct, bound, distance))


def test_points_at_exactly_the_threshold_do_not_overlap():
    points, labels = torch.tensor([[0.0], [2.0], [3.0]]), torch.arange(3)
    counts = class_overlap(points, labels, torch.ones(3), threshold=2.0, distance="euclidean")
    assert counts["num_pairs"] == 1  # 2 and 3


def test_counts_do_not_depend_on_blocking(monkeypatch):
    data = torch.randn(200, 3), torch.randint(4, (200,)), torch.rand(200) < 0.5
    whole = class_overlap(*data, threshold=12.0)
    monkeypatch.setattr(geometry, "_BLOCK_NUMEL", 200 * 7)
    assert class_overlap(*data, threshold=12.0) == whole
    assert 0 < whole["num_overlaps"] < 200
    counts = class_overlap(torch.ones(90, 4), torch.arange(90), torch.ones(90), threshold=0.1, distance="euclidean")
    assert counts["num_pairs"] == 90 * 89 / 2


@pytest.mark.parametrize("degrees", [1e-12, 1e-7, 1e-3, 1.0, 90.0, 179.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_angles_of_any_size_are_compared_exactly_with_the_threshold(degrees, dtype):
    angle = math.radians(degrees)
    points = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=dtype)
    exact = math.degrees(math.atan2(points[1, 1].item(), points[1, 0].item()))
    for factor, near in ((1 - 1e-6, 0), (1 + 1e-6, 2)):
        counts = class_overlap(points, torch.tensor([0, 1]), torch.ones(2), threshold=exact * factor)
        assert counts["num_overlaps"] == near


@pytest.mark.parametrize("distance", ["angular", "euclidean"])
def test_small_distances_are_accurate_far_from_the_origin(distance):
    """A distance of 1e-9 between points of norm 1e6 is lost in a difference of squares."""
    points = torch.tensor([[1e6, 0.0], [1e6, 1e-9], [1e6, 1e-7]], dtype=torch.float64)
    threshold = 2e-9 if distance == "euclidean" else math.degrees(2e-15)
    counts = class_overlap(points, torch.tensor([0, 1, 2]), torch.ones(3), threshold=threshold, distance=distance)
    assert (counts["num_overlaps"], counts["num_pairs"]) == (2, 1)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_norms_do_not_affect_angular_overlap(scale):
    points, labels, correct = torch.randn(50, 3), torch.arange(50) % 3, torch.arange(50) % 2
    scaled = points * torch.logspace(0, math.log10(scale), 50)[:, None]
    expected, found = (class_overlap(x, labels, correct, threshold=20.0) for x in (points, scaled))
    assert found == expected
