"""Embeddings on the circle and on the sphere, alone or side by side."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from scipy.ndimage import gaussian_filter1d
from scipy.spatial.transform import Rotation
from torch import Tensor

from hf_sphere.geometry.manifold import mean_direction
from hf_sphere.visualization.figures import Figure, plain_text
from hf_sphere.visualization.scene import Panel, Scene, draw_points, mark_of, place_names, plot_scenes

_BINS = 1440  # bins of the full turn
_BLUR = 1.2  # degrees: the bandwidth of the densities, so that a single point is visible
_HEIGHT = 0.55  # height of the largest density, in radii
_NAMES = 1.0 + _HEIGHT + 0.02  # radius of the names
_MARGIN = 0.12  # margin beside the axes if only a quarter of the circle is drawn, in radii
ROSE_NOTE = "height of a class outside the circle: square root of its density"
_APART = 2.16  # distance between the centers of the two hemispheres, in radii
_OCTANT = math.degrees(math.acos(3**-0.5))  # between the center of the positive octant and its corners, in degrees


@plain_text()
def plot_circle(
    points: Tensor,
    labels: Tensor,
    class_names: Sequence[str],
    *,
    directions: Tensor | None = None,
    title: str = "",
    path: str | Path | None = None,
) -> Figure:
    """Draw points on the unit circle, colored by class.

    On a circle thousands of points would overlap. Instead, the density of each class over the directions is drawn as a
    height outside the circle. The height is the square root of the density, so that single points stay visible beside
    classes concentrated at almost a single place. Points of more than two coordinates are projected by
    `project_to_great_sphere`, and the caption reports it. If all coordinates are nonnegative, as after a spherized
    head, the figure shows only that quarter of the circle.

    Args:
        points: (N, d) with d >= 2; only their directions are drawn.
        labels: (N,) class indices.
        class_names: Name of each class.
        directions: (K, d), a direction per class, for instance class vectors, drawn as a line from the origin; of any
            nonzero norms. They are projected with the points.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If `points` have fewer than two coordinates, a shape does not fit, a label has no name, or a point
            is zero or not finite.

    Example:
        >>> figure = plot_circle(embeddings, labels, ["cat", "dog", "fox"], path="circle.png")
    """
    return plot_scenes({"": CircleScene(Panel(points, labels, directions), class_names)}, title, path)


class CircleScene(Scene):
    """Densities on the circle."""

    def draw(self, axes: Any, *, scale: float = 1.0) -> list[str]:
        """See `Scene`."""
        from matplotlib.patches import Circle

        axes.add_patch(Circle((0.0, 0.0), 1.0, facecolor="none", edgecolor="0.45", linewidth=1.0, zorder=1))
        densities = torch.stack([_density(points) for points in self.members()])
        heights = _HEIGHT * (densities / densities.max()).sqrt()
        turn = 2 * math.pi * torch.arange(_BINS + 1, dtype=torch.float64) / _BINS
        ring = torch.stack([turn.cos(), turn.sin()])
        for index, height in zip(self.present, heights, strict=True):
            color, _ = mark_of(index)
            height = torch.cat([height, height[:1]])
            outer = ring * (1 + height)
            axes.fill(*torch.cat([outer, ring.flip(1)], dim=1).numpy(), color=color, alpha=0.35, linewidth=0, zorder=2)
            outer[:, height < 0.004] = torch.nan
            axes.plot(*outer.numpy(), color=color, linewidth=1.4, zorder=3)
        quarter = bool((self.points >= -1e-6).all())  # then it fills the figure
        x, y = _NAMES + 0.45, _NAMES + 0.22
        axes.set(xlim=(-_MARGIN if quarter else -x, x), ylim=(-_MARGIN if quarter else -y, y), aspect="equal")
        axes.set_axis_off()
        inside = {k: end for k, end in self.drawn_directions.items() if not quarter or (end >= -_MARGIN).all()}
        for index, (x, y) in inside.items():
            style = {"linewidth": 2.0, "zorder": 4, "solid_capstyle": "round"}
            axes.plot((0.0, x), (0.0, y), color=mark_of(index)[0], **style)
        return self.describe(ROSE_NOTE, marks="lines", shown=len(inside))

    def draw_names(self, axes: Any, size: float) -> None:
        """See `Scene`."""
        means = self.mean_directions()
        place_names(axes, _NAMES * means, self.present, self.class_names, size, beside=means)


def _density(points: Tensor) -> Tensor:
    """Density of unit vectors (N, 2) over `_BINS` directions, starting at the first coordinate axis."""
    width = 2 * math.pi / _BINS
    bins = (torch.atan2(points[:, 1], points[:, 0]) / width).round().long() % _BINS
    density = torch.bincount(bins, minlength=_BINS).double() / len(points)
    return torch.from_numpy(gaussian_filter1d(density.numpy(), _BLUR * _BINS / 360, mode="wrap", truncate=8.0))


@dataclass(frozen=True)
class View:
    """The position of the camera.

    Attributes:
        elevation: Angle of the camera above the plane of the first two coordinates, in degrees.
        azimuth: Angle of the camera in that plane, in degrees from the first coordinate axis.
        reach: Angle from the center of the figure to its edge, in degrees on the sphere: 90 shows a hemisphere, smaller
            angles zoom in.
        both_sides: Whether to draw the opposite hemisphere as well, beside the first one.
    """

    elevation: float
    azimuth: float
    reach: float = 90.0
    both_sides: bool = False

    def axes(self) -> Tensor:
        """Return the directions right, up and towards the camera: (3, 3), unit vectors in the columns."""
        turned = Rotation.from_euler("ZY", (self.azimuth, -self.elevation), degrees=True).as_matrix()
        return torch.from_numpy(turned[:, [1, 2, 0]])


def choose_view(points: Tensor) -> View:
    """Choose a view of unit vectors (N, 3): near a cluster, along the diagonal of the octant, or from both sides."""
    center = mean_direction(points.mean(0))
    elevation, azimuth = center[2].clamp(-1, 1).asin(), torch.atan2(center[1], center[0])
    reach = (points @ center).clamp(-1, 1).acos().quantile(0.995).rad2deg().item()
    view = View(elevation.rad2deg().item(), azimuth.rad2deg().item())
    if reach <= 40.0:  # the frame is inside the outline of the sphere; a larger one would cut it
        return replace(view, reach=max(15.0, 1.05 * reach))
    if (points >= -1e-6).all():
        return View(90.0 - _OCTANT, 45.0)
    return replace(view, both_sides=bool((points @ center < -0.02).double().mean() > 0.005))


@plain_text()
def plot_sphere(
    points: Tensor,
    labels: Tensor,
    class_names: Sequence[str],
    *,
    directions: Tensor | None = None,
    view: View | None = None,
    title: str = "",
    path: str | Path | None = None,
) -> Figure:
    """Draw points on the unit sphere in three dimensions, colored by class.

    The sphere is opaque: its back is drawn beside it, as seen from behind; otherwise the caption states the number of
    points that are not visible. Each class is named at its mean direction. Points of more than three coordinates are
    projected by `project_to_great_sphere`, and the caption states the fraction of the second moment that is kept.
    `write_interactive_sphere` writes a page on which the sphere can be turned.

    Args:
        points: (N, d) with d >= 3; only their directions are drawn.
        labels: (N,) class indices.
        class_names: Name of each class.
        directions: (K, d), a direction per class to mark, for instance class vectors; of any nonzero norms. They are
            projected with the points.
        view: Position of the camera; chosen by `choose_view` if None.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If `points` have fewer than three coordinates, a shape does not fit, a label has no name, or a point
            is zero or not finite.

    Example:
        >>> figure = plot_sphere(embeddings, labels, ["cat", "dog", "fox"], path="sphere.png")
    """
    return plot_scenes({"": SphereScene(Panel(points, labels, directions), class_names, view)}, title, path)


class SphereScene(Scene):
    """Points on one or both sides of an opaque sphere."""

    def __init__(self, panel: Panel, class_names: Sequence[str], view: View | None = None) -> None:
        super().__init__(panel, class_names, 3)
        self.view = view or choose_view(self.points)
        self.sides = [(self.view, 0.0)]  # each with its shift to the right
        if self.view.both_sides:
            self.span = 2.04
            self.sides.append((View(-self.view.elevation, self.view.azimuth + 180.0), _APART))

    def draw(self, axes: Any, *, scale: float = 1.0) -> list[str]:
        """See `Scene`."""
        extent = math.sin(math.radians(self.view.reach)) * 1.04
        seen, shown = torch.zeros(len(self.points), dtype=torch.bool), 0
        for side, shift in self.sides:
            _draw_globe(axes, side, shift)
            positions, front = _look(self.points, side, shift)
            inside = front & ((positions - torch.tensor([shift, 0.0])).abs() <= extent).all(1)
            seen |= inside
            draw_points(axes, positions[inside], self.labels[inside], scale=scale)
            if self.view.both_sides:
                axes.text(shift - 1.0, 1.0, "back" if shift else "front", color="0.35", va="top")
            for index, direction in self.drawn_directions.items():
                ends, front = _look(direction[None], side, shift)
                if front:
                    (x, y), (color, _) = ends[0].tolist(), mark_of(index)
                    axes.plot((shift, x), (0.0, y), color=color, linewidth=1.5, zorder=3)
                    axes.plot(x, y, "D", color=color, markersize=7 * scale, markeredgecolor="black", zorder=4)
                    shown += max(abs(x - shift), abs(y)) <= extent
        axes.set(xlim=(-extent, extent + self.sides[-1][1]), ylim=(-extent, extent), aspect="equal")
        axes.set_axis_off()
        outside = [] if seen.all() else [f"{int((~seen).sum())} of {len(seen)} points"]
        return self.describe(marks="lines and diamonds", shown=shown, outside=outside)

    def draw_names(self, axes: Any, size: float) -> None:
        """Draw the names at the means of the points, which for some heads are far from the class directions."""
        means = self.mean_directions()
        # A name must not hide the marker of a direction at the mean.
        beside = None if self.directions is None else torch.tensor([[0.0, 1.0]]).expand(len(means), 2)
        for side, shift in self.sides:
            places, front = _look(means, side, shift)
            indices = torch.tensor(self.present)[front].tolist()
            place_names(axes, places[front], indices, self.class_names, size, beside)


def _look(points: Tensor, view: View, shift: float) -> tuple[Tensor, Tensor]:
    """Return the places (N, 2) of unit vectors (N, 3) in the figure, and which are on the near side, (N,)."""
    seen = points @ view.axes()
    return seen[:, :2] + torch.tensor([shift, 0.0]), seen[:, 2] >= 0


def _draw_globe(axes: Any, view: View, shift: float) -> None:
    """Draw a disc with circles of latitude and longitude; those in the coordinate planes are darker."""
    from matplotlib.patches import Circle

    axes.add_patch(Circle((shift, 0.0), 1.0, facecolor="0.98", edgecolor="0.6", linewidth=1.0, zorder=0))
    turn = torch.linspace(0, 2 * math.pi, 361, dtype=torch.float64)
    for degrees in range(-60, 91, 30):
        angle = torch.tensor(math.radians(degrees)).double().expand_as(turn)
        for up, around in ((angle, turn), (turn, angle)):  # a latitude and a longitude
            circle = torch.stack([up.cos() * around.cos(), up.cos() * around.sin(), up.sin()], dim=1)
            positions, front = _look(circle, view, shift)
            positions[~front] = torch.nan
            color = "0.6" if degrees in (0, 90) else "0.85"
            axes.plot(*positions.T.numpy(), color=color, linewidth=0.7, zorder=1)


@plain_text()
def plot_gallery(
    panels: Mapping[str, Panel],
    class_names: Sequence[str],
    *,
    dim: Literal[2, 3],
    columns: int = 3,
    title: str = "",
    path: str | Path | None = None,
) -> Figure:
    """Draw several spheres or circles, as `plot_sphere` and `plot_circle` do, with one legend.

    Args:
        panels: Content of each panel by its title.
        class_names: Name of each class, the same in all panels.
        dim: 3 for spheres, 2 for circles.
        columns: Panels per row.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there are no panels, or `plot_sphere` or `plot_circle` raises it; the message then starts with
            the title of the panel.

    Example:
        >>> panels = {"mine": Panel(embeddings, labels), "negated": Panel(-embeddings, labels)}
        >>> figure = plot_gallery(panels, ["cat", "dog", "fox"], dim=3, path="gallery.png")
    """
    scenes = {name: make_scene(name, panel, class_names, dim) for name, panel in panels.items()}
    return plot_scenes(scenes, title, path, columns)


def make_scene(name: str, panel: Panel, class_names: Sequence[str], dim: int) -> Scene:
    """Return the scene of a panel on the circle or sphere; error messages start with its name."""
    try:
        return {2: CircleScene, 3: SphereScene}[dim](panel, class_names)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
