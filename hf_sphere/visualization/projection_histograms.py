"""Histograms of projections by layer and epoch, compared with the density of random filters."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_sphere.visualization.figures import COLORS, Figure, new_figure, plain_text, save_figure, style_axes
from hf_sphere.visualization.layer_names import Item, choose_evenly, shorten_layer_names

MOST_LAYERS, MOST_EPOCHS = 8, 6
NEGATIVE, POSITIVE, RANDOM = "projection ≤ 0", "projection > 0", "random filters"


@plain_text()
def plot_projection_histograms(
    training: Mapping[str, Any],
    *,
    layers: Sequence[str] | None = None,
    epochs: Sequence[int] | None = None,
    title: str = "",
    path: str | Path | None = None,
) -> Figure:
    """Draw histograms of the normalized projections, with one row per layer and one column per epoch.

    A projection p of a filter with N weights is drawn as p sqrt(N), which has variance 1 for random filters of any N,
    so that all layers share one axis. The line is the density of random filters: (p + 1) / 2 is
    Beta((N - 1) / 2, (N - 1) / 2).

    Args:
        training: With `epochs`, a list of `{"epoch": .., "projections": ..}` where the projections are returned by
            `ProjectionStatistics.to_dict` of `hf_sphere.analysis`; or such projections of a single model.
        layers: Module paths of the layers to draw; at most 8, evenly spaced, if None.
        epochs: Epochs to draw; at most 6, evenly spaced, if None.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there is nothing to draw, a layer or an epoch is unknown, or projections are not normalized.
    """
    from matplotlib.ticker import MaxNLocator

    columns = _columns(training)
    shown = _select("epochs", epochs, list(columns), MOST_EPOCHS)
    rows = _select("layers", layers, list(columns[shown[0]]), MOST_LAYERS)
    layers_of_rows = [[columns[epoch][name] for epoch in shown] for name in rows]
    cells = [[layer["dim"] ** 0.5 * np.array(layer["projections"], float) for layer in row] for row in layers_of_rows]
    values = np.concatenate([cell for row in cells for cell in row])
    # A few outliers must not set the scale.
    end = max(3.5, np.quantile(np.abs(values), 0.995).item()) if values.size else 3.5

    figure = new_figure(max(7.2, 1.4 + 0.97 * len(shown)), 1.3 + max(0.85 * len(rows), 1.6), title)
    panels: Any = figure.subplots(len(rows), len(shown), sharex=True, sharey=True, squeeze=False)
    highest, drawn = 0.0, dict[str, Any]()
    for name, short, line, row in zip(rows, shorten_layer_names(rows, 22), panels, cells, strict=True):
        dim = columns[shown[0]][name]["dim"]
        for axes, cell in zip(line, row, strict=True):
            highest = max(highest, _draw_histogram(axes, cell, end), _draw_density(axes, dim, end))
            drawn |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        line[0].set_ylabel(f"{short}\nN = {dim}", rotation=0, ha="right", va="center", fontsize=9)
    for axes, epoch in zip(panels[0], shown, strict=True):
        axes.set_title("" if epoch is None else f"epoch {epoch}", fontsize=10)
    panels[0, 0].set_ylim(0, 1.08 * highest)  # shared by all panels
    panels[0, 0].xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=3, steps=(1, 2, 5, 10)))
    label = "projection · √N" + (", outliers in the outermost bars" if (np.abs(values) > end).any() else "")
    labels = [name for name in (NEGATIVE, POSITIVE, RANDOM) if name in drawn]
    handles = [drawn[name] for name in labels]
    # A common label of the horizontal axes would overlap the legend, so it is the legend's title.
    figure.legend(handles, labels, title=label, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return save_figure(figure, path)


def _columns(training: Mapping[str, Any]) -> dict[int | None, Mapping[str, Any]]:
    """Return the layers by epoch, which is None for a single model."""
    if "layers" in training:
        statistics = {None: training}
    else:
        entries = training.get("epochs", ())
        statistics = {entry["epoch"]: entry["projections"] for entry in entries if "projections" in entry}
    if not any(each["layers"] for each in statistics.values()):
        raise ValueError("there are no projections to draw: no epoch of the training has them.")
    if not all(each["normalized"] for each in statistics.values()):
        raise ValueError(
            "these projections are not normalized, so random filters have no known density; "
            "compute them with projection_statistics(..., normalize=True)."
        )
    return {epoch: each["layers"] for epoch, each in statistics.items()}


def _select(kind: str, given: Sequence[Any] | None, known: Sequence[Item], most: int) -> list[Item]:
    """Return the requested items, which must be known, or a selection of the known ones."""
    if given is None:
        return choose_evenly(known, most)
    known = [item for item in known if item is not None]
    unknown = [item for item in given if item not in known]
    if unknown or not given:
        missing = ", ".join(map(str, unknown)) or "none"
        raise ValueError(f"{kind} {missing} cannot be drawn; available: {', '.join(map(str, known))}.")
    return list(given)


def _draw_histogram(axes: Any, values: np.ndarray, end: float) -> float:
    """Draw the histogram with both signs as parts of a single density, and return its maximum."""
    style_axes(axes, grid="x")
    axes.tick_params(labelsize=8)
    if values.size == 0:
        axes.text(0.03, 0.9, "all dead", transform=axes.transAxes, va="top", fontsize=8)
        return 0.0
    # The bin width for this number of filters with variance 1 (Freedman and Diaconis 1981), with an edge at 0.
    half = min(40, max(3, round(end / (2.7 * values.size ** (-1 / 3)))))
    edges = np.linspace(-end, end, 2 * half + 1)
    values = values.clip(-end, end)
    highest = 0.0
    for own, bins, label, alpha in (
        (values[values <= 0], edges[: half + 1], NEGATIVE, 1.0),
        (values[values > 0], edges[half:], POSITIVE, 0.4),
    ):
        density = np.histogram(own, bins)[0] / (values.size * end / half)
        axes.stairs(density, bins, fill=True, color=COLORS[0], alpha=alpha, label=label)
        highest = max(highest, density.max())
    return highest


def _draw_density(axes: Any, dim: int, end: float) -> float:
    """Draw the density of random filters with `dim` weights, and return its maximum, up to a limit."""
    from scipy.stats import beta

    if dim < 2:  # a single weight projects to -1 or 1
        return 0.0
    end = min(end, math.sqrt(dim) * (1 - 1e-6))
    grid = np.linspace(-end, end, 201)
    density = beta.pdf((grid / math.sqrt(dim) + 1) / 2, (dim - 1) / 2, (dim - 1) / 2) / (2 * math.sqrt(dim))
    axes.plot(grid, density, color="black", linewidth=1.1, label=RANDOM)
    return min(density.max().item(), 0.5)  # the density of two weights has a pole at either end
