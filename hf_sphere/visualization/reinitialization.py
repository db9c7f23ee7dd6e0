"""Accuracy of a trained network after each layer is reset to an earlier state."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hf_sphere.visualization.figures import (
    SMALL,
    Figure,
    add_legend_below,
    new_figure,
    plain_text,
    save_figure,
    shorten_layer_names,
)

_DIGIT = 0.62  # width of a digit relative to the font size


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

    Random draws have a separate column: the mean of their accuracies and, if there is room, the standard deviation. The
    mark at the color bar is the trained model. Numbers are omitted if the cells are too small for them.

    Args:
        robustness: Returned by `ReinitializationRobustness.to_dict` of `hf_sphere.hyperplanes`: `accuracy` from 0 to 1
            and `layers`, each with `snapshots` (accuracy by epoch, null if not known) and `random` (`mean` and
            `deviation`, or null).
        quantity: Color and numbers of the cells: the accuracy, or its relative drop, (trained - accuracy) / trained,
            where a layer that is not critical has 0. Both are in percent, and critical layers are dark.
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

    table = _Table(robustness, relative=quantity == "relative_drop")
    rows, columns = table.values.shape
    figure = new_figure(min(7.2, 3.6 + 0.6 * columns), 1.3 + max(0.21, 0.36 - 0.008 * rows) * max(rows, 6), title)
    axes: Any = figure.subplots()
    lowest, highest = np.nanmin(table.values), np.nanmax(table.values)
    scale = Normalize(min(lowest, table.trained), max(highest, table.trained))
    colors = "viridis_r" if quantity == "relative_drop" else "viridis"
    for column, (start, end) in enumerate(table.sides):
        corners = np.meshgrid([start, end], np.arange(rows + 1) - 0.5)
        values = np.ma.masked_invalid(table.values[:, column : column + 1])
        image = axes.pcolormesh(*corners, values, norm=scale, cmap=colors, edgecolors="white", linewidth=0.4)
    _mark_missing(axes, table)
    axes.set(xlim=(table.sides[0, 0], table.sides[-1, 1]), ylim=(rows - 0.5, -0.5), ylabel="layer that is reset")
    if table.epochs:
        axes.set_xlabel("to its state after this epoch", x=len(table.epochs) / 2 / np.ptp(table.sides).item())
    axes.set_yticks(range(rows), table.layers)
    _label_columns(axes, table, step=1)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    accuracy = f"{100 * robustness['accuracy']:.1f}"
    label = f"{metric}, % (as trained: {accuracy})"
    if quantity == "relative_drop":
        label = f"drop, % of the {metric} ({accuracy} %)"
    bar = figure.colorbar(image, ax=axes, aspect=max(20, 1.3 * rows), pad=0.03, label=label)
    side = bar.ax.get_yaxis_transform()
    bar.ax.plot(0, table.trained, marker=CARETRIGHT, color="black", markersize=6, transform=side, clip_on=False)

    figure.draw_without_rendering()  # the layout determines the size of the cells
    size = axes.get_window_extent()
    width = 72 / figure.dpi * size.width / np.ptp(table.sides).item()
    longest = (max(map(len, table.epochs), default=0) + 1) * _DIGIT * SMALL
    _label_columns(axes, table, step=math.ceil(longest / width))
    _write_numbers(axes, table, image, width, 72 / figure.dpi * size.height / rows)
    return save_figure(figure, path)


class _Table:
    """The values in percent, with rows and columns as drawn; columns of snapshots have width 1."""

    def __init__(self, robustness: Mapping[str, Any], *, relative: bool):
        layers = robustness["layers"]
        self.layers = shorten_layer_names([name.removeprefix("sphere_vision.backbone.") for name in layers])
        self.epochs = sorted({epoch for layer in layers.values() for epoch in layer["snapshots"]}, key=int)
        draws = [layer["random"] or {} for layer in layers.values()]
        self.has_random = any(draw.get("mean") is not None for draw in draws)
        values = [[layer["snapshots"].get(epoch) for epoch in self.epochs] for layer in layers.values()]
        if self.has_random:
            values = [[*row, draw.get("mean")] for row, draw in zip(values, draws, strict=True)]
        self.values = 100 * np.array(values, dtype=np.float64)  # null is nan
        if not np.isfinite(self.values).any():
            raise ValueError("there are no accuracies to draw: no layer was reset to a snapshot or to random weights.")
        self.deviations = 100 * np.array([draw.get("deviation") for draw in draws], dtype=np.float64)
        self.trained = 100 * robustness["accuracy"]
        if relative:
            if not self.trained > 0:
                raise ValueError("the trained model has an accuracy of 0, so a relative drop is undefined.")
            self.values = 100 * (self.trained - self.values) / self.trained
            self.deviations *= 100 / self.trained
            self.trained = 0.0
        count = len(self.epochs)
        sides: list[tuple[float, float]] = [(column, column + 1) for column in range(count)]
        if self.has_random:  # separate, and wide enough for its name and deviation
            start = count + max(0.35, count / 50) if count else 0.0
            sides.append((start, start + max(1.7, count / 10)))
        self.sides = np.array(sides)


def _mark_missing(axes: Any, table: _Table) -> None:
    from matplotlib.patches import Patch, Rectangle

    style: dict[str, Any] = {"facecolor": "0.93", "edgecolor": "0.55", "hatch": "xxxx", "linewidth": 0}
    missing = np.argwhere(np.isnan(table.values))
    for row, column in missing:
        start, end = table.sides[column]
        axes.add_patch(Rectangle((start, row - 0.5), end - start, 1, **style))
    if len(missing):
        handle = Patch(label="not measured", **style)
        add_legend_below(axes.figure, [handle], ["not measured"])


def _label_columns(axes: Any, table: _Table, step: int) -> None:
    """Label every `step`-th epoch, and the random draws."""
    labels = [epoch if column % step == 0 else "" for column, epoch in enumerate(table.epochs)]
    axes.set_xticks(table.sides.mean(1), [*labels, *["random\nweights"] * table.has_random])


def _write_numbers(axes: Any, table: _Table, image: Any, width: float, height: float) -> None:
    """Write values into cells of this size, in points, with as many digits as fit."""
    room = width / (_DIGIT * SMALL)  # in digits
    if room < 3 or height < 1.2 * SMALL:
        return
    digits = 1 if room > 5 else 0
    for (row, column), value in np.ndenumerate(table.values):
        if np.isnan(value):
            continue
        text = f"{value:.{digits}f}"
        start, end = table.sides[column]
        deviation = table.deviations[row] if column == len(table.epochs) else np.nan
        if not np.isnan(deviation) and (end - start) * room > 7 + 3 * digits:
            text += f" ± {deviation:.{digits}f}"
        red, green, blue, _ = image.to_rgba(value)
        color = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"
        axes.text((start + end) / 2, row, text, ha="center", va="center", color=color)
