"""Figures of metrics: reliability diagrams, risk-coverage curves, and histograms of angles."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_sphere.metrics import ReliabilityBins
from hf_sphere.metrics.geometry import MAX_PAIRS, class_angles
from hf_sphere.visualization.figures import (
    COLORS,
    Figure,
    add_caption,
    add_legend_below,
    new_figure,
    plain_text,
    save_figure,
    style_line,
)

_MOST_POINTS = 4000  # points of a curve; more are not visible and enlarge the file
_ANGLE_BINS = 180


@plain_text()
def plot_reliability(
    bins: ReliabilityBins, *, title: str = "", path: str | Path | None = None, caption: str = ""
) -> Figure:
    """Draw accuracy over confidence with one point per bin, and below it the number of predictions in each bin.

    The error bar of a point is the 95 % interval of its accuracy (Wilson), so that a bin of few predictions is not
    mistaken for miscalibration. Both axes show the same range, as small as the points allow.

    Args:
        bins: The bins, see `hf_sphere.metrics.reliability_bins`; empty ones are ignored.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.
        caption: Caption below the figure.

    Raises:
        ImportError: If matplotlib is missing.

    Reference:
        Guo, Pleiss, Sun and Weinberger, "On calibration of modern neural networks", ICML 2017, figure 1.

    Example:
        >>> bins = hf_sphere.metrics.reliability_bins(torch.rand(100), torch.rand(100) > 0.5)
        >>> figure = plot_reliability(bins, path="reliability.png")
    """
    from matplotlib.ticker import MaxNLocator
    from scipy.stats import binomtest

    used = bins.count > 0
    count = bins.count[used].double().cpu()
    confidence, accuracy = (100.0 * value[used].double().cpu() for value in (bins.confidence, bins.accuracy))
    correct = (accuracy / 100 * count).round()
    tests = [binomtest(int(k), int(n)) for k, n in zip(correct, count, strict=True)]
    ends = 100 * torch.tensor([test.proportion_ci(method="wilson") for test in tests])
    figure = new_figure(5.6, 6.8, title)
    axes, below = figure.subplots(2, height_ratios=(5, 1), sharex=True)
    span = 1.15 * (100 - min(confidence.min().item(), accuracy.min().item()))
    start = 100 - next((size for size in (0.5, 1, 2, 5, 10, 20, 30, 50, 70) if size >= span), 100)
    end = 100 + 0.02 * (100 - start)
    axes.plot((start, end), (start, end), "--", color="0.45", linewidth=1.2, zorder=1, label="perfect calibration")
    errors = torch.stack([accuracy - ends[:, 0], ends[:, 1] - accuracy]).clamp_min(0)
    style = {"color": COLORS[0], "markersize": 5, "elinewidth": 1.2, "capsize": 2.5, "zorder": 2}
    axes.errorbar(confidence, accuracy, yerr=errors, fmt="o", label="bins, with 95 % intervals", **style)
    axes.set(xlim=(start, end), ylim=(start, end), ylabel="accuracy, %")
    # Above the axes, since points can be anywhere inside.
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    below.vlines(confidence, 0, count, color=COLORS[0], linewidth=3)
    below.set(ylim=(0, 1.15 * count.max().item()), ylabel="images", xlabel="confidence, %")
    below.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    for panel in (axes, below):
        panel.grid()
    add_caption(figure, caption)
    return save_figure(figure, path)


@plain_text()
def plot_risk_coverage(
    curves: Mapping[str, tuple[Tensor, Tensor]], *, title: str = "", path: str | Path | None = None
) -> Figure:
    """Draw the risk, which is the error rate of the most confident predictions, over their fraction, the coverage.

    Args:
        curves: Coverage (N,), increasing, and risk (N,), both from 0 to 1, by name of the certainty measure; see
            `hf_sphere.metrics.risk_coverage`.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there are no curves, or values are not from 0 to 1.

    Reference:
        Geifman and El-Yaniv, "Selective classification for deep neural networks", NeurIPS 2017.

    Example:
        >>> curve = hf_sphere.metrics.risk_coverage(torch.rand(100), torch.rand(100) > 0.5)
        >>> figure = plot_risk_coverage({"norm": curve}, path="risk.png")
    """
    figure = new_figure(6.4, 4.2, title)
    axes: Any = figure.subplots()
    if not curves or max(float(values.max()) for curve in curves.values() for values in curve) > 1 + 1e-9:
        raise ValueError("curves must be at least one, of coverages and risks from 0 to 1.")
    top, of_all = 0.0, {round(float(risk[-1]), 9) for _, risk in curves.values()}
    for index, (name, (coverage, risk)) in enumerate(curves.items()):
        shown = torch.linspace(0, len(coverage) - 1, min(len(coverage), _MOST_POINTS)).round().long()
        x, y = (100.0 * values.double().cpu()[shown] for values in (coverage, risk))
        axes.plot(x, y, linewidth=1.8, label=name, **style_line(index))
        # Among the first few predictions a single error is a large share, which must not set the scale.
        top = max(top, y[x >= min(5.0, x[-1].item())].max().item())
    if len(of_all) == 1:  # curves of several models have several
        axes.axhline(100 * of_all.pop(), color="0.45", linewidth=1.0, linestyle=(0, (1, 2)), label="all kept")
    room = top or 1.0
    axes.set(xlim=(0, 101), ylim=(-0.02 * room, 1.08 * room))  # a curve at zero must be visible
    axes.set(xlabel="share of images kept, most confident first, %", ylabel="error rate among them, %")
    axes.grid()
    add_legend_below(figure, *axes.get_legend_handles_labels())
    return save_figure(figure, path)


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
    edges = torch.linspace(0.0, 180.0, _ANGLE_BINS + 1, dtype=torch.float64)
    for kind, angles, color, stroke in (
        ("within a class", within, COLORS[0], "-"),
        ("between classes", between, COLORS[2], "--"),
    ):
        percent = 100.0 * torch.histc(angles, _ANGLE_BINS, 0.0, 180.0) / len(angles) / (180.0 / _ANGLE_BINS)
        axes.stairs(percent, edges, fill=True, color=color, alpha=0.35, linewidth=0)
        axes.stairs(percent, edges, color=color, linewidth=1.3, label=kind)
        mean = angles.mean().item()
        axes.axvline(mean, color=color, linewidth=1.8, linestyle=stroke, zorder=0, label=f"mean {mean:.1f}°")
    axes.set(xlim=(0.0, 180.0), xticks=range(0, 181, 30), xlabel="angle between two points, degrees")
    axes.set(ylim=(0.0, None), ylabel="pairs, % per degree")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    every = len(points) * (len(points) - 1) // 2
    drawn = f"a sample of {MAX_PAIRS:,} pairs of each kind, of {every:,} in all"
    add_caption(figure, drawn if every > MAX_PAIRS else f"all {every:,} pairs")
    return save_figure(figure, path)
