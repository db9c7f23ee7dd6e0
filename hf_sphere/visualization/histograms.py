"""Histograms of the angles between points."""

from pathlib import Path

import torch
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
