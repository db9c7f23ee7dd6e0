import math

import pytest
import torch
from hypothesis import given, strategies as st

from hf_sphere.metrics import class_overlap, geometry


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


def test_equal_points_overlap_if_they_are_of_two_classes():
    counts = class_overlap(torch.ones(5, 3), torch.zeros(5, dtype=torch.long), torch.zeros(5), threshold=10.0)
    assert counts == {"num_overlaps": 0, "num_pairs": 0, "num_errors": 0, "ratio": 0.0}
    labels, correct = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([1, 0, 1, 1, 0])
    counts = class_overlap(torch.ones(5, 3), labels, correct, threshold=1e-9)
    assert counts == {"num_overlaps": 5, "num_pairs": 6, "num_errors": 2, "ratio": 0.4}


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_norms_do_not_affect_angular_overlap(scale):
    points, labels, correct = torch.randn(50, 3), torch.arange(50) % 3, torch.arange(50) % 2
    scaled = points * torch.logspace(0, math.log10(scale), 50)[:, None]
    assert class_overlap(scaled, labels, correct, threshold=20.0) == class_overlap(
        points, labels, correct, threshold=20.0
    )
