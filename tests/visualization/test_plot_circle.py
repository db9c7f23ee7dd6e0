import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from hf_sphere.visualization import plot_circle
from hf_sphere.visualization.scene import project_to_great_sphere
from hf_sphere.visualization.sphere import ROSE_NOTE, _density

ABC = ["a", "b", "c"]


def at(*degrees: float) -> torch.Tensor:
    turn = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([turn.cos(), turn.sin()], dim=1)


def directions_in(figure) -> list[list[float]]:
    """Ends of the lines that start at the origin."""
    lines = [line.get_xydata() for line in figure.axes[0].lines if line.get_zorder() > 2]  # not the axes of the plane
    return [line[1].tolist() for line in lines if len(line) == 2 and (line[0] == 0).all()]


def names_in(figure) -> dict[str, tuple[float, float]]:
    return {text.get_text(): text.get_position() for text in figure.axes[0].texts}


class TestCircle:
    def test_the_density_is_the_fraction_of_points_per_direction(self):
        density = _density(at(10.0, 10.0, 10.0, 200.0))
        assert density.sum().item() == pytest.approx(1.0)
        degrees = 360 * torch.arange(len(density)) / len(density)
        for middle, share in ((10, 0.75), (200, 0.25)):
            assert density[(degrees - middle).abs() < 5].sum().item() == pytest.approx(share, abs=1e-4)
        assert degrees[density.argmax()].item() == pytest.approx(10.0, abs=0.25)

    def test_the_density_is_continuous_around_the_circle(self):
        density = _density(at(0.0))
        torch.testing.assert_close(density[1:], density[1:].flip(0))

    def test_the_most_concentrated_class_has_the_highest_density(self):
        points = torch.cat([at(*[40.0] * 50), at(*range(150, 250, 2))])
        figure = plot_circle(points, torch.arange(2).repeat_interleave(50), ["a", "b"])
        tops = [line.get_xydata() for line in figure.axes[0].lines if len(line.get_xydata()) > 2]
        heights = [torch.as_tensor(top).norm(dim=1).nan_to_num(0).max().item() for top in tops]
        assert heights[0] == pytest.approx(1.55, abs=0.01)
        assert 1.0 < heights[1] < 1.3

    def test_four_times_the_density_is_twice_the_height(self):
        points = torch.cat([at(40.0, 40.0, 40.0, 40.0), at(100.0, 160.0, 220.0, 280.0)])
        figure = plot_circle(points, torch.arange(2).repeat_interleave(4), ["a", "b"])
        tops = [torch.as_tensor(line.get_xydata()) for line in figure.axes[0].lines if len(line.get_xydata()) > 2]
        first, second = (top.norm(dim=1).nan_to_num(0).max().item() - 1 for top in tops)
        assert first == pytest.approx(2 * second)

    def test_class_names_are_outside_of_the_points(self):
        names = names_in(plot_circle(at(0, 1, 120, 121, 240, 241), torch.arange(3).repeat_interleave(2), ABC))
        for name, degrees in zip(ABC, (0.5, 120.5, 240.5), strict=True):
            x, y = names[name]
            assert math.hypot(x, y) > 1.55
            assert math.degrees(math.atan2(y, x)) % 360 == pytest.approx(degrees, abs=1.0)

    def test_directions_are_lines_to_the_circle_and_explained(self):
        figure = plot_circle(at(0, 120, 240), torch.arange(3), ABC, directions=2 * at(10, 100, 200))
        assert directions_in(figure) == [pytest.approx(end) for end in at(10, 100, 200).tolist()]
        assert figure.get_supxlabel().splitlines() == [ROSE_NOTE, "lines: directions of the classes"]

    def test_directions_outside_of_a_quadrant_are_counted(self):
        figure = plot_circle(at(1, 45, 89), torch.arange(3), ABC, directions=at(10, 150, 240))
        assert directions_in(figure) == [pytest.approx(at(10)[0].tolist())]
        assert figure.get_supxlabel().splitlines()[1:] == [
            "lines: directions of the classes",
            "outside the picture: 2 of 3 class directions",
        ]
        figure = plot_circle(at(1, 45, 89), torch.arange(3), ABC, directions=at(170, 200, 240))
        assert figure.get_supxlabel().splitlines()[1:] == ["class directions: outside the drawn part of the circle"]

    def test_names_and_directions_are_omitted_for_too_many_classes(self):
        points = at(*range(0, 360, 5))
        names = [f"{index}" for index in range(72)]
        figure = plot_circle(points, torch.arange(72), names, directions=points)
        assert directions_in(figure) == []
        assert names_in(figure) == {}
        assert figure.get_supxlabel().splitlines()[1:] == ["72 classes: too many to draw their names and directions"]

    def test_directions_are_projected_like_the_points(self):
        points, directions = torch.randn(30, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
        basis = project_to_great_sphere(points, 2)[1]
        figure = plot_circle(points, torch.arange(30) % 3, ABC, directions=directions)
        assert directions_in(figure) == [pytest.approx(end) for end in F.normalize(directions @ basis, dim=1).tolist()]
        assert "6 coordinates, projected on the two leading principal directions" in figure.get_supxlabel()

    def test_points_in_a_quadrant_fill_the_picture(self):
        left, _ = plot_circle(at(1, 45, 89), torch.arange(3), ABC).axes[0].get_xlim()
        assert left > -0.2
        left, _ = plot_circle(at(1, 45, 91), torch.arange(3), ABC).axes[0].get_xlim()
        assert left < -1.5

    def test_title_caption_and_legend_describe_the_figure(self):
        figure = plot_circle(at(0, 120, 240), torch.arange(3), ABC, title="digits")
        assert (figure.get_suptitle(), figure.get_supxlabel()) == ("digits", ROSE_NOTE)
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ABC

    def test_names_of_thirty_nearby_classes_do_not_overlap(self):
        names = [f"class {index}" for index in range(30)]
        figure = plot_circle(at(*torch.linspace(60, 110, 30).tolist()), torch.arange(30), names)
        boxes = [text.get_window_extent().padded(-1) for text in figure.axes[0].texts]
        assert len(boxes) == 30
        assert not any(first.overlaps(second) for first, second in itertools.combinations(boxes, 2))


class TestPlane:
    def test_points_are_drawn_at_their_coordinates(self):
        points = torch.tensor([[3.0, -4.0], [0.0, 0.0], [50.0, 2.0]])
        axes = plot_circle(points, torch.arange(3), ABC, lengths=True).axes[0]
        assert sorted(axes.collections[0].get_offsets().tolist()) == sorted(points.tolist())

    def test_both_axes_share_a_scale_and_show_the_origin(self):
        axes = plot_circle(torch.rand(30, 2) + 5, torch.arange(30) % 3, ABC, lengths=True).axes[0]
        assert axes.get_aspect() == 1.0
        for low, high in (axes.get_xlim(), axes.get_ylim()):
            assert low < 0 < 6 < high

    def test_direction_rays_extend_beyond_the_points(self):
        points = 10 * torch.randn(30, 2)
        figure = plot_circle(points, torch.arange(30) % 3, ABC, directions=at(0, 120, 240), lengths=True)
        ends = torch.tensor(directions_in(figure), dtype=torch.float64)
        torch.testing.assert_close(F.normalize(ends, dim=1), at(0, 120, 240))
        assert (ends.norm(dim=1) > points.abs().max()).all()

    def test_bad_input_is_refused(self):
        with pytest.raises(ValueError, match="the circle needs at least 2 coordinates; got 1"):
            plot_circle(torch.randn(3, 1), torch.arange(3), ABC)
        with pytest.raises(ValueError, match="a zero vector has no direction; 3 of 3"):
            plot_circle(torch.zeros(3, 2), torch.arange(3), ABC)
        with pytest.raises(ValueError, match="lengths can be drawn for points of 2 coordinates only; got 3"):
            plot_circle(torch.randn(3, 3), torch.arange(3), ABC, lengths=True)
        with pytest.raises(ValueError, match=r"directions must have the shape \(3, 2\), one per class; got \(2, 2\)"):
            plot_circle(torch.randn(3, 2), torch.arange(3), ABC, lengths=True, directions=torch.eye(2))


@pytest.mark.parametrize("lengths", [False, True])
def test_names_and_titles_are_not_parsed_as_math(tmp_path, lengths):
    names = ["$a^$", "$b_$", "\u732b"]
    points = torch.randn(30, 2)
    figure = plot_circle(
        points, torch.arange(30) % 3, names, title="$a^$", lengths=lengths, path=tmp_path / "circle.png"
    )
    assert set(names_in(figure)) == set(names)
