"""Histograms of projections, layer by layer and epoch by epoch, beside the density of random filters."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_sphere.visualization.figures import check_matplotlib, save_figure, start_figure
from hf_sphere.visualization.layer_names import check_known, choose_evenly, shorten_layer_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LAYERS, MOST_EPOCHS = 8, 6
NEGATIVE, POSITIVE, RANDOM = "projection ≤ 0", "projection > 0", "random filters"


def plot_projection_histograms(
    training: Mapping[str, Any],
    *,
    layers: Sequence[str] | None = None,
    epochs: Sequence[int] | None = None,
    title: str = "",
    path: str | Path | None = None,
) -> "Figure":
    """Draw histograms of the normalised projections: a row a layer, a column an epoch.

    A projection p of a filter with N weights is drawn as p sqrt(N), which has variance 1 for random filters whatever N
    is, so that all layers share one axis. The line is the density of random filters: (p + 1) / 2 is
    Beta((N - 1) / 2, (N - 1) / 2).

    Args:
        training: With `epochs`, a list of `{"epoch": .., "projections": ..}` where the projections are what
            `ProjectionStatistics.to_dict` of `hf_sphere.analysis` gives; or these statistics of a single model.
        layers: Module paths of those to draw; at most 8, evenly chosen, if None.
        epochs: Those to draw; at most 6, evenly chosen, if None.
        title: Heading.
        path: Where to save the picture (the suffix says as what); not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there is nothing to draw, a layer or an epoch is not there, or projections are not normalised.
    """
    check_matplotlib()
    from matplotlib.ticker import MaxNLocator

    columns = _columns(training)
    if epochs is not None:
        check_known("epochs", epochs, [epoch for epoch in columns if epoch is not None])
    shown = choose_evenly(list(columns), MOST_EPOCHS) if epochs is None else list(epochs)
    known = list(columns[shown[0]])
    if layers is not None:
        check_known("layers", layers, known)
    rows = choose_evenly(known, MOST_LAYERS) if layers is None else list(layers)
    cells = [[_standardized(columns[epoch][name]) for epoch in shown] for name in rows]
    end = _end_of_axis(np.concatenate([values for row in cells for values in row]))

    figure, colors = start_figure(max(7.2, 1.4 + 0.97 * len(shown)), 1.3 + max(0.85 * len(rows), 1.6))
    parts: Any = figure.subplots(len(rows), len(shown), sharex=True, sharey=True, squeeze=False)
    highest, drawn = 0.0, dict[str, Any]()
    for name, short, line, row in zip(rows, shorten_layer_names(rows, 22), parts, cells, strict=True):
        dim = columns[shown[0]][name]["dim"]
        for axes, values in zip(line, row, strict=True):
            highest = max(highest, _draw_histogram(axes, values, end, colors[0]), _draw_density(axes, dim, end))
            drawn |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        line[0].set_ylabel(f"{short}\nN = {dim}", rotation=0, ha="right", va="center", fontsize=9)
    for axes, epoch in zip(parts[0], shown, strict=True):
        axes.set_title("" if epoch is None else f"epoch {epoch}", fontsize=10)
    parts[0, 0].set_ylim(0, 1.08 * highest)  # of all parts
    parts[0, 0].xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=3, steps=(1, 2, 5, 10)))
    beyond = any((np.abs(values) > end).any() for row in cells for values in row)
    label = "projection · √N" + (", those further out in the outermost bars" if beyond else "")
    figure.suptitle(title, fontsize=12, wrap=True)
    labels = [name for name in (NEGATIVE, POSITIVE, RANDOM) if name in drawn]
    handles = [drawn[name] for name in labels]
    # A label of all horizontal axes would be drawn over the legend, so it stands as its title.
    figure.legend(handles, labels, title=label, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save_figure(figure, path)
    return figure


def _columns(training: Mapping[str, Any]) -> dict[int | None, Mapping[str, Any]]:
    """Give each epoch its layers; the epoch of a single model is not known."""
    if "layers" in training:
        statistics = {None: training}
    else:
        statistics = {
            entry["epoch"]: entry["projections"] for entry in training.get("epochs", ()) if "projections" in entry
        }
    if not any(each["layers"] for each in statistics.values()):
        raise ValueError("there are no projections to draw: no epoch of the training has them.")
    if not all(each["normalized"] for each in statistics.values()):
        raise ValueError(
            "these projections are not normalised, so random filters have no known density; "
            "compute them with projection_statistics(..., normalize=True)."
        )
    return {epoch: each["layers"] for epoch, each in statistics.items()}


def _standardized(layer: Mapping[str, Any]) -> np.ndarray:
    """Bring the projections of a layer to variance 1 for random filters."""
    return math.sqrt(layer["dim"]) * np.asarray(layer["projections"], dtype=np.float64)


def _end_of_axis(values: np.ndarray) -> float:
    """Choose how far the axis goes to either side; a few projections far out do not set the scale."""
    return max(3.5, np.quantile(np.abs(values), 0.995).item()) if values.size else 3.5


def _draw_histogram(axes: Any, values: np.ndarray, end: float, color: Any) -> float:
    """Draw both sides of 0 as parts of one density, and say how high it is."""
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if values.size == 0:
        axes.text(0.03, 0.9, "all dead", transform=axes.transAxes, va="top", fontsize=8)
        return 0.0
    # The width that suits as many filters with variance 1 (Freedman and Diaconis 1981); an edge is at 0.
    middle = min(40, max(3, round(end / (2.7 * values.size ** (-1 / 3)))))
    edges = np.linspace(-end, end, 2 * middle + 1)
    width = end / middle
    values = values.clip(-end, end)
    highest = 0.0
    sides = (
        (values[values <= 0], edges[: middle + 1], NEGATIVE, 1.0),
        (values[values > 0], edges[middle:], POSITIVE, 0.4),
    )
    for own, bins, label, alpha in sides:
        density = np.histogram(own, bins)[0] / (values.size * width)
        axes.stairs(density, bins, fill=True, color=color, alpha=alpha, label=label)
        highest = max(highest, density.max())
    return highest


def _draw_density(axes: Any, dim: int, end: float) -> float:
    """Draw the density of random filters with `dim` weights, and say how high it is, within limits."""
    from scipy.stats import beta

    if dim < 2:  # a single weight projects to -1 or 1
        return 0.0
    end = min(end, math.sqrt(dim) * (1 - 1e-6))
    grid = np.linspace(-end, end, 201)
    density = beta.pdf((grid / math.sqrt(dim) + 1) / 2, (dim - 1) / 2, (dim - 1) / 2) / (2 * math.sqrt(dim))
    axes.plot(grid, density, color="black", linewidth=1.1, label=RANDOM)
    return min(density.max().item(), 0.5)  # two weights have a pole at either end
