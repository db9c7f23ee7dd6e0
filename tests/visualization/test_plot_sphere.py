import math

import pytest
import torch
import torch.nn.functional as F
from clustered import other_unit as unit
from hypothesis import given, strategies as st

from hf_sphere.distributions import VonMisesFisher
from hf_sphere.visualization import Panel, View, plot_gallery, plot_sphere
from hf_sphere.visualization.scene import LARGEST_LEGEND, project_to_great_sphere
from hf_sphere.visualization.sphere import choose_view

ABC = ["a", "b", "c"]
EYE = torch.eye(3, dtype=torch.float64)


def names_in(axes) -> dict[str, object]:
    return {text.get_text(): text for text in axes.texts if text.get_text() not in ("front", "back")}


@given(elevation=st.floats(-90, 90), azimuth=st.floats(-360, 360))
def test_the_axes_of_a_view_are_right_handed(elevation, azimuth):
    axes = View(elevation, azimuth).axes()
    torch.testing.assert_close(axes.T @ axes, EYE)
    assert torch.linalg.det(axes).item() == pytest.approx(1.0)


def test_the_viewing_direction_follows_elevation_and_azimuth_and_sides_are_swapped_from_behind():
    axes = View(30.0, 60.0).axes()
    expected = torch.tensor([math.cos(math.pi / 6) / 2, math.cos(math.pi / 6) * math.sin(math.pi / 3), 0.5])
    torch.testing.assert_close(axes[:, 2], expected.double())
    torch.testing.assert_close(View(-30.0, 240.0).axes(), axes * torch.tensor([-1.0, 1.0, -1.0]))


def test_the_view_of_the_positive_octant_is_centered_and_shows_the_whole_hemisphere():
    view = choose_view(unit(100, 3).abs())
    torch.testing.assert_close(view.axes()[:, 2], torch.full((3,), 3**-0.5, dtype=torch.float64))
    assert (view.reach, view.both_sides) == (90.0, False)


def test_the_view_of_a_cluster_is_centered_and_close():
    middle = F.normalize(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), dim=0)
    view = choose_view(VonMisesFisher(middle, torch.tensor(200.0, dtype=torch.float64)).sample((500,)))
    assert view.axes()[:, 2] @ middle > 0.99
    assert 15 <= view.reach < 30


