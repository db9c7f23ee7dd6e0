"""How far embeddings of one class are from each other, and from those of other classes."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_sphere.metrics.class_angles import MAX_PAIRS, class_angles
from hf_sphere.visualization.figures import plain_text, save_figure, start_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BINS = 180


@plain_text()
def plot_class_angles(points: Tensor, labels: Tensor, *, title: str = "", path: str | Path | None = None) -> "Figure":
    """Draw the histograms of the angles between points of one class and between points of two.

    Both have the same area, however many pairs they stand for, so that their overlap can be seen. Of more than some
    1000 points a sample of the pairs is measured, and the caption says so.

    Args:
        points: (N, d), of any norms but zero.
        labels: (N,), class of each point; any integers.
        title: Heading.
        path: Where to save the picture (the suffix says as what); not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        TypeError: If the labels are not integers.
        ValueError: As `hf_sphere.metrics.class_angles` does.
    """
    within, between = class_angles(points, labels)
    figure, colours = start_figure(7.2, 4.0)
    axes = figure.subplots()
    edges = torch.linspace(0.0, 180.0, _BINS + 1, dtype=torch.float64)
    for kind, angles, colour, stroke in (
        ("within a class", within, colours[0], "-"),
        ("between classes", between, colours[2], "--"),
    ):
        percent = 100.0 * torch.histc(angles, _BINS, 0.0, 180.0) / len(angles) / (180.0 / _BINS)
        axes.stairs(percent, edges, fill=True, color=colour, alpha=0.35, linewidth=0)
        axes.stairs(percent, edges, color=colour, linewidth=1.3, label=kind)
        mean = angles.mean().item()
        axes.axvline(mean, color=colour, linewidth=1.8, linestyle=stroke, zorder=0, label=f"mean {mean:.1f}°")
    axes.set_xlim(0.0, 180.0)
    axes.set_xticks(range(0, 181, 30))
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("angle between two points, degrees")
    axes.set_ylabel("pairs, % per degree")
    figure.suptitle(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    every = len(points) * (len(points) - 1) // 2
    drawn = f"a sample of {MAX_PAIRS:,} pairs of each kind, of {every:,} in all"
    figure.supxlabel(drawn if every > MAX_PAIRS else f"all {every:,} pairs", fontsize=9, color="0.35")
    save_figure(figure, path)
    return figure
