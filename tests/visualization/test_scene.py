"""What circles, spheres and pages of embeddings have in common: projection, names of classes, and checks."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from clustered import other_unit as unit
from hypothesis import given, strategies as st

from hf_sphere.visualization import Panel
from hf_sphere.visualization.figures import new_figure, shorten
from hf_sphere.visualization.scene import Scene, mark_of, place_names, project_to_great_sphere


@pytest.mark.parametrize("dim", [2, 3])
def test_points_on_a_small_sphere_keep_their_angles(dim):
    points = unit(50, dim)
    frame = torch.linalg.qr(torch.randn(8, dim, dtype=torch.float64)).Q
    shown, _, kept = project_to_great_sphere(7.0 * points @ frame.T, dim)
    torch.testing.assert_close(shown @ shown.T, points @ points.T)
    assert kept == pytest.approx(1.0)


def test_the_projection_keeps_the_most_of_the_second_moment():
    points = unit(200, 6) * torch.tensor([3.0, 2.0, 1.5, 1.0, 0.5, 0.2], dtype=torch.float64)
    shown, basis, kept = project_to_great_sphere(points)
    directions = F.normalize(points, dim=1)
    assert kept == pytest.approx(torch.linalg.svdvals(directions)[:3].square().sum().item() / 200)
    torch.testing.assert_close(shown, F.normalize(directions @ basis, dim=1))


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_norms_have_no_effect_at_any_scale(scale):
    points = torch.randn(50, 8, dtype=torch.float64)
    torch.testing.assert_close(project_to_great_sphere(scale * points)[0], project_to_great_sphere(points)[0])


@given(seed=st.integers(0, 10**6), count=st.integers(1, 20))
def test_names_are_inside_and_do_not_overlap_and_those_without_room_are_omitted(seed, count):
    figure = new_figure(4.0, 4.0)
    axes = figure.subplots()
    figure.draw_without_rendering()
    generator = torch.Generator().manual_seed(seed)
    places = 0.5 + 0.3 * torch.randn(count, 2, generator=generator)
    place_names(axes, places, range(count), [f"name {index}" for index in range(count)], 13.0)
    assert axes.texts
    frame = axes.get_window_extent()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert all(frame.x0 <= box.x0 + 1 and box.x1 <= frame.x1 + 1 for box in boxes)
    assert not any(first.overlaps(second) for first, second in itertools.combinations(boxes, 2))
    if count == 1 and places.min() > 0.2 and places.max() < 0.8:
        assert axes.texts[0].get_position() == pytest.approx(places[0].tolist())


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("x" * 24, "x" * 24),
        ("x" * 25, "x" * 24 + "\u2026"),
        ("tench, Tinca tinca, and other fish", "tench, Tinca tinca, and\u2026"),
        ("two\nlines", "two lines"),
    ],
)
def test_a_long_name_ends_with_an_ellipsis(name, short):
    assert shorten(name) == short


def test_thirty_classes_have_distinct_markers():
    assert len({mark_of(index) for index in range(30)}) == 30


@pytest.mark.parametrize(
    ("changed", "dim", "message"),
    [
        ({"points": torch.ones(3, 1)}, 2, r"points of 1 coordinate\(s\) cannot be shown in 2 dimensions"),
        ({"points": torch.ones(3, 2)}, 3, r"points of 2 coordinate\(s\) cannot be shown in 3 dimensions"),
        ({"points": torch.zeros(3, 2)}, 2, "a zero vector has no direction; 3 of 3 points"),
        ({"points": torch.zeros(3, 5)}, 3, "a zero vector has no direction; 3 of 3 points"),
        ({"points": torch.full((3, 5), torch.nan)}, 3, "points must be finite; 3 of 3 are not, the first at index 0"),
        ({"points": torch.empty(0, 5), "labels": torch.empty(0).long()}, 3, r"points must have the shape \(N, d\)"),
        ({"points": torch.ones(3)}, 3, r"points must have the shape \(N, d\)"),
        ({"labels": torch.tensor([0, 1, 3])}, 3, "labels must be from 0 to 2, one per class name; got 0 to 3"),
        ({"directions": torch.eye(4, 3)[[0, 1, 2, 0]]}, 3, "directions must be one per class, 3; got 4"),
        ({"labels": torch.tensor([-1, 1, 2])}, 3, "labels must be from 0 to 2, one per class name; got -1 to 2"),
        ({"labels": torch.tensor([0, 1])}, 3, r"labels must have the shape \(3,\), one per embedding; got \(2,\)"),
        ({"labels": torch.tensor([0.0, 1.0, 2.0])}, 3, "labels must be integers; got torch.float32"),
        ({"directions": torch.zeros(3, 5)}, 3, "a zero vector has no direction; 3 of 3 directions"),
    ],
)
def test_content_that_cannot_be_drawn_is_refused(changed, dim, message):
    panel = {"points": torch.randn(3, 5), "labels": torch.arange(3)} | changed
    with pytest.raises((TypeError, ValueError), match=message):
        Scene(Panel(**panel), ["a", "b", "c"], dim)
