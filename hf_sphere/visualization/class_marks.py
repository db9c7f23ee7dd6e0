"""Representation of classes in figures of points: colors, markers, the legend, and names placed without overlap."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_sphere.visualization.figures import COLORS, Figure

MARKERS = "o^sDvPX*<>"  # beyond ten classes the colors repeat with the next marker
LARGEST_LEGEND = 20  # number of classes; a longer legend is illegible, so only the names in the figure are drawn
LONGEST_NAME = 24  # characters; longer names are shortened
_CONNECTED = 20.0  # pixels: a name that is moved farther is connected to its place by a line
_FARTHEST = 160.0  # pixels: the largest distance between a name and its place
_GAP = 5.0  # pixels between a place and a name beside it


def mark_of(index: int) -> tuple[str, str]:
    """Return the color and the marker of a class."""
    return COLORS[index % len(COLORS)], MARKERS[index // len(COLORS) % len(MARKERS)]


def shorten(name: str) -> str:
    """Return the name of a class on one line, with an ellipsis after `LONGEST_NAME` characters."""
    name = " ".join(name.split())
    return name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME].rstrip() + "…"


def draw_points(axes: Any, places: Tensor, labels: Tensor, *, scale: float = 1.0) -> None:
    """Scatter places (N, 2) in the colors and markers of their classes (N,).

    They are drawn in a reproducible random order; class by class, the last class would cover all others.
    """
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))
    places, labels = places[order], labels[order]
    size = scale * min(16.0, max(5.0, 16.0 * (1000 / max(len(places), 1)) ** 0.5))
    cycles = labels // len(COLORS)
    for cycle in cycles.unique().tolist():
        chosen = cycles == cycle
        colors = [mark_of(label)[0] for label in labels[chosen].tolist()]
        _, marker = mark_of(cycle * len(COLORS))
        # Rasterized, because a vector file of ten thousand shapes opens slowly.
        style = {"alpha": 0.7, "linewidths": 0, "zorder": 2, "rasterized": True}
        cloud = axes.scatter(*places[chosen].T.numpy(), s=size, c=colors, marker=marker, **style)
        cloud.set_in_layout(False)  # it is inside the axes, and slow to measure


def add_legend(figure: Figure, indices: Sequence[int], class_names: Sequence[str]) -> None:
    """Add a legend of these classes beside the axes, unless there are too many."""
    from matplotlib.lines import Line2D

    if len(indices) > LARGEST_LEGEND:
        return
    handles = []
    for index in indices:
        color, marker = mark_of(index)
        handles.append(Line2D([], [], linestyle="", marker=marker, markersize=8, color=color))
    labels = [shorten(class_names[index]) for index in indices]
    figure.legend(handles, labels, loc="outside right center", frameon=False)


def place_names(
    axes: Any, places: Tensor, indices: Sequence[int], names: Sequence[str], size: float, beside: Tensor | None = None
) -> None:
    """Draw class names as close to their places (K, 2), in data units, as possible without overlap.

    The axes must be complete and laid out by `Figure.draw_without_rendering`. Names without room are omitted, and their
    number is written in the corner of the axes.

    Args:
        axes: The axes.
        places: (K, 2), where the names belong.
        indices: Class of each place.
        names: Names of all classes.
        size: Font size, in points.
        beside: (K, 2), unit vectors from each place towards its name; names are centered on their places if None.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.patheffects import withStroke

    texts = []
    for place, index in zip(places.tolist(), indices, strict=True):
        color = [0.6 * part for part in to_rgb(mark_of(index)[0])]  # legible on points of the same color
        name = shorten(names[index])
        text = axes.text(*place, name, color=color, weight="bold", size=size, ha="center", va="center", zorder=6)
        text.set_path_effects([withStroke(linewidth=3, foreground="white")])
        text.set_in_layout(False)
        texts.append(text)
    if not texts:
        return
    boxes = [text.get_window_extent() for text in texts]
    sizes = torch.tensor([(box.width + 4, box.height + 2) for box in boxes], dtype=torch.float64)
    start = torch.as_tensor(axes.transData.transform(places.numpy()))
    if beside is not None:
        start = start + beside * (sizes / 2 + _GAP)
    moved, kept = place_apart(start, sizes, *torch.as_tensor(axes.get_window_extent().get_points()))
    ends = torch.as_tensor(axes.transData.inverted().transform(moved.numpy()))
    for number, text in enumerate(texts):
        if not kept[number]:
            text.remove()
            continue
        text.set_position(ends[number].tolist())
        if (moved[number] - start[number]).norm() > _CONNECTED:
            line = torch.stack([places[number], ends[number]]).T
            axes.plot(*line.numpy(), color="0.25", linewidth=0.8, zorder=5, scalex=False, scaley=False)
    if not kept.all():
        note = f"{int((~kept).sum())} names omitted for lack of space"
        axes.text(0.0, 0.0, note, transform=axes.transAxes, fontsize=8, color="0.35").set_in_layout(False)


def place_apart(places: Tensor, sizes: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Place boxes one after another, each as close to its place as possible without covering an earlier one.

    All is in pixels: the places of the centers (K, 2), widths and heights (K, 2), and the lower left and upper right
    corner (2,) of the frame that the boxes stay in.

    Returns:
        The centers (K, 2), and (K,) bool, whether there was room within `_FARTHEST`.
    """
    radii = torch.arange(0.0, _FARTHEST, 4.0, dtype=torch.float64)[:, None]
    turn = 2 * math.pi * torch.arange(32, dtype=torch.float64) / 32
    offsets = torch.stack([radii * turn.cos(), radii * turn.sin()], dim=-1).flatten(0, 1)
    placed, kept = places.double().clone(), torch.zeros(len(places), dtype=torch.bool)
    for number, size in enumerate(sizes):
        candidates = torch.minimum(torch.maximum(placed[number] + offsets, low + size / 2), high - size / 2)
        apart = (candidates[:, None] - placed[kept]).abs() >= (size + sizes[kept]) / 2
        free = apart.any(-1).all(-1)
        kept[number] = free.any()
        placed[number] = candidates[free.int().argmax()]  # the first free one is the nearest
    return placed, kept
