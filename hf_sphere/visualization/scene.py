"""The content of a figure of embeddings: validated, projected to two or three dimensions, and drawn.

Classes are represented by colors, markers, a legend, and names placed without overlap.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.checks import check_embeddings, check_labels
from hf_sphere.geometry.manifold import check_directions
from hf_sphere.utils.checks import check_not_text
from hf_sphere.visualization.figures import COLORS, SMALL, Figure, add_caption, new_figure, save_figure, shorten

MARKERS = "o^sDvPX*<>"  # beyond ten classes the colors repeat with the next marker
LARGEST_LEGEND = 20  # number of classes; a longer legend is illegible, so only the names in the figure are drawn
LARGEST_NAMED = 50  # number of classes; names and directions of more classes would cover the figure
_GAP = 5.0  # pixels between a place and a name beside it


def mark_of(index: int) -> tuple[str, str]:
    """Return the color and the marker of a class."""
    return COLORS[index % len(COLORS)], MARKERS[index // len(COLORS) % len(MARKERS)]


def draw_points(axes: Any, positions: Tensor, labels: Tensor, *, scale: float = 1.0) -> None:
    """Scatter places (N, 2) in the colors and markers of their classes (N,), in a reproducible random order."""
    order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(0))
    positions, labels = positions[order], labels[order]
    size = scale * min(16.0, max(5.0, 16.0 * (1000 / max(len(positions), 1)) ** 0.5))
    cycles = labels // len(COLORS)
    for cycle in cycles.unique().tolist():
        mask = cycles == cycle
        colors = [mark_of(label)[0] for label in labels[mask].tolist()]
        _, marker = mark_of(cycle * len(COLORS))
        # Rasterized, because a vector file of ten thousand shapes opens slowly.
        style = {"alpha": 0.7, "linewidths": 0, "zorder": 2, "rasterized": True}
        cloud = axes.scatter(*positions[mask].T.numpy(), s=size, c=colors, marker=marker, **style)
        cloud.set_in_layout(False)  # it is inside the axes, and slow to measure


def place_names(
    axes: Any, points: Tensor, indices: Sequence[int], names: Sequence[str], size: float, beside: Tensor | None = None
) -> None:
    """Draw class names as close to their points (K, 2) as possible without overlap; those without room are omitted.

    The axes must be laid out. Names are centered, or `beside` their points in the direction of unit vectors (K, 2).
    """
    from matplotlib.colors import to_rgb
    from matplotlib.patheffects import withStroke

    frame, taken = axes.get_window_extent(), [text.get_window_extent() for text in axes.texts]
    style = {"weight": "bold", "size": size, "ha": "center", "va": "center", "zorder": 6, "in_layout": False}
    for row, (point, index) in enumerate(zip(points.tolist(), indices, strict=True)):
        color = [0.6 * channel for channel in to_rgb(mark_of(index)[0])]  # legible on points of the same color
        outline = [withStroke(linewidth=3, foreground="white")]
        text = axes.text(*point, shorten(names[index]), color=color, path_effects=outline, **style)
        box = text.get_window_extent().padded(1.0)
        if beside is not None:
            box = box.translated(*(beside[row].numpy() * (box.size / 2 + _GAP)))
        box = box.translated(*np.maximum(frame.min - box.min, 0.0) + np.minimum(frame.max - box.max, 0.0))
        shifts = [(x * box.width, y * box.height) for x in range(-1, 2) for y in range(-9, 10)]
        places = (box.translated(*shift) for shift in sorted(shifts, key=lambda shift: math.hypot(*shift)))
        inside = (place for place in places if frame.padded(1).count_contains(place.corners()) == 4)
        free = next((place for place in inside if not any(place.overlaps(other) for other in taken)), None)
        if free is None:
            text.remove()
        else:
            taken.append(free)
            text.set_position(axes.transData.inverted().transform(free.get_points().mean(0)))


def project_to_great_sphere(points: Tensor, dim: int = 3) -> tuple[Tensor, Tensor, float]:
    """Project points of any dimension to the great sphere of their leading principal directions, for display.

    Returns unit vectors (N, dim), the orthonormal directions (d, dim) in columns, and the kept fraction of the second
    moment.
    """
    directions = check_directions(points, what="points")
    width = directions.shape[1]
    if dim > width:
        raise ValueError(f"points of {width} coordinate(s) cannot be shown in {dim} dimensions.")
    # Eigenvectors of the second moment, largest first, with fixed signs so that the figure is reproducible.
    basis = torch.linalg.eigh(directions.T @ directions).eigenvectors.flip(-1)[:, :dim]
    basis = basis * torch.where(basis.sum(0) < 0, -1.0, 1.0)
    shown = directions @ basis
    return F.normalize(shown, dim=-1), basis, shown.square().sum(1).mean().item()


@dataclass(frozen=True, eq=False)
class Panel:
    """The content of one panel of a gallery.

    Attributes:
        points: (N, d), with d at least the dimensions of the gallery.
        labels: (N,) class indices.
        directions: (K, d), a direction per class, or None.
    """

    points: Tensor
    labels: Tensor
    directions: Tensor | None = None


class Scene:
    """Points of classes in two or three dimensions, projected by `project_to_great_sphere`; subclasses draw them.

    `draw(axes, scale)` draws into empty axes, with markers `scale` times as large as usual, and returns the lines of
    the caption. After it and `Figure.draw_without_rendering`, `draw_names(axes, size)` writes the names of the classes.
    """

    span = 1.0
    """Width of the figure, relative to its height."""

    def __init__(self, panel: Panel, class_names: Sequence[str], dim: int = 2) -> None:
        check_not_text("class_names", class_names)
        points = check_embeddings(panel.points, what="points").cpu().double()
        directions, width = panel.directions, points.shape[1]
        labels = check_labels(panel.labels, len(points)).cpu()
        self.present: list[int] = labels.unique().tolist()  # classes that have points
        if not 0 <= self.present[0] <= self.present[-1] < len(class_names):
            got = f"got {self.present[0]} to {self.present[-1]}"
            raise ValueError(f"labels must be from 0 to {len(class_names) - 1}, one per class name; {got}.")
        if directions is not None:
            directions = check_directions(directions, what="directions")
            if len(directions) != len(class_names):
                raise ValueError(f"directions must be one per class, {len(class_names)}; got {len(directions)}.")
        note = ""
        if width == dim:
            points = check_directions(points, what="points")
        else:
            points, basis, kept = project_to_great_sphere(points, dim)
            directions = None if directions is None else F.normalize(directions @ basis, dim=-1)
            which = f"the {'two' if dim == 2 else 'three'} leading principal directions"
            note = f"{width} coordinates, projected on {which}, which keep {100 * kept:.0f} % of the second moment"
        self.points, self.labels = points, labels  # (N, dim), float64, and (N,), int64, on the CPU
        self.directions = directions  # (K, dim), a unit vector per class, or None
        self.class_names = class_names
        self.note = note  # describes the projection, if there is one
        self.drawn_directions: dict[int, Tensor] = {}  # (dim,), by class that has points; empty if there are too many
        if directions is not None and len(self.present) <= LARGEST_NAMED:
            self.drawn_directions = {index: directions[index] for index in self.present}

    draw: Callable[..., list[str]]
    draw_names: Callable[..., None]

    def members(self) -> list[Tensor]:
        """Return the points (n, dim) of each class of `present`."""
        return [self.points[self.labels == index] for index in self.present]

    def mean_directions(self) -> Tensor:
        """Return the mean direction (dim,) of each class of `present`, stacked."""
        return F.normalize(torch.stack([F.normalize(members, dim=1).mean(0) for members in self.members()]), dim=1)

    def describe(self, *before: str, marks: str, shown: int, outside: Sequence[str] = ()) -> list[str]:
        """Return the lines of the caption; `marks` are those of the directions, of which `shown` are inside."""
        count, classes = len(self.drawn_directions), len(self.present)
        lines = [self.note, *before, f"{marks}: directions of the classes" if shown else ""]
        if shown < count:
            outside = [*outside, f"{count - shown} of {count} class directions"]
        lines.append("outside the picture: " + " and ".join(outside) if outside else "")
        lines.append(f"{classes} classes: too many to draw their names" if classes > LARGEST_NAMED else "")
        return [line for line in lines if line]


def plot_scenes(scenes: Mapping[str, Scene], title: str, path: str | Path | None, columns: int = 1) -> Figure:
    """Draw scenes of the same classes, each below its name, with one legend."""
    from matplotlib.lines import Line2D

    is_alone, columns = len(scenes) == 1, min(columns, len(scenes))
    rows, spans = -(-len(scenes) // columns), [scene.span for scene in scenes.values()]
    # All spheres have the same size, and only columns with both sides are wide.
    widths = [max(spans[column::columns]) for column in range(columns)]
    side = (6.0 if is_alone else 3.6) / max(spans) ** 0.35  # inches
    present = sorted({index for scene in scenes.values() for index in scene.present})
    legend = 0.3 + 0.21 * len(present) if len(present) <= LARGEST_LEGEND else 0.0  # its height
    figure = new_figure(1.6 + side * sum(widths), 0.5 * bool(title) + max(legend, rows * (side + 0.5)), title)
    figure.set_layout_engine("constrained", w_pad=0.12)
    grid = figure.subplots(rows, columns, squeeze=False, width_ratios=widths).flatten()
    for axes in grid[len(scenes) :]:
        axes.set_visible(False)
    captions: dict[str, list[str]] = {}  # names of the panels by line of the caption
    for index, (axes, (name, scene)) in enumerate(zip(grid, scenes.items(), strict=False)):
        for line in scene.draw(axes, scale=1.0 if is_alone else 0.5):
            captions.setdefault(line, []).append(shorten(name))
        axes.set_title(textwrap.fill(name, round(10 * side * widths[index % columns])))
    for_all = {line: len(names) == len(scenes) for line, names in captions.items()}
    add_caption(figure, *(line if for_all[line] else f"{', '.join(captions[line])}: {line}" for line in captions))
    if len(present) <= LARGEST_LEGEND:
        names = next(iter(scenes.values())).class_names
        marks = [mark_of(index) for index in present]
        handles = [Line2D([], [], linestyle="", marker=marker, markersize=8, color=color) for color, marker in marks]
        figure.legend(handles, [shorten(names[index]) for index in present], loc="outside right center")
    figure.draw_without_rendering()
    for axes, scene in zip(grid, scenes.values(), strict=False):
        if (classes := len(scene.present)) <= LARGEST_NAMED:
            size = 13.0 if classes <= 10 else 10.5 if classes <= 30 else SMALL
            scene.draw_names(axes, size if is_alone else 10.0)
    return save_figure(figure, path)
