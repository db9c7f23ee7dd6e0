"""How far confidences can be trusted: confidence against accuracy, and what is gained by leaving the unsure out."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hf_sphere.visualization.figures import check_matplotlib, save_figure, start_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STROKES = ("-", "--", "-.", ":")  # tell curves apart in grey
_WIDENED_UP_TO = 0.05
"""Percent below 100 from where on a widened axis is no longer widened."""

_MOST_POINTS = 4000
"""Points of a curve; more cannot be seen and make a large file."""


class Bins(Protocol):
    """Predictions in bins, as `hf_sphere.metrics.reliability_bins` makes them.

    Attributes:
        confidence: (B,) mean confidence of each bin, from 0 to 1.
        accuracy: (B,) share of its predictions that are right, from 0 to 1.
        count: (B,) its predictions; where there are none, the other two mean nothing.
    """

    @property
    def confidence(self) -> Tensor: ...  # noqa: D102
    @property
    def accuracy(self) -> Tensor: ...  # noqa: D102
    @property
    def count(self) -> Tensor: ...  # noqa: D102


def plot_reliability(bins: Bins, *, title: str = "", path: str | Path | None = None, caption: str = "") -> "Figure":
    """Draw accuracy over confidence, a point a bin, and below it how many predictions each point stands for.

    The bar of a point is the 95 % interval of its accuracy (Wilson), so that a bin of few predictions is not mistaken
    for a wrong confidence. Both axes show the same range, which is as much of 0 to 100 % as the points need. Where
    most points still crowd at its end, as those of a model that is nearly always right do, both are widened towards
    100 %.

    Args:
        bins: The bins; empty ones are left out.
        title: Heading.
        path: Where to save the picture (the suffix says as what); not saved if None.
        caption: A line below the picture.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If every bin is empty.

    Reference:
        Guo, Pleiss, Sun and Weinberger, "On calibration of modern neural networks", ICML 2017, figure 1.
    """
    check_matplotlib()
    from matplotlib.ticker import MaxNLocator

    used = bins.count > 0
    if not used.any():
        raise ValueError("there is no prediction in any bin, so nothing to draw.")
    count = bins.count[used].double().cpu()
    confidence, accuracy = (100.0 * value[used].double().cpu() for value in (bins.confidence, bins.accuracy))
    low, high = _wilson_interval(accuracy / 100, count)
    figure, colors = start_figure(5.6, 6.8)
    axes, below = figure.subplots(2, height_ratios=(5, 1), sharex=True)
    start = _start_of_axis(min(confidence.min().item(), accuracy.min().item()))
    end = 100 + 0.02 * (100 - start)
    if crowded := _are_crowded(confidence, accuracy, start):
        end = 100 + _WIDENED_UP_TO / 2
        _widen_towards_100(axes, start)
    axes.plot((start, end), (start, end), "--", color="0.45", linewidth=1.2, zorder=1, label="as right as confident")
    axes.errorbar(
        confidence,
        accuracy,
        yerr=torch.stack([accuracy - 100 * low, 100 * high - accuracy]).clamp_min(0),
        fmt="o",
        markersize=5,
        color=colors[0],
        ecolor=colors[0],
        elinewidth=1.2,
        capsize=2.5,
        zorder=2,
        label="bins, with 95 % intervals",
    )
    axes.set_xlim(start, end)
    axes.set_ylim(start, end)
    axes.set_ylabel("accuracy, %")
    figure.suptitle(title)
    # Above the axes: inside of them points may stand anywhere.
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize=9)
    below.vlines(confidence, 0, count, color=colors[0], linewidth=3)
    below.set_ylim(0, 1.15 * count.max().item())
    below.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    below.set_ylabel("images")
    below.set_xlabel("confidence, % (both axes are widened towards 100)" if crowded else "confidence, %")
    for part in (axes, below):
        part.grid(color="0.9")
        part.set_axisbelow(True)
        part.spines[["top", "right"]].set_visible(False)
    if caption:
        figure.supxlabel(caption, fontsize=9, color="0.35")
    save_figure(figure, path)
    return figure


def plot_risk_coverage(
    curves: Mapping[str, tuple[Tensor, Tensor]], *, title: str = "", path: str | Path | None = None
) -> "Figure":
    """Draw the error among the predictions that are kept over their share, the surest kept first.

    Args:
        curves: Name of each measure of certainty to coverage (N,), rising, and risk (N,), both from 0 to 1; see
            `hf_sphere.metrics.risk_coverage`.
        title: Heading.
        path: Where to save the picture (the suffix says as what); not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there is no curve, or one without a point.

    Reference:
        Geifman and El-Yaniv, "Selective classification for deep neural networks", NeurIPS 2017.
    """
    check_matplotlib()
    empty = [name for name, (coverage, _) in curves.items() if len(coverage) == 0]
    if not curves or empty:
        raise ValueError(f"there is no prediction to draw {empty[0] if empty else 'a curve'} of.")
    figure, colors = start_figure(6.4, 4.2)
    axes: Any = figure.subplots()
    top = 0.0
    for number, (name, (coverage, risk)) in enumerate(curves.items()):
        shown = torch.linspace(0, len(coverage) - 1, min(len(coverage), _MOST_POINTS)).round().long()
        x, y = (100.0 * values.double().cpu()[shown] for values in (coverage, risk))
        axes.plot(x, y, _STROKES[number % 4], color=colors[number % 10], linewidth=1.8, label=name)
        # Among the first few, one error is a large share: that would set the scale for all the others.
        top = max(top, y[x >= min(5.0, x[-1].item())].max().item())
    everything = y[-1].item()
    axes.axhline(everything, color="0.45", linewidth=1.0, linestyle=(0, (1, 2)), label="all kept")
    axes.set_xlim(0, 101)
    room = top or 1.0
    axes.set_ylim(-0.02 * room, 1.08 * room)  # a curve along zero is to be seen
    axes.set_xlabel("share of images kept, the surest first, %")
    axes.set_ylabel("error among them, %")
    axes.set_title(title)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(curves) + 1, frameon=False)
    save_figure(figure, path)
    return figure


def _start_of_axis(lowest: float) -> float:
    """Choose where an axis that ends at 100 starts, in percent, so that `lowest` stands a little inside of it."""
    room = 1.15 * (100 - lowest)
    return 100 - next((span for span in (0.5, 1, 2, 5, 10, 20, 30, 50, 70) if span >= room), 100)


def _are_crowded(confidence: Tensor, accuracy: Tensor, start: float) -> bool:
    """Tell whether most points, in percent, stand in the last corner of axes from `start` to 100."""
    edge = 100 - 0.03 * (100 - start)
    return ((confidence > edge) & (accuracy > edge)).double().mean().item() > 0.5


def _widen_towards_100(axes: Any, start: float) -> None:
    """Give both axes the scale -log(100 - value), in which 90, 99 and 99.9 are equally far apart, up to near 100."""
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    def forward(values: Any) -> Any:
        return -np.log10(np.maximum(100 - values + _WIDENED_UP_TO, 1e-3))

    def backward(values: Any) -> Any:
        return 100 + _WIDENED_UP_TO - 10.0**-values

    ticks = [tick for tick in (0, 50, 80, 90, 95, 98, 99, 99.5, 99.9, 100) if tick >= start]
    for set_scale, axis in ((axes.set_xscale, axes.xaxis), (axes.set_yscale, axes.yaxis)):
        set_scale("function", functions=(forward, backward))
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _wilson_interval(accuracy: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Both ends of the 95 % interval of a share (Wilson 1927), which holds for few trials and near 0 and 1 too."""
    z = 1.959963984540054
    scale = 1 + z**2 / count
    center = (accuracy + z**2 / (2 * count)) / scale
    half = z / scale * (accuracy * (1 - accuracy) / count + z**2 / (4 * count**2)).sqrt()
    return center - half, center + half