@pytest.mark.parametrize("concentration", [2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
def test_the_frame_does_not_cut_the_outline(concentration):
    middle = torch.tensor([0.6, -0.8, 0.0], dtype=torch.float64)
    points = VonMisesFisher(middle, torch.tensor(concentration, dtype=torch.float64)).sample((300,))
    axes = plot_sphere(points, torch.zeros(300).long(), ["a"]).axes[0]
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    corner = max(abs(low), abs(high)) * 2**0.5  # the outline is the unit circle
    assert corner < 1 or min(right, high, -left, -low) > 1


def test_points_on_all_sides_are_shown_from_both_sides():
    view = choose_view(unit(500, 3))
    assert (view.reach, view.both_sides) == (90.0, True)
    view = choose_view(torch.cat([EYE, -EYE]))  # without a mean direction
    assert (view.elevation, view.azimuth, view.both_sides) == (0.0, 0.0, True)


def test_legend_title_and_caption_describe_the_figure():
    points = torch.randn(30, 5)
    figure = plot_sphere(points, torch.arange(30) % 3, ABC, title="digits")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ABC
    kept = 100 * project_to_great_sphere(points)[2]
    caption = f"5 coordinates, projected on the three leading principal directions, which keep {kept:.0f} %"
    assert caption in figure.get_supxlabel()
    assert figure.get_suptitle() == "digits"


@pytest.mark.parametrize(
    ("points", "directions", "lines"),
    [
        (torch.cat([EYE, -EYE]), EYE, ["lines and diamonds: directions of the classes"]),
        (
            EYE.repeat(2, 1),
            EYE * torch.tensor([[1.0], [-1.0], [-1.0]]),
            ["lines and diamonds: directions of the classes", "outside the picture: 2 of 3 class directions"],
        ),
        (EYE.repeat(2, 1), -EYE, ["outside the picture: 3 of 3 class directions"]),
        (EYE.repeat(2, 1), None, []),
    ],
    ids=["both sides", "some hidden", "all hidden", "none"],
)
def test_the_caption_explains_and_counts_directions(points, directions, lines):
    figure = plot_sphere(points, torch.arange(6) % 3, ABC, directions=directions)
    assert figure.get_supxlabel().splitlines() == lines


def test_every_point_is_drawn_once_and_as_before():
    points = unit(500, 3)
    first, second = (plot_sphere(points, torch.arange(500) % 3, ABC).axes[0].collections for _ in range(2))
    assert sum(len(cloud.get_offsets()) for cloud in first) == 500
    assert (first[0].get_offsets() == second[0].get_offsets()).all()


def test_points_are_drawn_at_their_projected_positions_and_hidden_ones_counted():
    points = torch.tensor([[3.0, 4.0, 0.0], [-1.0, 0.0, 0.0]])
    figure = plot_sphere(points, torch.tensor([0, 1]), ABC, view=View(0.0, 0.0))
    assert figure.axes[0].collections[0].get_offsets().tolist() == [[pytest.approx(0.8), pytest.approx(0.0)]]
    assert figure.get_supxlabel() == "outside the picture: 1 of 2 points"


def test_directions_are_projected_like_the_points():
    points, directions = torch.randn(40, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    view = View(20.0, 30.0, both_sides=True)
    figure = plot_sphere(points, torch.arange(40) % 3, ABC, directions=directions, view=view)
    turned, expected = F.normalize(directions @ project_to_great_sphere(points)[1], dim=1), []
    for side, shift in ((view, 0.0), (View(-20.0, 210.0), 2.16)):
        expected += [[x + shift, y] for x, y, depth in (turned @ side.axes()).tolist() if depth >= 0]
    diamonds = [line.get_xydata()[0].tolist() for line in figure.axes[0].lines if line.get_marker() == "D"]
    assert sorted(diamonds) == [pytest.approx(place) for place in sorted(expected)]


def test_names_are_not_parsed_as_math_and_do_not_warn(tmp_path, recwarn):
    names = ["$a^$", "\u732b\U0001f408\u0b87", "_b"]
    figure = plot_sphere(unit(30, 3), torch.arange(30) % 3, names, title="5 $ or 6 $", path=tmp_path / "sphere.png")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names
    assert set(names_in(figure.axes[0])) == set(names)
    assert not any(text.get_parse_math() for text in [figure._suptitle, *figure.axes[0].texts])
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_names_of_nearby_classes_replace_a_long_legend():
    count = LARGEST_LEGEND + 1
    middles = F.normalize(torch.tensor([1.0, 0.0, 0.0]) + 0.02 * torch.randn(count, 3), dim=1)
    names = [f"class {index}" for index in range(count)]
    labels = torch.arange(3 * count) % count
    figure = plot_sphere(middles.repeat(3, 1), labels, names, view=View(0.0, 0.0))
    assert set(names_in(figure.axes[0])) == set(names)
    assert figure.legends == []


def panel(dim: int, **options) -> Panel:
    return Panel(torch.randn(30, dim), torch.arange(30) % 3, **options)


@pytest.mark.parametrize("dim", [2, 3])
def test_each_panel_has_its_heading(dim):
    figure = plot_gallery({name: panel(dim) for name in ("cosine", "vmf")}, ABC, dim=dim, title="digits")
    assert [axes.get_title() for axes in figure.axes] == ["cosine", "vmf"]
    assert figure.get_suptitle() == "digits"


def test_one_legend_lists_all_shown_classes():
    first, second = (Panel(torch.eye(3)[:2], torch.tensor(labels)) for labels in ([0, 1], [0, 2]))
    (legend,) = plot_gallery({"first": first, "second": second}, [*ABC, "unseen"], dim=3).legends
    assert [text.get_text() for text in legend.get_texts()] == ABC


def test_the_projection_of_a_panel_is_described_with_its_name():
    caption = plot_gallery({"three": panel(3), "eight": panel(8)}, ABC, dim=3).get_supxlabel()
    assert "eight: 8 coordinates, projected on the three leading principal directions" in caption
    assert "three:" not in caption


@pytest.mark.parametrize(("dim", "marks"), [(2, "lines"), (3, "lines and diamonds")])
def test_directions_are_drawn_and_explained_once(dim, marks):
    parts = {name: panel(dim, directions=torch.eye(3)[:, :dim] + 0.1) for name in ("cosine", "vmf")}
    figure = plot_gallery(parts, ABC, dim=dim)
    assert sum(line.get_marker() == "D" for line in figure.axes[0].lines) == (3 if dim == 3 else 0)
    assert figure.get_supxlabel().splitlines()[-1] == f"{marks}: directions of the classes"


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize(("count", "is_named"), [(50, True), (51, False)])
def test_names_and_directions_are_omitted_for_too_many_classes(count, is_named, dim):
    points = torch.randn(count, dim)
    figure = plot_gallery({"a": Panel(points, torch.arange(count), points)}, [*map(str, range(count))], dim=dim)
    caption = figure.get_supxlabel()
    assert (f"{count} classes: too many to draw their names" in caption) != is_named
    assert ("directions of the classes" in caption) == is_named
    assert bool({text.get_text() for text in figure.axes[0].texts} - {"front", "back"}) == is_named
