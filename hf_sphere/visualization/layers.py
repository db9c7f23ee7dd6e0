"""Figures of layers: projections of filters, their course during training, and the accuracy after a layer is reset."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from hf_sphere.visualization import figures
from hf_sphere.visualization.figures import COLORS, Figure, new_figure, plain_text, save_figure

SIGNIFICANT = 0.05  # level of the adjusted p-values

MOST_LAYERS, MOST_EPOCHS = 8, 6
NEGATIVE, POSITIVE, RANDOM = "projection ≤ 0", "projection > 0", "random filters"

ACCURACY, MASS = "accuracy, %", "share of projections ≤ 0"
DISTANCE = "distance from\ninitialization, relative"

_MOST_NAMES = 9  # layers in the legend; the colors of the others are between those of their neighbors
MOST_LABELS = 14  # columns with a label


@plain_text()
def plot_projection_masses(statistics: Mapping[str, Any], *, title: str = "", path: str | Path | None = None) -> Figure:
    """Draw the fraction of projections that are not positive: one bar per layer, the last for the whole network.

    Behind each bar is the 95 % range for the same number of random filters. Bars are filled if the sign
    test or the Kolmogorov-Smirnov test distinguishes the layer from random filters (p-value adjusted for the number of
    layers), and hatched otherwise.

    Args:
        statistics: Returned by `ProjectionStatistics.to_dict` of `hf_sphere.hyperplanes`: `layers` and `net`, each with
            `mass`, `null_mass_low`, `null_mass_high`, `sign_p_value_adjusted` and `ks_p_value_adjusted`; null where a
            number is undefined.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.

    Reference:
        Gamba, Carlsson, Azizpour and Björkman, "Hyperplane arrangements of trained ConvNets are biased", 2020.

    Example:
        >>> statistics = hf_sphere.hyperplanes.projection_statistics(network)
        >>> figure = plot_projection_masses(statistics.to_dict(), path="masses.png")
    """
    names = [*figures.shorten_layer_names(list(statistics["layers"])), "network"]
    positions = [*range(len(names) - 1), len(names) - 0.5]  # with a gap before the network
    p_values, columns = ["sign_p_value_adjusted", "ks_p_value_adjusted"], ["mass", "null_mass_low", "null_mass_high"]
    entries = [*statistics["layers"].values(), statistics["net"]]
    live = pd.DataFrame(entries, positions, [*columns, *p_values], float).dropna(subset=["mass"])
    differs = (live[p_values] < SIGNIFICANT).any(axis=1)
    figure = new_figure(7.2, 1.3 + 0.21 * max(len(names), 5), title)
    axes: Any = figure.subplots()
    if len(live):  # wider than the bars, which would hide it
        low, label = live["null_mass_low"], "95 % range of random filters"
        axes.barh(live.index, live["null_mass_high"] - low, 0.94, left=low, color="0.8", label=label, zorder=1)
    different = f"unlike random filters (sign or KS test, adjusted p < {SIGNIFICANT})"
    hatched = {"facecolor": "white", "edgecolor": COLORS[1], "hatch": "/////", "linewidth": 1.2}
    for masses, style in (
        (live["mass"][differs], {"label": different, "color": COLORS[0]}),
        (live["mass"][~differs], {"label": "no significant difference", **hatched}),
    ):
        if len(masses):
            axes.barh(masses.index, masses, 0.52, zorder=2, **style)
            # A line at the end of each bar, so that a bar of length 0 is visible.
            ends = masses.index - 0.26, masses.index + 0.26
            axes.vlines(masses, *ends, color="0.2", linewidth=2.2, clip_on=False, zorder=4)
    axes.axvline(0.5, color="0.2", linewidth=0.9, zorder=3)
    axes.set_yticks(positions, names)
    axes.tick_params(axis="y", length=0)
    axes.get_yticklabels()[-1].set_fontweight("bold")
    room = max(0.6, (5 - len(positions)) / 2)  # a few bars should not be wide
    axes.set(xlim=(0, 1), ylim=(positions[-1] + room, positions[0] - room))  # the first layer on top
    axes.set_xlabel("share of projections ≤ 0")
    axes.grid(axis="x")
    figures.add_legend_below(figure, *axes.get_legend_handles_labels())
    return save_figure(figure, path)


@plain_text()
def plot_projection_histograms(
    training: Mapping[str, Any], *, title: str = "", path: str | Path | None = None
) -> Figure:
    """Draw histograms of the normalized projections, with one row per layer and one column per epoch.

    At most 8 layers and 6 epochs are drawn, evenly spaced, with the first and the last. A projection p of a filter with
    N weights is drawn as p sqrt(N), which has variance 1 for random filters of any N, so that all layers share one
    axis. The line is the density of random filters: (p + 1) / 2 is Beta((N - 1) / 2, (N - 1) / 2).

    Args:
        training: With `epochs`, a list of `{"epoch": .., "projections": ..}` where the projections are returned by
            `ProjectionStatistics.to_dict` of `hf_sphere.hyperplanes`; or such projections of a single model.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If projections are not normalized.

    Example:
        >>> statistics = hf_sphere.hyperplanes.projection_statistics(network)
        >>> figure = plot_projection_histograms(statistics.to_dict(), path="histograms.png")
    """
    from matplotlib.ticker import MaxNLocator
    from scipy.stats import beta

    if "layers" in training:
        statistics: dict[Any, Mapping[str, Any]] = {None: training}
    else:
        entries = training.get("epochs", ())
        statistics = {entry["epoch"]: entry["projections"] for entry in entries if "projections" in entry}
    if not all(each["normalized"] for each in statistics.values()):
        raise ValueError("the projections are not normalized; use projection_statistics(..., normalize=True).")
    shown = figures.choose_evenly(list(statistics), MOST_EPOCHS)
    rows = figures.choose_evenly(list(statistics[shown[0]]["layers"]), MOST_LAYERS)
    layers = [[statistics[epoch]["layers"][name] for epoch in shown] for name in rows]
    cells = [[layer["dim"] ** 0.5 * np.array(layer["projections"], float) for layer in row] for row in layers]
    values = np.concatenate([cell for row in cells for cell in row])
    # A few outliers must not set the scale.
    end = max(3.5, np.quantile(np.abs(values), 0.995).item()) if values.size else 3.5

    figure = new_figure(max(7.2, 1.4 + 0.97 * len(shown)), 1.3 + max(0.85 * len(rows), 1.6), title)
    panels: Any = figure.subplots(len(rows), len(shown), sharex=True, sharey=True, squeeze=False)
    highest, drawn = 0.0, dict[str, Any]()
    for name, line, row, of_row in zip(figures.shorten_layer_names(rows, 22), panels, cells, layers, strict=True):
        dim = of_row[0]["dim"]
        for axes, cell in zip(line, row, strict=True):
            axes.grid(axis="x")
            if cell.size == 0:
                axes.text(0.03, 0.9, "all dead", transform=axes.transAxes, va="top")
            else:  # both signs are parts of a single density
                # The bin width for this number of filters with variance 1 (Freedman and Diaconis 1981), an edge at 0.
                half = min(40, max(3, round(end / (2.7 * cell.size ** (-1 / 3)))))
                edges = np.linspace(-end, end, 2 * half + 1)
                inside = cell.clip(-end, end)
                for of_sign, bins, label, alpha in (
                    (inside[inside <= 0], edges[: half + 1], NEGATIVE, 1.0),
                    (inside[inside > 0], edges[half:], POSITIVE, 0.4),
                ):
                    density = np.histogram(of_sign, bins)[0] / (cell.size * end / half)
                    axes.stairs(density, bins, fill=True, color=COLORS[0], alpha=alpha, label=label)
                    highest = max(highest, density.max())
            if dim > 1:  # a single weight projects to -1 or 1
                grid = np.linspace(-1, 1, 201) * min(end, math.sqrt(dim) * (1 - 1e-6))
                shape = (dim - 1) / 2
                density = beta.pdf((grid / math.sqrt(dim) + 1) / 2, shape, shape) / (2 * math.sqrt(dim))
                axes.plot(grid, density, color="black", linewidth=1.1, label=RANDOM)
                highest = max(highest, min(density.max(), 0.5))  # of two weights it has a pole at either end
            drawn |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        line[0].set_ylabel(f"{name}\nN = {dim}", rotation=0, ha="right", va="center")
    for axes, epoch in zip(panels[0], shown, strict=True):
        axes.set_title("" if epoch is None else f"epoch {epoch}")
    panels[0, 0].set_ylim(0, 1.08 * highest)  # shared by all panels
    panels[0, 0].xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=3, steps=(1, 2, 5, 10)))
    label = "projection · √N" + (", outliers in the outermost bars" if (np.abs(values) > end).any() else "")
    labels = [name for name in (NEGATIVE, POSITIVE, RANDOM) if name in drawn]
    # A common label of the horizontal axes would overlap the legend, so it is the legend's title.
    figures.add_legend_below(figure, [drawn[name] for name in labels], labels, title=label)
    return save_figure(figure, path)


@plain_text()
def plot_projections_along_training(
    training: Mapping[str, Any], *, title: str = "", path: str | Path | None = None
) -> Figure:
    """Draw the fraction of projections that are not positive during training by layer, and above it the accuracy.

    Lines of layers run from dark (the first) to light (the last); the thick line is the entire network. If there are
    accuracies or distances from the initialization (L2, relative), each has a panel.

    Args:
        training: With `epochs`, a list of entries with `epoch` and, where known, `train_accuracy` and `eval_accuracy`
            from 0 to 1, and `projections` and `distances`, which are returned by `to_dict` of the results of
            `projection_statistics` and `distance_from_initialization` of `hf_sphere.hyperplanes`.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.

    Example:
        >>> plot_projections_along_training(json.load(open("training.json")), path="training.png")  # doctest: +SKIP
    """
    import matplotlib
    from matplotlib.ticker import MaxNLocator

    entries = training.get("epochs", ())
    names = list(next((entry["projections"]["layers"] for entry in entries if "projections" in entry), ()))
    frame = pd.json_normalize(entries, sep="/").set_index("epoch").sort_index()

    def course(*keys: str) -> pd.Series:
        return frame.get("/".join(keys), pd.Series(index=frame.index)).astype(float)

    named = figures.choose_evenly(names, _MOST_NAMES)
    labels = dict(zip(named, figures.shorten_layer_names(named, 20), strict=True))
    panels: dict[str, list[tuple[pd.Series, dict[str, Any]]]] = {ACCURACY: [], MASS: [], DISTANCE: []}
    for index, kind, label in ((1, "train", "training"), (0, "eval", "evaluation")):
        style = figures.style_line(index) | {"label": label, "linewidth": 1.8}
        panels[ACCURACY].append((100 * course(f"{kind}_accuracy"), style))
    for index, name in enumerate(names):
        position = 0.88 * index / max(1, len(names) - 1)  # the lightest colors are invisible on white
        line = {"linestyle": figures.style_line(index)["linestyle"] if len(names) <= _MOST_NAMES else "-"}
        line |= {"color": matplotlib.colormaps["viridis"](position), "label": labels.get(name, "_")}
        line |= {"linewidth": 1.9 - position}  # lines below others are visible
        panels[MASS].append((course("projections", "layers", name, "mass"), line))
        l2, relative = (course("distances", "layers", name, key) for key in ("l2", "relative"))
        # Distances of a layer that is initialized with zeros are absolute, and not comparable.
        panels[DISTANCE].append((l2.where(relative == 1), line))
    network = {"color": "black", "linewidth": 3, "label": "network", "zorder": 3}
    panels[MASS].append((course("projections", "net", "mass"), network))
    panels = {name: lines for name, lines in panels.items() if any(values.notna().any() for values, _ in lines)}
    heights = [{ACCURACY: 1.5, MASS: 2.4, DISTANCE: 2.0}[name] for name in panels]
    figure = new_figure(7.2, 0.8 + sum(heights), title)
    grid = figure.subplots(len(panels), squeeze=False, sharex=True, height_ratios=heights).flatten()
    for axes, (name, lines) in zip(grid, panels.items(), strict=True):
        for values, style in ((values.dropna(), style) for values, style in lines if values.notna().any()):
            axes.plot(values, **{"marker": "o" if len(values) < 12 else None, "markersize": 3} | style)
        axes.set_ylabel(name)
        axes.grid()
        if name == DISTANCE:
            axes.set_ylim(bottom=0)
            continue
        legend = None
        if name == MASS:
            axes.axhline(0.5, color="0.2", linewidth=0.9, zorder=1)
            legend = f"layers ({_MOST_NAMES} of {len(names)} named)" if len(names) > _MOST_NAMES else "layers"
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), title=legend, handlelength=2.8)
    grid[-1].set_xlabel("epoch")
    grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels(grid)
    return save_figure(figure, path)


@plain_text()
def plot_reinitialization(
    robustness: Mapping[str, Any],
    *,
    quantity: Literal["accuracy", "relative_drop"] = "accuracy",
    metric: str = "accuracy",
    title: str = "",
    path: str | Path | None = None,
) -> Figure:
    """Draw a heat map of accuracies, with one row per reset layer and one column per epoch that it is reset to.

    The mean accuracy of random draws has a separate column. The mark at the color bar is the trained model.

    Args:
        robustness: Returned by `ReinitializationRobustness.to_dict` of `hf_sphere.hyperplanes`: `accuracy` from 0 to 1
            and `layers`, each with `snapshots` (accuracy by epoch, null if not known) and `random` (`mean`, or null).
        quantity: Color of the cells: the accuracy, or its relative drop, (trained - accuracy) / trained, where a layer
            that is not critical has 0. Both are in percent, and critical layers are dark.
        metric: Name of the accuracy, for instance `top-5 accuracy`.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If the accuracy of the trained model is 0 and a relative drop of it is requested.

    Reference:
        Zhang, Bengio and Singer, "Are all layers created equal?", 2019.

    Example:
        >>> plot_reinitialization(robustness.to_dict(), path="layers.png")  # doctest: +SKIP
    """
    from matplotlib.colors import Normalize
    from matplotlib.markers import CARETRIGHT

    layers, trained = robustness["layers"], 100 * robustness["accuracy"]
    epochs = sorted({epoch for layer in layers.values() for epoch in layer["snapshots"]}, key=int)
    cells = [[layer["snapshots"].get(epoch) for epoch in epochs] for layer in layers.values()]
    random = [(layer["random"] or {}).get("mean") for layer in layers.values()]
    values = 100 * np.array([[*row, draw] for row, draw in zip(cells, random, strict=True)], float)  # null is nan
    label, mark = f"{metric}, % (as trained: {trained:.1f})", trained
    if quantity == "relative_drop":
        if not trained > 0:
            raise ValueError("the trained model has an accuracy of 0, so a relative drop is undefined.")
        values = 100 * (trained - values) / trained
        label, mark = f"drop, % of the {metric} ({trained:.1f} %)", 0.0

    # Columns of snapshots have width 1; the one of random weights is wide enough for its name.
    count, step = len(epochs), math.ceil(len(epochs) / MOST_LABELS)
    edges = np.array([*range(count + 1), count + max(1.7, count / 10)])
    labels = [epoch if column % step == 0 else "" for column, epoch in enumerate(epochs)] + ["random\nweights"]
    if not np.isfinite(values[:, -1]).any():
        values, edges, labels = values[:, :-1], edges[:-1], labels[:-1]
    rows, columns = values.shape
    figure = new_figure(min(7.2, 3.6 + 0.6 * columns), 1.3 + max(0.21, 0.36 - 0.008 * rows) * max(rows, 6), title)
    axes: Any = figure.subplots()
    style: dict[str, Any] = {
        "norm": Normalize(min(np.nanmin(values), mark), max(np.nanmax(values), mark)),
        "cmap": "viridis_r" if quantity == "relative_drop" else "viridis",
        **{"edgecolors": "white", "linewidth": 0.4},
    }
    axes.set_facecolor("0.9")  # of cells that were not measured
    image = axes.pcolormesh(edges, np.arange(rows + 1) - 0.5, np.ma.masked_invalid(values), **style)
    if 0 < count < columns:
        axes.axvline(count, color="white", linewidth=5)
    if np.isnan(values).any():
        figures.add_legend_below(figure, axes.fill([], [], facecolor="0.9", label="not measured"), ["not measured"])
    axes.set(xlim=(0, edges[-1]), ylim=(rows - 0.5, -0.5), ylabel="layer that is reset")
    if epochs:
        axes.set_xlabel("to its state after this epoch", x=count / 2 / edges[-1])
    names = figures.shorten_layer_names([name.removeprefix("sphere_vision.backbone.") for name in layers])
    axes.set_yticks(range(rows), names)
    axes.set_xticks((edges[1:] + edges[:-1]) / 2, labels)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, aspect=max(20, 1.3 * rows), pad=0.03, label=label)
    across = bar.ax.get_yaxis_transform()
    bar.ax.plot(0, mark, marker=CARETRIGHT, color="black", markersize=6, transform=across, clip_on=False)
    return save_figure(figure, path)
