"""Embeddings on the sphere, seen in three dimensions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

_APART = 2.16
"""Between the centres of the two halves, in radii."""

_OCTANT = math.degrees(math.acos(3**-0.5))
"""From the middle of the positive octant to its corners, in degrees."""


@dataclass(frozen=True)
class View:
    """From where the sphere is looked at.

    Attributes:
        elevation: Of the eye above the plane of the first two coordinates, in degrees.
        azimuth: Of the eye in that plane, in degrees from the first coordinate on.
        reach: How far from the middle the picture goes, in degrees of the sphere: 90 for a whole half, less comes
            nearer.
        both_sides: Whether the half that is turned away is drawn as well, beside the other.
    """

    elevation: float
    azimuth: float
    reach: float = 90.0
    both_sides: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.reach <= 90:
            raise ValueError(f"reach must be above 0 and at most 90 degrees; got {self.reach}.")
        if self.both_sides and self.reach < 90:
            raise ValueError(f"both sides are drawn whole, with a reach of 90 degrees; got {self.reach}.")

    def axes(self) -> Tensor:
        """What is to the right, what is up and what comes towards the eye, (3, 3) unit vectors in its columns."""
        elevation, azimuth = math.radians(self.elevation), math.radians(self.azimuth)
        right = (-math.sin(azimuth), math.cos(azimuth), 0.0)
        towards = (math.cos(elevation) * right[1], -math.cos(elevation) * right[0], math.sin(elevation))
        up = (-math.sin(elevation) * right[1], math.sin(elevation) * right[0], math.cos(elevation))
        return torch.tensor([right, up, towards], dtype=torch.float64).T

    def from_behind(self) -> "View":
        """The same from the opposite side."""
        return View(-self.elevation, self.azimuth + 180.0)


def choose_view(points: Tensor) -> View:
    """Look at unit vectors (N, 3) from where most of them are, as near as all but 1 in 200 allow.

    The positive octant, where a spherized head puts all of its points, is looked at straight. Points that are on all
    sides are seen from both.
    """
    if (points >= -1e-6).all():
        return View(90.0 - _OCTANT, 45.0, reach=_OCTANT + 3.0)
    middle = F.normalize(points.mean(0), dim=0)
    elevation, azimuth = middle[2].clamp(-1, 1).asin(), torch.atan2(middle[1], middle[0])
    reach = (points @ middle).clamp(-1, 1).acos().quantile(0.995).rad2deg().item()
    view = View(elevation.rad2deg().item(), azimuth.rad2deg().item())
    if reach <= 75.0:
        return replace(view, reach=max(15.0, 1.05 * reach))
    return replace(view, both_sides=bool((points @ middle < -0.02).double().mean() > 0.005))


@plain_text()
def plot_sphere(
    points: Tensor,
    labels: Tensor,
    class_names: Sequence[str],
    *,
    directions: Tensor | None = None,
    basis: Tensor | None = None,
    view: View | None = None,
    title: str = "",
    path: str | Path | None = None,
) -> "Figure":
    """Draw points on the unit sphere in three dimensions, coloured by class.

    The sphere is solid: what is behind is drawn beside it, as seen from there, or else the caption counts it. Each
    class is named at its mean direction. Points of more than three coordinates are projected by `project_to_sphere`,
    and the caption says so, and how much of their second moment is seen.

    Args:
        points: (N, d) with d >= 3; only their directions are drawn.
        labels: (N,) class indices.
        class_names: Name of each class.
        directions: (K, d), a direction a class to mark, for instance class weights; of any norms but zero. They are
            projected as the points are.
        basis: (d, 3), what to project on instead, for instance the basis of another epoch; see `project_to_sphere`.
        view: From where to look; by default as `choose_view` finds it.
        title: Heading.
        path: Where to save the picture (the suffix says as what); not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If `points` have fewer than three coordinates, a shape does not fit, a label has no name, or a point
            is zero or not finite.
    """
    scene = Scene.on_sphere(points, labels, class_names, 3, directions, basis)
    view = view or choose_view(scene.points)
    figure, colours = start_figure(12.0 if view.both_sides else 7.5, 6.3)
    axes = figure.subplots()
    notes = draw_sphere(axes, scene, view, colours)
    if notes:
        figure.supxlabel("\n".join(notes), fontsize=9, color="0.35")
    figure.suptitle(title)
    add_legend(figure, scene.present, class_names, colours)
    figure.draw_without_rendering()
    name_on_sphere(axes, scene, view, colours, size_of_names(len(scene.present)))
    save_figure(figure, path)
    return figure


def draw_sphere(axes: Any, scene: Scene, view: View, colours: Sequence[Any], *, scale: float = 1.0) -> list[str]:
    """Draw what is shown into empty axes, with markers `scale` times as large as usual; names come later.

    Returns:
        What is to be said of it in words.
    """
    points, labels, directions = scene.points, scene.labels, scene.drawn_directions
    marked = 0
    extent = math.sin(math.radians(view.reach)) * 1.04
    seen = torch.zeros(len(points), dtype=torch.bool)
    for side, shift in _sides(view):
        _draw_globe(axes, side, shift)
        places, front = _look(points, side, shift)
        inside = front & (((places - torch.tensor([shift, 0.0])).abs() <= extent).all(1))
        seen |= inside
        draw_points(axes, places[inside], labels[inside], colours, scale=scale)
        for index, direction in directions.items():
            ends, front = _look(direction[None], side, shift)
            if not front:
                continue
            colour, _ = mark_of(index, colours)
            x, y = ends[0].tolist()
            axes.plot((shift, x), (0.0, y), color=colour, linewidth=1.5, zorder=3)
            axes.plot(x, y, "D", color=colour, markersize=7 * scale, markeredgecolor="black", zorder=4)
            marked += max(abs(x - shift), abs(y)) <= extent
    axes.set_xlim(-extent, extent + (_APART if view.both_sides else 0.0))
    axes.set_ylim(-extent, extent)
    axes.set_aspect("equal")
    axes.set_axis_off()
    outside = []
    if not seen.all():
        outside.append(f"{int((~seen).sum())} of {len(labels)} points")
    if 0 < marked < len(directions):
        outside.append(f"{len(directions) - marked} of {len(directions)} class directions")
    notes = [scene.note, *directions_notes("lines and diamonds", marked, len(directions), "sphere")]
    notes += ["outside of the picture: " + " and ".join(outside) if outside else "", scene.crowd_note]
    return [note for note in notes if note]


def name_on_sphere(axes: Any, scene: Scene, view: View, colours: Sequence[Any], size: float) -> None:
    """Write the names of the classes into axes that `draw_sphere` has drawn and that have been laid out.

    They stand at the means of the points, which for some heads are far from the directions of the classes.
    """
    if scene.is_crowded:
        return
    indices = scene.present
    means = F.normalize(torch.stack([points.mean(0) for points in scene.members()]), dim=1)
    places, chosen = [], []
    for side, shift in _sides(view):
        where, front = _look(means, side, shift)
        places.append(where[front])
        chosen += [index for index, seen in zip(indices, front.tolist(), strict=True) if seen]
    # A name must not hide the marker of a direction that is at the mean.
    above = None if scene.directions is None else torch.tensor([[0.0, 1.0]])
    place_names(axes, torch.cat(places), chosen, scene.class_names, colours, size, beside=above)


def _sides(view: View) -> list[tuple[View, float]]:
    """What to look from, and how far to the right that is drawn."""
    return [(view, 0.0), (view.from_behind(), _APART)] if view.both_sides else [(view, 0.0)]


def _look(points: Tensor, view: View, shift: float) -> tuple[Tensor, Tensor]:
    """Where unit vectors (N, 3) are in the plane of the picture, (N, 2), and which are on this side, (N,)."""
    seen = points @ view.axes()
    return seen[:, :2] + torch.tensor([shift, 0.0]), seen[:, 2] >= 0


def _draw_globe(axes: Any, view: View, shift: float) -> None:
    """A disc with circles of latitude and longitude, those of the planes between the coordinates darker."""
    from matplotlib.patches import Circle

    axes.add_patch(Circle((shift, 0.0), 1.0, facecolor="0.98", edgecolor="0.6", linewidth=1.0, zorder=0))
    turn = torch.linspace(0, 2 * math.pi, 361, dtype=torch.float64)
    cos, sin = turn.cos(), turn.sin()
    for degrees in range(-60, 91, 30):
        angle = math.radians(degrees)
        up = torch.full_like(turn, math.sin(angle))
        latitude = torch.stack([math.cos(angle) * cos, math.cos(angle) * sin, up], dim=1)
        longitude = torch.stack([math.cos(angle) * cos, math.sin(angle) * cos, sin], dim=1)
        for circle in (latitude, longitude):
            places, front = _look(circle, view, shift)
            places[~front] = torch.nan
            colour = "0.6" if degrees in (0, 90) else "0.85"
            axes.plot(*places.T.numpy(), color=colour, linewidth=0.7, zorder=1)
