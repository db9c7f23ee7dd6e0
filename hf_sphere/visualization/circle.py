"""Embeddings of two coordinates: on the circle, or in the plane where their lengths count."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.visualization.class_marks import (
    add_legend,
    directions_notes,
    draw_points,
    mark_of,
    place_names,
    size_of_names,
)
from hf_sphere.visualization.figures import plain_text, save_figure, start_figure
from hf_sphere.visualization.scene import Scene

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BINS = 1440
"""Of a whole turn."""

_BLUR = 1.2
"""Degrees: a density of one point is so wide, and can be seen."""

_HEIGHT = 0.55
"""Of the largest density, in radii."""

_NAMES = 1.0 + _HEIGHT + 0.02
"""Radius at which the names stand."""

_MARGIN = 0.12
"""Of the picture of a quarter, beside the axes, in radii."""

ROSE_NOTE = "height of a class outside of the circle: square root of its density"


@plain_text()
def plot_circle(
    points: Tensor,
    labels: Tensor,
    class_names: Sequence[str],
    *,
    directions: Tensor | None = None,
    basis: Tensor | None = None,
    lengths: bool = False,
    title: str = "",
    path: str | Path | None = None,
) -> "Figure":
    """Draw points on the unit circle, or in the plane, coloured by class.

    On a circle thousands of points hide each other: drawn is how densely those of each class lie in each direction, as
    a height outside of the circle. It grows with the square root of the density, so that single points are seen beside
    classes that are almost at one place. Points of more than two coordinates are projected by `project_to_sphere`, and
    the caption says so. Points that all have coordinates of at least 0, as those of a spherized head, fill the picture
    with their quarter of the circle.

    Args:
        points: (N, d) with d >= 2, and d = 2 with `lengths`.
        labels: (N,) class indices.
        class_names: Name of each class.
        directions: (K, d), a direction a class to draw as a line from the origin, for instance class weights; of any
            norms but zero. They are projected as the points are.
        basis: (d, 2), what to project on instead, for instance the basis of another epoch; not with `lengths`.
        lengths: Whether to draw the points where they are in the plane.
        title: Heading.
        path: Where to save the picture (the suffix says as what); not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If `points` have too few coordinates or, with `lengths`, more than two, a shape does not fit, a
            label has no name, or a point is not finite or, without `lengths`, zero.
    """
    if lengths and basis is not None:
        raise ValueError("with lengths=True the plane is drawn as it is, so there is no basis to project on.")
    if lengths:
        scene = Scene.in_plane(points, labels, class_names, directions)
    else:
        scene = Scene.on_sphere(points, labels, class_names, 2, directions, basis)
    figure, colours = start_figure(7.6, 6.5)
    axes = figure.subplots()
    notes = draw_circle(axes, scene, colours, lengths=lengths)
    if notes:
        figure.supxlabel("\n".join(notes), fontsize=9, color="0.35")
    figure.suptitle(title)
    add_legend(figure, scene.present, class_names, colours)
    figure.draw_without_rendering()
    name_on_circle(axes, scene, colours, size_of_names(len(scene.present)), lengths=lengths)
    save_figure(figure, path)
    return figure


def draw_circle(axes: Any, scene: Scene, colours: Sequence[Any], *, lengths: bool, scale: float = 1.0) -> list[str]:
    """Draw what is shown into empty axes, with markers `scale` times as large as usual; names come later.

    Returns:
        What is to be said of it in words.
    """
    axes.set_aspect("equal")
    directions = len(scene.drawn_directions)
    if lengths:
        _draw_plane(axes, scene, colours, scale)
        inside = directions
    else:
        inside = _draw_rose(axes, scene, colours)
    notes = [scene.note, "" if lengths else ROSE_NOTE, *directions_notes("lines", inside, directions, "circle")]
    if 0 < inside < directions:
        notes.append(f"outside of the picture: {directions - inside} of {directions} class directions")
    return [note for note in [*notes, scene.crowd_note] if note]


def name_on_circle(axes: Any, scene: Scene, colours: Sequence[Any], size: float, *, lengths: bool) -> None:
    """Write the names of the classes into axes that `draw_circle` has drawn and that have been laid out."""
    if scene.is_crowded:
        return
    indices, names = scene.present, scene.class_names
    members = scene.members()
    means = F.normalize(torch.stack([F.normalize(own, dim=1).mean(0) for own in members]), dim=1)
    if lengths:
        far = torch.stack([own.norm(dim=1).quantile(0.98) for own in members])
        place_names(axes, means * far[:, None], indices, names, colours, size)
    else:
        place_names(axes, _NAMES * means, indices, names, colours, size, beside=means)


def _draw_plane(axes: Any, scene: Scene, colours: Sequence[Any], scale: float) -> None:
    draw_points(axes, scene.points, scene.labels, colours, scale=scale)
    low = scene.points.amin(0).clamp_max(0.0)
    high = scene.points.amax(0).clamp_min(0.0)
    room = 0.06 * (high - low).max().clamp_min(1e-12)
    axes.set_xlim((low - room)[0].item(), (high + room)[0].item())
    axes.set_ylim((low - room)[1].item(), (high + room)[1].item())
    axes.axhline(0.0, color="0.8", linewidth=0.8, zorder=0)
    axes.axvline(0.0, color="0.8", linewidth=0.8, zorder=0)
    reach = 2.0 * torch.maximum(low.abs(), high.abs()).norm()  # beyond the edge of the picture
    for index, direction in scene.drawn_directions.items():
        x, y = (reach * direction).tolist()
        colour, _ = mark_of(index, colours)
        axes.plot((0.0, x), (0.0, y), color=colour, linewidth=1.6, zorder=3, scalex=False, scaley=False)
    axes.set_xlabel("first coordinate")
    axes.set_ylabel("second coordinate")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_rose(axes: Any, scene: Scene, colours: Sequence[Any]) -> int:
    """Draw the densities, and the directions that end inside of the picture; return how many these are."""
    from matplotlib.patches import Circle

    axes.add_patch(Circle((0.0, 0.0), 1.0, facecolor="none", edgecolor="0.45", linewidth=1.0, zorder=1))
    densities = torch.stack([_density(points) for points in scene.members()])
    heights = _HEIGHT * (densities / densities.max()).sqrt()
    turn = 2 * math.pi * torch.arange(_BINS + 1, dtype=torch.float64) / _BINS
    ring = torch.stack([turn.cos(), turn.sin()])
    for index, height in zip(scene.present, heights, strict=True):
        colour, _ = mark_of(index, colours)
        height = torch.cat([height, height[:1]])
        outer = ring * (1 + height)
        area = torch.cat([outer, ring.flip(1)], dim=1)
        axes.fill(*area.numpy(), color=colour, alpha=0.35, linewidth=0, zorder=2)
        outer[:, height < 0.004] = torch.nan
        axes.plot(*outer.numpy(), color=colour, linewidth=1.4, zorder=3)
    # A quarter of the circle with all points in it fills the picture.
    quarter = bool((scene.points >= -1e-6).all())
    axes.set_xlim(-_MARGIN if quarter else -_NAMES - 0.45, _NAMES + 0.45)
    axes.set_ylim(-_MARGIN if quarter else -_NAMES - 0.22, _NAMES + 0.22)
    axes.set_axis_off()
    inside = 0
    for index, direction in scene.drawn_directions.items():
        if quarter and (direction < -_MARGIN).any():
            continue
        x, y = direction.tolist()
        colour, _ = mark_of(index, colours)
        axes.plot((0.0, x), (0.0, y), color=colour, linewidth=2.0, zorder=4, solid_capstyle="round")
        inside += 1
    return inside


def _density(points: Tensor) -> Tensor:
    """How densely unit vectors (N, 2) lie in each of `_BINS` directions, from that of the first coordinate on."""
    width = 2 * math.pi / _BINS
    bins = (torch.atan2(points[:, 1], points[:, 0]) / width).round().long() % _BINS
    share = torch.bincount(bins, minlength=_BINS).double() / len(points)
    frequencies = torch.arange(_BINS // 2 + 1, dtype=torch.float64)
    blur = torch.exp(-0.5 * (frequencies * math.radians(_BLUR)).square())
    return torch.fft.irfft(torch.fft.rfft(share) * blur, n=_BINS).clamp_min(0.0)
