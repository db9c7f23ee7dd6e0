"""Accuracy, share of negative projections and distance from initialization during training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_sphere.visualization.figures import COLORS, Figure, new_figure, plain_text, save_figure, style_axes, style_line
from hf_sphere.visualization.layer_names import choose_evenly, shorten_layer_names

_MOST_NAMES = 9  # layers in the legend; the colors of the others are between those of their neighbors


@plain_text()
def plot_projections_along_training(
    training: Mapping[str, Any], *, title: str = "", path: str | Path | None = None
) -> Figure:
    """Draw the share of projections that are not positive during training by layer, and above it the accuracy.

    Lines of layers run from dark (the first) to light (the last); the thick line is the entire network. If there are
    accuracies or distances from the initialization (L2, relative), each has a panel.

    Args:
        training: With `epochs`, a list of entries with `epoch` and, where known, `train_accuracy` and `eval_accuracy`
            from 0 to 1, and `projections` and `distances`, which are returned by `to_dict` of the results of
            `projection_statistics` and `distance_from_initialization` of `hf_sphere.analysis`.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If no epoch has projections.
    """
    from matplotlib.ticker import MaxNLocator

    entries = sorted(training.get("epochs", ()), key=lambda entry: entry["epoch"])
    names = list(next((entry["projections"]["layers"] for entry in entries if "projections" in entry), ()))
    if not names:
        raise ValueError("there are no projections to draw: no epoch of the training has them.")
    epochs = np.array([entry["epoch"] for entry in entries])
    styles = _styles(names)
    accuracies = [
        (
            100 * _values(entries, "train_accuracy"),
            {"linestyle": "--", "color": COLORS[1], "label": "training", "linewidth": 1.8},
        ),
        (
            100 * _values(entries, "eval_accuracy"),
            {"linestyle": "-", "color": COLORS[0], "label": "evaluation", "linewidth": 1.8},
        ),
    ]
    masses = [(_values(entries, "projections", "layers", name, "mass"), styles[name]) for name in names]
    network = {"color": "black", "linewidth": 3, "label": "network", "zorder": 3}
    masses.append((_values(entries, "projections", "net", "mass"), network))
    distances = [(_relative_distances(entries, name), styles[name]) for name in names]
    panels = [
        (label, height, lines)
        for label, height, lines in (
            ("accuracy, %", 1.5, accuracies),
            ("share of projections ≤ 0", 2.4, masses),
            ("distance from\ninitialization, relative", 2.0, distances),
        )
        if any(np.isfinite(values).any() for values, _ in lines)
    ]
    heights = [height for _, height, _ in panels]
    figure = new_figure(7.2, 0.8 + sum(heights), title)
    grid = figure.subplots(len(panels), squeeze=False, sharex=True, height_ratios=heights).flatten()
    for axes, (label, _, lines) in zip(grid, panels, strict=True):
        for values, style in lines:
            _draw_line(axes, epochs, values, **style)
        axes.set_ylabel(label)
        style_axes(axes)
        if lines is accuracies:
            _add_legend(axes)
        elif lines is masses:
            axes.axhline(0.5, color="0.2", linewidth=0.9, zorder=1)
            _add_legend(axes, f"layers ({_MOST_NAMES} of {len(names)} named)" if len(names) > _MOST_NAMES else "layers")
        else:
            axes.set_ylim(bottom=0)
            if absolute := sum(not np.isfinite(values).any() for values, _ in lines):
                note = f"{absolute} of {len(names)} layers have no relative distance"
                axes.set_title(note, fontsize=8, loc="left", color="0.25")
    grid[-1].set_xlabel("epoch")
    if len(epochs) == 1:
        grid[-1].set_xticks(epochs)
    else:
        grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels(grid)
    return save_figure(figure, path)


def _values(entries: Sequence[Mapping[str, Any]], *keys: str) -> np.ndarray:
    """Look up a number in each entry, nan where it is missing."""

    def look_up(found: Any) -> Any:
        for key in keys:
            found = None if found is None else found.get(key)
        return found

    return np.array([look_up(entry) for entry in entries], dtype=np.float64)  # None is nan


def _relative_distances(entries: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Look up distances; those of a layer initialized with zeros are absolute, not comparable, and replaced by nan."""
    relative = _values(entries, "distances", "layers", name, "relative")
    return np.where(relative == 1, _values(entries, "distances", "layers", name, "l2"), np.nan)


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Choose color, line style and label of each layer."""
    import matplotlib

    places = np.linspace(0, 0.88, len(names))  # the lightest colors are invisible on white
    named = choose_evenly(names, _MOST_NAMES)
    labels = dict(zip(named, shorten_layer_names(named, 20), strict=True))
    return {
        name: {
            "color": matplotlib.colormaps["viridis"](place),
            "linestyle": style_line(number)["linestyle"] if len(names) <= _MOST_NAMES else "-",
            "label": labels.get(name, "_"),
        }
        for number, (name, place) in enumerate(zip(names, places, strict=True))
    }


def _draw_line(axes: Any, epochs: np.ndarray, values: np.ndarray, **style: Any) -> None:
    """Draw a line through the epochs that have a value."""
    known = np.isfinite(values)
    if known.any():
        marker = "o" if known.sum() < 12 else None
        axes.plot(epochs[known], values[known], **{"linewidth": 1.4, "marker": marker, "markersize": 3} | style)


def _add_legend(axes: Any, title: str | None = None) -> None:
    """Add a legend to the right of the axes."""
    style = {"frameon": False, "fontsize": 9, "title_fontsize": 9, "handlelength": 2.8}
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), title=title, **style)
