"""Accuracy of a trained network after each layer is reset to an earlier state."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hf_sphere.visualization.figures import (
    Figure,
    add_legend_below,
    new_figure,
    plain_text,
    save_figure,
    shorten_layer_names,
)

MOST_LABELS = 14  # columns with a label


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
        ValueError: If no layer has an accuracy, or the accuracy of the trained model is 0 and a relative drop of it is
            requested.

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
    if not np.isfinite(values).any():
        raise ValueError("there are no accuracies to draw: no layer was reset to a snapshot or to random weights.")
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
        missing = axes.fill([], [], facecolor="0.9", label="not measured")
        add_legend_below(figure, missing, ["not measured"])
    axes.set(xlim=(0, edges[-1]), ylim=(rows - 0.5, -0.5), ylabel="layer that is reset")
    if epochs:
        axes.set_xlabel("to its state after this epoch", x=count / 2 / edges[-1])
    axes.set_yticks(range(rows), shorten_layer_names([name.removeprefix("sphere_vision.backbone.") for name in layers]))
    axes.set_xticks((edges[1:] + edges[:-1]) / 2, labels)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, aspect=max(20, 1.3 * rows), pad=0.03, label=label)
    across = bar.ax.get_yaxis_transform()
    bar.ax.plot(0, mark, marker=CARETRIGHT, color="black", markersize=6, transform=across, clip_on=False)
    return save_figure(figure, path)
