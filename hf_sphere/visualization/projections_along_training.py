"""Accuracy, masses of projections and distances from initialisation, along training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_sphere.visualization.figures import check_matplotlib, save_figure, start_figure
from hf_sphere.visualization.layer_names import choose_evenly, shorten_layer_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STROKES = ("-", "--", "-.", ":")  # tell lines apart in grey
_MOST_NAMES = 9
"""Layers that the legend names; colours go from the first to the last layer, so that others are found between them."""


def plot_projections_along_training(
    training: Mapping[str, Any], *, title: str = "", path: str | Path | None = None
) -> "Figure":
    """Draw how the masses of the layers move along training, and above them the accuracy.

    Lines of layers run from dark (the first) to light (the last); the thick line is the whole network. The accuracies
    and the distances from initialisation (L2, relative) have their panels where there are any.

    Args:
        training: With `epochs`, a list of entries with `epoch` and, each where it is known, `train_accuracy` and
            `eval_accuracy` from 0 to 1, and `projections` and `distances`, which are what `to_dict` of the results of
            `projection_statistics` and `distance_from_initialization` of `hf_sphere.analysis` gives.
        title: Heading.
        path: Where to save the picture (the suffix says as what); not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If no epoch has projections.
    """
    check_matplotlib()
    from matplotlib.ticker import MaxNLocator

    entries = sorted(training.get("epochs", ()), key=lambda entry: entry["epoch"])
    names = list(next((entry["projections"]["layers"] for entry in entries if "projections" in entry), ()))
    if not names:
        raise ValueError("there are no projections to draw: no epoch of the training has them.")
    accuracies = {
        kind: [entry.get(f"{kind}_accuracy") for entry in entries]
        for kind in ("train", "eval")
        if any(entry.get(f"{kind}_accuracy") is not None for entry in entries)
    }
    distances = {name: [_distance(entry, name) for entry in entries] for name in names}
    distances = {name: values for name, values in distances.items() if any(value is not None for value in values)}
    heights = [*([1.5] if accuracies else []), 2.4, *([2.0] if distances else [])]
    figure, colors = start_figure(7.2, 0.8 + sum(heights))
    panels = list(figure.subplots(len(heights), squeeze=False, sharex=True, height_ratios=heights).flatten())
    epochs = [entry["epoch"] for entry in entries]
    styles = _styles(names)
    if accuracies:
        _draw_accuracies(panels[0], epochs, accuracies, colors)
    _draw_masses(panels[1 if accuracies else 0], epochs, entries, styles)
    if distances:
        _draw_distances(panels[-1], epochs, distances, styles)
    for axes in panels:
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("epoch")
    if len(epochs) == 1:
        panels[-1].set_xticks(epochs)
    else:
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels(panels)
    figure.suptitle(title, fontsize=12, wrap=True)
    save_figure(figure, path)
    return figure


def _distance(entry: Mapping[str, Any], name: str) -> float | None:
    """Look up a relative distance; one of a layer that began at zero is absolute and has no place beside the others."""
    layer = entry.get("distances", {"layers": {}})["layers"].get(name)
    return layer["l2"] if layer and layer["relative"] else None


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    import matplotlib

    places = np.linspace(0, 0.88, len(names))  # the lightest colours cannot be seen on white
    named = choose_evenly(names, _MOST_NAMES)
    shown = dict(zip(named, shorten_layer_names(named, 20), strict=True))
    return {
        name: {
            "color": matplotlib.colormaps["viridis"](place),
            "linestyle": _STROKES[number % 4] if len(names) <= _MOST_NAMES else "-",
            "label": shown.get(name, "_"),
        }
        for number, (name, place) in enumerate(zip(names, places, strict=True))
    }


def _draw_line(axes: Any, epochs: Sequence[int], values: Sequence[float | None], **style: Any) -> None:
    """Draw a line through the epochs that have a value."""
    known = [(epoch, value) for epoch, value in zip(epochs, values, strict=True) if value is not None]
    if known:
        marker = "o" if len(known) < 12 else None
        axes.plot(*zip(*known, strict=True), **{"linewidth": 1.4, "marker": marker, "markersize": 3} | style)


def _draw_accuracies(
    axes: Any, epochs: Sequence[int], accuracies: Mapping[str, Sequence[float | None]], colors: Sequence[Any]
) -> None:
    for (kind, values), stroke, color in zip(accuracies.items(), ("--", "-"), (colors[1], colors[0]), strict=False):
        percent = [None if value is None else 100 * value for value in values]
        label = {"train": "training", "eval": "evaluation"}[kind]
        _draw_line(axes, epochs, percent, linestyle=stroke, color=color, label=label, linewidth=1.8)
    axes.set_ylabel("accuracy, %")
    _name_lines(axes)


def _draw_masses(
    axes: Any, epochs: Sequence[int], entries: Sequence[Mapping[str, Any]], styles: Mapping[str, Mapping[str, Any]]
) -> None:
    axes.axhline(0.5, color="0.2", linewidth=0.9, zorder=1)
    for name, style in styles.items():
        masses = [entry["projections"]["layers"][name]["mass"] if "projections" in entry else None for entry in entries]
        _draw_line(axes, epochs, masses, **style)
    masses = [entry["projections"]["net"]["mass"] if "projections" in entry else None for entry in entries]
    _draw_line(axes, epochs, masses, color="black", linewidth=3, label="network", zorder=3)
    axes.set_ylabel("share of projections ≤ 0")
    named = sum(not style["label"].startswith("_") for style in styles.values())
    _name_lines(axes, title=f"layers ({named} of {len(styles)} named)" if named < len(styles) else "layers")


def _draw_distances(
    axes: Any,
    epochs: Sequence[int],
    distances: Mapping[str, Sequence[float | None]],
    styles: Mapping[str, Mapping[str, Any]],
) -> None:
    for name, values in distances.items():
        _draw_line(axes, epochs, values, **styles[name])
    axes.set_ylabel("distance from\ninitialisation, relative")
    axes.set_ylim(bottom=0)
    if left_out := len(styles) - len(distances):
        note = f"{left_out} of {len(styles)} layers have no relative distance"
        axes.set_title(note, fontsize=8, loc="left", color="0.25")


def _name_lines(axes: Any, title: str | None = None) -> None:
    axes.legend(
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=9,
        title=title,
        title_fontsize=9,
        handlelength=2.8,
    )
