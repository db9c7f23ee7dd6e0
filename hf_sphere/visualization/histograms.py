"""Histograms of the angles and of the cosines between points."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.metrics.geometry import MAX_PAIRS, class_angles
from hf_sphere.visualization.figures import COLORS, Figure, add_caption, new_figure, plain_text, save_figure, style_axes

_BINS = 180


@plain_text()
def plot_class_angles(points: Tensor, labels: Tensor, *, title: str = "", path: str | Path | None = None) -> Figure:
    """Draw the histograms of the angles between points of the same class and between points of different classes.

    Both have the same area, whatever their number of pairs, so that their overlap is visible. For more than about 1000
    points only a sample of the pairs is used, as stated in the caption.

    Args:
        points: (N, d), of any nonzero norms.
        labels: (N,), class of each point; any integers.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        TypeError: If the labels are not integers.
        ValueError: For the reasons of `hf_sphere.metrics.class_angles`.

    Example:
        >>> figure = plot_class_angles(embeddings, labels, path="angles.png")
    """
    within, between = class_angles(points, labels)
    figure = new_figure(7.2, 4.0, title)
    axes = figure.subplots()
    edges = torch.linspace(0.0, 180.0, _BINS + 1, dtype=torch.float64)
    for kind, angles, color, stroke in (
        ("within a class", within, COLORS[0], "-"),
        ("between classes", between, COLORS[2], "--"),
    ):
        percent = 100.0 * torch.histc(angles, _BINS, 0.0, 180.0) / len(angles) / (180.0 / _BINS)
        axes.stairs(percent, edges, fill=True, color=color, alpha=0.35, linewidth=0)
        axes.stairs(percent, edges, color=color, linewidth=1.3, label=kind)
        mean = angles.mean().item()
        axes.axvline(mean, color=color, linewidth=1.8, linestyle=stroke, zorder=0, label=f"mean {mean:.1f}°")
    axes.set(xlim=(0.0, 180.0), xticks=range(0, 181, 30), xlabel="angle between two points, degrees")
    axes.set(ylim=(0.0, None), ylabel="pairs, % per degree")
    style_axes(axes, grid=None)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    every = len(points) * (len(points) - 1) // 2
    drawn = f"a sample of {MAX_PAIRS:,} pairs of each kind, of {every:,} in all"
    add_caption(figure, drawn if every > MAX_PAIRS else f"all {every:,} pairs")
    return save_figure(figure, path)


@plain_text()
def plot_cosines(
    points: Tensor, *, bound: float | None = None, title: str = "", path: str | Path | None = None
) -> Figure:
    """Draw the histogram of the cosines between all pairs of points, and mark the largest one.

    Args:
        points: (K, d), of any nonzero norms.
        bound: A lower bound of the largest cosine, marked as well.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there are fewer than two points.

    Example:
        >>> figure = plot_cosines(embeddings, path="cosines.png")
    """
    from matplotlib.ticker import MaxNLocator

    if len(points) < 2:
        raise ValueError(f"cosines need at least two points; got {len(points)}.")
    unit = F.normalize(points.detach().double().cpu(), dim=1)
    ends = torch.stack([torch.stack(pairs.aminmax()) for pairs in _cosines_of_pairs(unit)])
    lowest, largest = ends[:, 0].min().item(), ends[:, 1].max().item()
    # The first and the last bar are centered on the extremes, so that the mark of the largest cosine is on its bar.
    width = max((largest - lowest) / 79, 0.002)
    bins = round((largest - lowest) / width) + 1
    left, right = lowest - width / 2, lowest + (bins - 0.5) * width
    counts = torch.zeros(bins, dtype=torch.float64)
    for pairs in _cosines_of_pairs(unit):
        counts += torch.histc(pairs, bins, left, right)
    figure = new_figure(7.2, 3.6)
    axes = figure.subplots()
    axes.stairs(counts, torch.linspace(left, right, bins + 1), fill=True, color=COLORS[0])
    # Marks are drawn behind the bars, which end below the top; a line in front would hide a thin bar.
    optimal = bound is not None and largest - bound <= 1e-6
    label = f"largest {largest:.4f}{', the smallest possible' if optimal else ''}"
    axes.axvline(largest, color=COLORS[2], linewidth=1.8, zorder=0, label=label)
    if bound is not None and not optimal:
        label = f"no placement is below {bound:.4f}"
        axes.axvline(bound, color="0.25", linewidth=1.8, linestyle="--", zorder=0, label=label)
    lowest = lowest if bound is None else min(lowest, bound)
    margin = max(0.06 * (largest - lowest), 0.05)
    axes.set(xlim=(max(lowest - margin, -1.02), min(largest + margin, 1.02)), ylim=(0, 1.15 * counts.max().item()))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set(xlabel="cosine between two points", ylabel="pairs", title=title)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    style_axes(axes, grid=None)
    return save_figure(figure, path)


def _cosines_of_pairs(unit: Tensor) -> Iterator[Tensor]:
    """Yield the cosines between all pairs of unit vectors (K, d), each pair once, in blocks of rows."""
    step = max(1, 2**22 // len(unit))
    for start in range(0, len(unit) - 1, step):  # the last row has no pair to its right
        cosines = unit[start : start + step] @ unit.T
        yield cosines[torch.ones_like(cosines, dtype=torch.bool).triu(start + 1)].clamp(-1.0, 1.0)
