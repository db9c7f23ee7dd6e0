"""Classes in pictures of points: their colours and markers, their legend, and their names where these have room."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "o^sDvPX*<>"
"""The ten colours repeat with another marker each time."""

LARGEST_LEGEND = 20
"""Classes; of more only the names in the picture are legible."""

LONGEST_NAME = 24
"""Characters; a longer one would take the room of the picture."""

_MOVED = 20.0
"""Pixels from its place beyond which a name is tied to it by a line."""

_FARTHEST = 160.0
"""Pixels from its place up to which room is sought for a name."""

_BESIDE = 5.0
"""Pixels between a place and the name beside it."""


def mark_of(index: int, colours: Sequence[Any]) -> tuple[Any, str]:
    """Colour and marker of a class."""
    return colours[index % len(colours)], MARKERS[index // len(colours) % len(MARKERS)]


def shorten(name: str) -> str:
    """Return the name of a class as pictures write it: on one line, and an ellipsis after `LONGEST_NAME` characters."""
    name = " ".join(name.split())
    return name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME].rstrip() + "…"


def directions_notes(what: str, inside: int, count: int, part: str) -> list[str]:
    """Say what the marks of directions are, if any of the `count` is inside of the picture of a part of the sphere."""
    if not count:
        return []
    return [f"{what}: directions of the classes" if inside else f"no class direction lies in this part of the {part}"]


def draw_points(axes: Any, places: Tensor, labels: Tensor, colours: Sequence[Any], *, scale: float = 1.0) -> None:
    """Scatter places (N, 2) in the colours and markers of their classes (N,).

    They are drawn in a random order, the same each time: class after class, the last one would cover all others.
    """
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))
    places, labels = places[order], labels[order]
    size = scale * min(16.0, max(5.0, 16.0 * (1000 / max(len(places), 1)) ** 0.5))
    kinds = labels // len(colours)
    for kind in kinds.unique().tolist():
        chosen = kinds == kind
        cloud = axes.scatter(
            *places[chosen].T.numpy(),
            s=size,
            c=[mark_of(label, colours)[0] for label in labels[chosen].tolist()],
            marker=mark_of(kind * len(colours), colours)[1],
            alpha=0.7,
            linewidths=0,
            zorder=2,
            rasterized=True,  # a drawing of ten thousand shapes opens slowly
        )
        cloud.set_in_layout(False)  # it is within the axes; to measure it takes long


def add_legend(figure: "Figure", indices: Sequence[int], class_names: Sequence[str], colours: Sequence[Any]) -> None:
    """Name the classes of these indices beside the axes; nothing if they are too many."""
    from matplotlib.lines import Line2D

    if len(indices) > LARGEST_LEGEND:
        return
    handles = []
    for index in indices:
        colour, marker = mark_of(index, colours)
        handles.append(Line2D([], [], linestyle="", marker=marker, markersize=8, color=colour))
    figure.legend(
        handles, [shorten(class_names[index]) for index in indices], loc="outside right center", frameon=False
    )


def place_names(
    axes: Any,
    places: Tensor,
    indices: Sequence[int],
    class_names: Sequence[str],
    colours: Sequence[Any],
    size: float,
    *,
    beside: Tensor | None = None,
) -> None:
    """Write names of classes at places (K, 2), in data units, as near to them as they have room beside each other.

    The axes must be complete and laid out, by `Figure.draw_without_rendering`. A name that finds no room is left out,
    which is said in the corner of the axes.

    Args:
        axes: Where.
        places: (K, 2), where the names belong.
        indices: Class of each place.
        class_names: Names of all classes.
        colours: The ten.
        size: Of the letters, in points.
        beside: (K, 2), unit vectors towards where a name stands beside its place, rather than on it.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.patheffects import withStroke

    texts = []
    for place, index in zip(places.tolist(), indices, strict=True):
        colour = [0.6 * part for part in to_rgb(mark_of(index, colours)[0])]  # legible on points of the same colour
        name = shorten(class_names[index])
        text = axes.text(*place, name, color=colour, weight="bold", size=size, ha="center", va="center", zorder=6)
        text.set_path_effects([withStroke(linewidth=3, foreground="white")])
        text.set_in_layout(False)
        texts.append(text)
    if not texts:
        return
    boxes = [text.get_window_extent() for text in texts]
    sizes = torch.tensor([(box.width + 4, box.height + 2) for box in boxes], dtype=torch.float64)
    start = torch.as_tensor(axes.transData.transform(places.numpy()))
    window = axes.get_window_extent()
    if beside is not None:
        start = start + beside * (sizes / 2 + _BESIDE)
    corners = torch.tensor([[window.x0, window.y0], [window.x1, window.y1]], dtype=torch.float64)
    moved, kept = place_apart(start, sizes, *corners)
    ends = torch.as_tensor(axes.transData.inverted().transform(moved.numpy()))
    for number, text in enumerate(texts):
        if not kept[number]:
            text.remove()
            continue
        text.set_position(ends[number].tolist())
        if (moved[number] - start[number]).norm() > _MOVED:
            line = torch.stack([places[number], ends[number]]).T
            axes.plot(*line.numpy(), color="0.25", linewidth=0.8, zorder=5, scalex=False, scaley=False)
    if not kept.all():
        note = f"{int((~kept).sum())} names left out for want of room"
        axes.text(0.0, 0.0, note, transform=axes.transAxes, fontsize=8, color="0.35").set_in_layout(False)


def place_apart(places: Tensor, sizes: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Put boxes where they belong, the first first, each as near to that as no earlier one is covered.

    Args:
        places: (K, 2), where their middles belong, in pixels.
        sizes: (K, 2), their widths and heights.
        low: (2,), corner of the frame that the boxes stay in.
        high: (2,), opposite corner.

    Returns:
        (K, 2), their middles, and (K,) bool, whether there was room for them within `_FARTHEST`.
    """
    radii = torch.arange(0.0, _FARTHEST, 4.0, dtype=torch.float64)[:, None]
    turn = 2 * math.pi * torch.arange(32, dtype=torch.float64) / 32
    offsets = torch.stack([radii * turn.cos(), radii * turn.sin()], dim=-1).flatten(0, 1)
    placed, kept = places.double().clone(), torch.zeros(len(places), dtype=torch.bool)
    for number, size in enumerate(sizes):
        tried = torch.minimum(torch.maximum(placed[number] + offsets, low + size / 2), high - size / 2)
        apart = (tried[:, None] - placed[kept]).abs() >= (size + sizes[kept]) / 2
        free = apart.any(-1).all(-1)
        kept[number] = free.any()
        placed[number] = tried[free.int().argmax()]  # the first that is free, so the nearest
    return placed, kept


def size_of_names(count: int) -> float:
    """Size of the letters of so many names, in points."""
    return 13.0 if count <= 10 else 10.5 if count <= 30 else 8.0
