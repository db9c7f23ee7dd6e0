"""Embeddings on the circle, and in the plane."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.ndimage import gaussian_filter1d
from torch import Tensor

from hf_sphere.visualization.figures import Figure, plain_text
from hf_sphere.visualization.scene import Panel, Scene, draw_points, mark_of, place_names, plot_scenes

_BINS = 1440  # bins of the full turn
_BLUR = 1.2  # degrees: the bandwidth of the densities, so that a single point is visible
_HEIGHT = 0.55  # height of the largest density, in radii
_NAMES = 1.0 + _HEIGHT + 0.02  # radius of the names
_MARGIN = 0.12  # margin beside the axes if only a quarter of the circle is drawn, in radii
ROSE_NOTE = "height of a class outside the circle: square root of its density"


@plain_text()
def plot_circle(
    points: Tensor,
    labels: Tensor,
    class_names: Sequence[str],
    *,
    directions: Tensor | None = None,
    lengths: bool = False,
    title: str = "",
    path: str | Path | None = None,
) -> Figure:
    """Draw points on the unit circle, or in the plane, colored by class.

    On a circle thousands of points would overlap. Instead, the density of each class over the directions is drawn as a
    height outside the circle. The height is the square root of the density, so that single points stay visible beside
    classes concentrated at almost a single place. Points of more than two coordinates are projected by
    `project_to_great_sphere`, and the caption reports it. If all coordinates are nonnegative, as after a spherized
    head, the figure shows only that quarter of the circle.

    Args:
        points: (N, d) with d >= 2, and d = 2 with `lengths`.
        labels: (N,) class indices.
        class_names: Name of each class.
        directions: (K, d), a direction per class, for instance class vectors, drawn as a line from the origin; of any
            nonzero norms. They are projected with the points.
        lengths: Whether to draw the points in the plane, without normalization.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If `points` have too few coordinates or, with `lengths`, more than two, a shape does not fit, a
            label has no name, or a point is not finite or, without `lengths`, zero.

    Example:
        >>> figure = plot_circle(embeddings, labels, ["cat", "dog", "fox"], path="circle.png")
    """
    return plot_scenes({"": CircleScene(Panel(points, labels, directions, lengths), class_names)}, title, path)


class CircleScene(Scene):
    """Densities on the circle, or points in the plane with lengths."""

    def __init__(self, panel: Panel, class_names: Sequence[str]) -> None:
        super().__init__(panel, class_names, 2)

    def draw(self, axes: Any, *, scale: float = 1.0) -> list[str]:
        """See `Scene`."""
        axes.set_aspect("equal")
        if self.lengths:
            self._draw_plane(axes, scale)
            return self.describe(marks="lines", shown=len(self.drawn_directions))
        return self.describe(ROSE_NOTE, marks="lines", shown=self._draw_rose(axes))

    def draw_names(self, axes: Any, size: float) -> None:
        """See `Scene`."""
        means = self.mean_directions()
        if self.lengths:
            far = torch.stack([members.norm(dim=1).quantile(0.98) for members in self.members()])
            place_names(axes, means * far[:, None], self.present, self.class_names, size)
        else:
            place_names(axes, _NAMES * means, self.present, self.class_names, size, beside=means)

    def _draw_plane(self, axes: Any, scale: float) -> None:
        draw_points(axes, self.points, self.labels, scale=scale)
        low, high = self.points.amin(0).clamp_max(0.0), self.points.amax(0).clamp_min(0.0)
        room = 0.06 * (high - low).max().clamp_min(1e-12)
        (left, bottom), (right, top) = (low - room).tolist(), (high + room).tolist()
        axes.axhline(0.0, color="0.8", linewidth=0.8, zorder=0)
        axes.axvline(0.0, color="0.8", linewidth=0.8, zorder=0)
        beyond = 2.0 * torch.maximum(low.abs(), high.abs()).norm()  # the edge of the figure
        for index, direction in self.drawn_directions.items():
            x, y = (beyond * direction).tolist()
            axes.plot((0.0, x), (0.0, y), color=mark_of(index)[0], linewidth=1.6, zorder=3)
        axes.set(xlim=(left, right), ylim=(bottom, top), xlabel="first coordinate", ylabel="second coordinate")

    def _draw_rose(self, axes: Any) -> int:
        """Draw the densities, and the directions that end inside the figure; return the number of these directions."""
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
        axes.set(xlim=(-_MARGIN if quarter else -x, x), ylim=(-_MARGIN if quarter else -y, y))
        axes.set_axis_off()
        shown = 0
        for index, direction in self.drawn_directions.items():
            if not quarter or (direction >= -_MARGIN).all():
                x, y = direction.tolist()
                style = {"linewidth": 2.0, "zorder": 4, "solid_capstyle": "round"}
                axes.plot((0.0, x), (0.0, y), color=mark_of(index)[0], **style)
                shown += 1
        return shown


def _density(points: Tensor) -> Tensor:
    """Density of unit vectors (N, 2) over `_BINS` directions, starting at the first coordinate axis."""
    width = 2 * math.pi / _BINS
    bins = (torch.atan2(points[:, 1], points[:, 0]) / width).round().long() % _BINS
    density = torch.bincount(bins, minlength=_BINS).double() / len(points)
    return torch.from_numpy(gaussian_filter1d(density.numpy(), _BLUR * _BINS / 360, mode="wrap", truncate=8.0))
