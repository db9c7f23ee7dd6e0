import math

import pytest
import torch
from figure_texts import legend_of

from hf_sphere.visualization import plot_circle
from hf_sphere.visualization.sphere import ROSE_NOTE, _density

ABC = ["a", "b", "c"]
LINES = "lines: directions of the classes"


def at(*degrees: float) -> torch.Tensor:
    turn = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([turn.cos(), turn.sin()], dim=1)


def test_the_density_is_the_fraction_of_points_per_direction():
    density = _density(at(10.0, 10.0, 10.0, 200.0))
    assert density.sum().item() == pytest.approx(1.0)
    degrees = 360 * torch.arange(len(density)) / len(density)
    for middle, share in ((10, 0.75), (200, 0.25)):
        assert density[(degrees - middle).abs() < 5].sum().item() == pytest.approx(share, abs=1e-4)
    assert degrees[density.argmax()].item() == pytest.approx(10.0, abs=0.25)


def test_a_point_is_blurred_by_1_2_degrees_around_the_circle():
    density = _density(at(0.0))
    degrees = (360 * torch.arange(len(density)) / len(density) + 180) % 360 - 180
    assert (density * degrees.square()).sum().sqrt().item() == pytest.approx(1.2, abs=0.01)
    assert density[degrees.abs() > 9.75].max() == 0 < density[degrees.abs() == 9.0].min()  # 8 deviations
    torch.testing.assert_close(density[1:], density[1:].flip(0))


def test_the_height_is_the_square_root_of_the_density():
    points = torch.cat([at(40.0, 40.0, 40.0, 40.0), at(100.0, 160.0, 220.0, 280.0)])
    figure = plot_circle(points, torch.arange(2).repeat_interleave(4), ["a", "b"])
    tops = [torch.as_tensor(line.get_xydata()) for line in figure.axes[0].lines if len(line.get_xydata()) > 2]
    assert [top.norm(dim=1).nan_to_num(0).max() - 1 for top in tops] == pytest.approx([0.55, 0.275], abs=0.001)


def test_class_names_are_outside_of_the_points():
    figure = plot_circle(at(0, 1, 120, 121, 240, 241), torch.arange(3).repeat_interleave(2), ABC, title="digits")
    assert (figure.get_suptitle(), figure.get_supxlabel()) == ("digits", ROSE_NOTE)
    assert legend_of(figure) == ABC
    names = {text.get_text(): text.get_position() for text in figure.axes[0].texts}
    for name, degrees in zip(ABC, (0.5, 120.5, 240.5), strict=True):
        x, y = names[name]
        assert math.hypot(x, y) > 1.55
        assert math.degrees(math.atan2(y, x)) % 360 == pytest.approx(degrees, abs=1.0)


@pytest.mark.parametrize(
    ("points", "directions", "drawn", "lines"),
    [
        (at(0, 120, 240), 2 * at(10, 100, 200), at(10, 100, 200), [LINES]),
        (at(1, 45, 89), at(10, 150, 240), at(10), [LINES, "outside the picture: 2 of 3 class directions"]),
        (at(1, 45, 89), at(-6, 96, -8), at(-6, 96), [LINES, "outside the picture: 1 of 3 class directions"]),
        (at(1, 45, 89), at(170, 200, 240), at(), ["outside the picture: 3 of 3 class directions"]),
    ],
    ids=["circle", "quadrant", "margin of the quadrant", "none in the quadrant"],
)
def test_directions_in_the_picture_are_lines_and_explained(points, directions, drawn, lines):
    figure = plot_circle(points, torch.arange(3), ABC, directions=directions)
    axes = [line.get_xydata() for line in figure.axes[0].lines if line.get_zorder() > 2]
    ends = [line[1].tolist() for line in axes if len(line) == 2 and (line[0] == 0).all()]
    assert ends == [pytest.approx(end) for end in drawn.tolist()]
    assert figure.get_supxlabel().splitlines() == [ROSE_NOTE, *lines]
