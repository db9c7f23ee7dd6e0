import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from hf_sphere.distributions import VonMisesFisher
from hf_sphere.visualization import View, plot_sphere
from hf_sphere.visualization.figures import new_figure
from hf_sphere.visualization.scene import (
    LARGEST_LEGEND,
    LARGEST_NAMED,
    mark_of,
    place_apart,
    place_names,
    project_to_great_sphere,
    shorten,
)
from hf_sphere.visualization.sphere import choose_view

ABC = ["a", "b", "c"]
EDGES = torch.zeros(2), torch.full((2,), 100.0)


def unit(*shape: int) -> torch.Tensor:
    return F.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


def share_kept(points: torch.Tensor, basis: torch.Tensor) -> float:
    """Share of the second moment of the directions of points that is kept by a basis."""
    return (F.normalize(points.double(), dim=-1) @ basis).square().sum(1).mean().item()


def names_in(axes) -> dict[str, object]:
    return {text.get_text(): text for text in axes.texts if text.get_text() not in ("front", "back")}


def count_covered(texts) -> int:
    """Number of pairs of texts that overlap by more than a pixel."""
    boxes = [text.get_window_extent().padded(-1) for text in texts]
    return sum(first.overlaps(second) for first, second in itertools.combinations(boxes, 2))


class TestProjection:
    def test_projected_points_have_unit_norm(self):
        shown, _ = project_to_great_sphere(torch.randn(50, 8))
        torch.testing.assert_close(shown.norm(dim=-1), torch.ones(50, dtype=torch.float64))

    @pytest.mark.parametrize("dim", [2, 3])
    def test_points_on_a_small_sphere_keep_their_angles(self, dim):
        points = unit(50, dim)
        frame = torch.linalg.qr(torch.randn(8, dim, dtype=torch.float64)).Q
        shown, basis = project_to_great_sphere(7.0 * points @ frame.T, dim)
        torch.testing.assert_close(shown @ shown.T, points @ points.T)
        assert share_kept(points @ frame.T, basis) == pytest.approx(1.0)

    def test_the_default_basis_keeps_the_most_of_the_second_moment(self):
        points = unit(200, 6) * torch.tensor([3.0, 2.0, 1.5, 1.0, 0.5, 0.2], dtype=torch.float64)
        kept = share_kept(points, project_to_great_sphere(points)[1])
        directions = F.normalize(points, dim=1)
        assert kept == pytest.approx(torch.linalg.svdvals(directions)[:3].square().sum().item() / 200)

    @pytest.mark.parametrize("scale", [1e-200, 1e200])
    def test_norms_have_no_effect_at_any_scale(self, scale):
        points = torch.randn(50, 8, dtype=torch.float64)
        torch.testing.assert_close(project_to_great_sphere(scale * points)[0], project_to_great_sphere(points)[0])

    def test_invalid_points_are_rejected(self):
        for points, message in (
            (torch.randn(5, 2), "points of 2 coordinates cannot be shown in 3 dimensions"),
            (torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0]]), "a zero vector has no direction; 1 of 2 points"),
            (torch.tensor([[1.0, 0, 0, torch.nan]]), "points must be finite; 1 of 1 are not, the first at index 0"),
            (torch.empty(0, 4), r"points must have the shape \(N, d\)"),
            (torch.ones(4), r"points must have the shape \(N, d\)"),
        ):
            with pytest.raises(ValueError, match=message):
                project_to_great_sphere(points)


