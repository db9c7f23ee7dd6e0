import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, strategies as st

from hf_sphere.metrics import class_angles
from hf_sphere.metrics.geometry import _draw_pairs


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