class TestView:
    @given(elevation=st.floats(-90, 90), azimuth=st.floats(-360, 360))
    def test_the_axes_of_a_view_are_right_handed(self, elevation, azimuth):
        axes = View(elevation, azimuth).axes()
        torch.testing.assert_close(axes.T @ axes, torch.eye(3, dtype=torch.float64))
        assert torch.linalg.det(axes).item() == pytest.approx(1.0)

    def test_the_viewing_direction_follows_elevation_and_azimuth(self):
        towards = View(30.0, 60.0).axes()[:, 2]
        expected = torch.tensor([math.cos(math.pi / 6) / 2, math.cos(math.pi / 6) * math.sin(math.pi / 3), 0.5])
        torch.testing.assert_close(towards, expected.double())

    def test_left_and_right_are_swapped_from_behind(self):
        front, back = View(30.0, 60.0).axes(), View(-30.0, 240.0).axes()
        torch.testing.assert_close(back[:, 2], -front[:, 2])
        torch.testing.assert_close(back[:, 0], -front[:, 0])
        torch.testing.assert_close(back[:, 1], front[:, 1])

    def test_the_view_of_the_positive_octant_is_centered_and_shows_the_whole_hemisphere(self):
        view = choose_view(unit(100, 3).abs())
        torch.testing.assert_close(view.axes()[:, 2], torch.full((3,), 3**-0.5, dtype=torch.float64))
        assert (view.reach, view.both_sides) == (90.0, False)

    def test_the_view_of_a_cluster_is_centered_and_close(self):
        middle = F.normalize(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), dim=0)
        points = VonMisesFisher(middle, torch.tensor(200.0, dtype=torch.float64)).sample((500,))
        view = choose_view(points)
        assert view.axes()[:, 2] @ middle > 0.99
        assert 15 <= view.reach < 30

    @pytest.mark.parametrize("concentration", [2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    def test_the_frame_does_not_cut_the_outline(self, concentration):
        middle = torch.tensor([0.6, -0.8, 0.0], dtype=torch.float64)
        concentration = torch.tensor(concentration, dtype=torch.float64)
        figure = plot_sphere(VonMisesFisher(middle, concentration).sample((300,)), torch.zeros(300).long(), ["a"])
        (left, right), (low, high) = figure.axes[0].get_xlim(), figure.axes[0].get_ylim()
        corner = max(abs(low), abs(high)) * 2**0.5  # the outline is the unit circle
        assert corner < 1 or min(right, high, -left, -low) > 1

    def test_points_on_all_sides_are_shown_from_both_sides(self):
        view = choose_view(unit(500, 3))
        assert (view.reach, view.both_sides) == (90.0, True)

    def test_points_without_a_mean_direction_are_shown_from_both_sides(self):
        view = choose_view(torch.cat([torch.eye(3), -torch.eye(3)]).double())
        assert (view.elevation, view.azimuth, view.both_sides) == (0.0, 0.0, True)

    @pytest.mark.parametrize("options", [{"reach": 0.0}, {"reach": 100.0}, {"reach": 40.0, "both_sides": True}])
    def test_an_invalid_view_is_rejected(self, options):
        with pytest.raises(ValueError, match="reach"):
            View(0.0, 0.0, **options)


class TestNames:
    @given(seed=st.integers(0, 10**6), count=st.integers(1, 26))
    def test_names_with_enough_room_do_not_overlap(self, seed, count):
        generator = torch.Generator().manual_seed(seed)
        places = 400 + 20 * torch.randn(count, 2, dtype=torch.float64, generator=generator)
        sizes = torch.tensor([60.0, 15.0], dtype=torch.float64).expand(count, 2)
        moved, kept = place_apart(places, sizes, torch.zeros(2), torch.full((2,), 800.0))
        assert kept.all()
        for first, second in itertools.combinations(moved, 2):
            assert ((first - second).abs() >= sizes[0] - 1e-9).any()

    def test_names_are_moved_inside_or_dropped_only_where_there_is_no_room(self):
        places, sizes = torch.tensor([[100.0, 100.0], [300.0, 100.0]]).double(), torch.full((2, 2), 50.0)
        moved, _ = place_apart(places, sizes, torch.zeros(2), torch.full((2,), 400.0))
        assert torch.equal(moved, places)
        moved, _ = place_apart(torch.tensor([[-5.0, 99.0]]), torch.tensor([[40.0, 10.0]]), *EDGES)
        assert moved.tolist() == [[20.0, 95.0]]
        frame = torch.zeros(2), torch.tensor([25.0, 10.0])
        _, kept = place_apart(torch.full((3, 2), 5.0), torch.full((3, 2), 10.0), *frame)
        assert kept.tolist() == [True, True, False]

    @pytest.mark.parametrize(
        ("name", "short"),
        [
            ("cat", "cat"),
            ("x" * 24, "x" * 24),
            ("x" * 25, "x" * 24 + "\u2026"),
            ("tench, Tinca tinca, and other fish", "tench, Tinca tinca, and\u2026"),
            ("two\nlines", "two lines"),
        ],
    )
    def test_a_long_name_ends_with_an_ellipsis(self, name, short):
        assert shorten(name) == short

    def test_thirty_classes_have_distinct_markers(self):
        assert len({mark_of(index) for index in range(30)}) == 30


class TestPicture:
    def test_the_legend_lists_every_class_and_the_caption_describes_the_projection(self):
        points = torch.randn(30, 5)
        figure = plot_sphere(points, torch.arange(30) % 3, ABC, title="digits")
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ABC
        kept = 100 * share_kept(points, project_to_great_sphere(points)[1])
        assert f"5 coordinates, projected on the three leading principal directions, which keep {kept:.0f} %" in (
            figure.get_supxlabel()
        )
        assert figure.get_suptitle() == "digits"

    def test_three_dimensional_points_have_no_projection_caption(self):
        figure = plot_sphere(torch.randn(300, 3), torch.arange(300) % 3, ABC, directions=torch.eye(3))
        assert figure.get_supxlabel() == "lines and diamonds: directions of the classes"

    def test_points_are_drawn_once_at_their_projected_positions(self):
        figure = plot_sphere(unit(500, 3), torch.arange(500) % 3, ABC)
        assert sum(len(cloud.get_offsets()) for cloud in figure.axes[0].collections) == 500
        figure = plot_sphere(torch.tensor([[3.0, 4.0, 0.0]]), torch.tensor([0]), ["a"], view=View(0.0, 0.0))
        assert figure.axes[0].collections[0].get_offsets().tolist() == [[pytest.approx(0.8), pytest.approx(0.0)]]

    def test_hidden_points_are_counted(self):
        points = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [0.8, 0.6, 0.0]])
        figure = plot_sphere(points, torch.tensor([0, 1, 2]), ABC, view=View(0.0, 0.0))
        assert figure.get_supxlabel() == "outside the picture: 1 of 3 points"

    def test_figures_are_reproducible(self):
        points, labels = unit(50, 3), torch.arange(50) % 3
        first, second = (plot_sphere(points, labels, ABC).axes[0].collections[0].get_offsets() for _ in range(2))
        assert (first == second).all()

    def test_directions_are_projected_like_the_points(self):
        points = torch.randn(40, 6, dtype=torch.float64)
        directions = torch.randn(3, 6, dtype=torch.float64)
        basis = project_to_great_sphere(points)[1]
        view = View(20.0, 30.0, both_sides=True)
        figure = plot_sphere(points, torch.arange(40) % 3, ABC, directions=directions, view=view)
        markers = [line.get_xydata()[0].tolist() for line in figure.axes[0].lines if line.get_marker() == "D"]
        turned = F.normalize(directions @ basis, dim=1)
        expected = []
        for side, shift in ((view, 0.0), (View(-20.0, 210.0), 2.16)):
            seen = turned @ side.axes()
            expected += [[x + shift, y] for x, y, depth in seen.tolist() if depth >= 0]
        assert sorted(markers) == [pytest.approx(place) for place in sorted(expected)]

    def test_directions_that_are_hidden_or_of_no_class_are_not_drawn(self):
        points, directions = torch.eye(3).repeat(5, 1), torch.cat([torch.eye(3)[:1], -torch.eye(3)[:2]])
        figure = plot_sphere(points, torch.arange(15) % 3, ABC, directions=directions)
        assert figure.get_supxlabel().splitlines() == [
            "lines and diamonds: directions of the classes",
            "outside the picture: 2 of 3 class directions",
        ]
        figure = plot_sphere(unit(30, 3).abs(), torch.arange(30) % 3, ABC, directions=-torch.eye(3))
        assert figure.get_supxlabel() == "class directions: outside the drawn part of the sphere"
        assert not any(line.get_marker() == "D" for line in figure.axes[0].lines)
        figure = plot_sphere(torch.eye(3)[:2].repeat(5, 1), torch.arange(10) % 2, ABC, directions=torch.eye(3))
        assert sum(line.get_marker() == "D" for line in figure.axes[0].lines) == 2
        assert figure.get_supxlabel() == "lines and diamonds: directions of the classes"

    @pytest.mark.parametrize("title", ["$a^$", "5 $ or 6 $", "a_b"])
    def test_names_and_titles_are_not_parsed_as_math(self, tmp_path, title):
        names = ["$a^$", "$", "_b"]
        figure = plot_sphere(unit(30, 3), torch.arange(30) % 3, names, title=title, path=tmp_path / "sphere.png")
        assert [text.get_text() for text in figure.legends[0].get_texts()] == names
        assert set(names_in(figure.axes[0])) == set(names)
        assert not any(text.get_parse_math() for text in [figure._suptitle, *figure.axes[0].texts])

    def test_missing_glyphs_do_not_warn(self, tmp_path, recwarn):
        names = ["\u732b", "\U0001f408", "\u0b87"]
        plot_sphere(unit(30, 3), torch.arange(30) % 3, names, title=names[0], path=tmp_path / "sphere.png")
        assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]

    def test_long_names_leave_room_for_the_plot(self):
        names = [letter * 300 for letter in "abc"]
        figure = plot_sphere(unit(30, 3).abs(), torch.arange(30) % 3, names)
        short = [letter * 24 + "\u2026" for letter in "abc"]
        assert [text.get_text() for text in figure.legends[0].get_texts()] == short
        assert set(names_in(figure.axes[0])) == set(short)
        assert figure.axes[0].get_window_extent().width > 0.5 * figure.bbox.width

    def test_names_and_directions_are_omitted_for_too_many_classes(self):
        count = LARGEST_NAMED + 1
        points = unit(count, 3)
        figure = plot_sphere(points, torch.arange(count), [f"{index}" for index in range(count)], directions=points)
        assert not names_in(figure.axes[0])
        assert not any(line.get_marker() == "D" for line in figure.axes[0].lines)
        assert figure.get_supxlabel() == "51 classes: too many to draw their names and directions"

    def test_names_of_nearby_classes_do_not_overlap(self):
        middles = F.normalize(torch.tensor([1.0, 0.0, 0.0]) + 0.02 * torch.randn(10, 3), dim=1)
        names = [f"class {index}" for index in range(10)]
        axes = plot_sphere(middles.repeat(3, 1), torch.arange(30) % 10, names, view=View(0.0, 0.0)).axes[0]
        assert set(names_in(axes)) == set(names)
        assert count_covered(axes.texts) == 0

    def test_many_classes_have_names_instead_of_a_legend(self):
        names = [f"class {index}" for index in range(26)]
        assert len(names) > LARGEST_LEGEND
        figure = plot_sphere(unit(26, 3).repeat(5, 1), torch.arange(130) % 26, names)
        assert figure.legends == []
        assert set(names_in(figure.axes[0])) == set(names)

    def test_names_without_room_are_counted(self):
        figure = new_figure(3.0, 3.0)
        axes = figure.subplots()
        figure.draw_without_rendering()
        place_names(axes, torch.rand(50, 2), range(50), [f"a long name {index}" for index in range(50)], 13.0)
        *shown, note = axes.texts
        assert count_covered(shown) == 0
        assert 0 < len(shown) < 50
        assert note.get_text() == f"names without room: {50 - len(shown)}"

    def test_mismatched_labels_and_directions_are_rejected(self):
        for labels, message in (
            (torch.tensor([0, 1, 3]), "labels must be from 0 to 2, one per class name; got 0 to 3"),
            (torch.tensor([-1, 1, 2]), "labels must be from 0 to 2, one per class name; got -1 to 2"),
            (torch.tensor([0, 1]), r"labels must have the shape \(3,\), one per embedding; got \(2,\)"),
            (torch.tensor([0.0, 1.0, 2.0]), r"labels must be integers; got torch.float32"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                plot_sphere(torch.randn(3, 3), labels, ABC)
        for directions, message in (
            (torch.randn(3, 3), r"directions must have the shape \(3, 5\), one per class; got \(3, 3\)"),
            (torch.randn(2, 5), r"directions must have the shape \(3, 5\), one per class; got \(2, 5\)"),
            (torch.zeros(3, 5), "a zero vector has no direction; 3 of 3 directions"),
        ):
            with pytest.raises(ValueError, match=message):
                plot_sphere(torch.randn(3, 5), torch.arange(3), ABC, directions=directions)
        for width in (1, 2):
            with pytest.raises(ValueError, match=f"the sphere needs at least 3 coordinates; got {width}"):
                plot_sphere(torch.randn(3, width), torch.arange(3), ABC)
