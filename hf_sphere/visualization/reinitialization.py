"""Which layers a trained network cannot do without: accuracy with each put back to an earlier state."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_sphere.visualization.figures import check_matplotlib, save_figure, start_figure
from hf_sphere.visualization.layer_names import shorten_layer_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUMBER_SIZE, _LABEL_SIZE = 8, 9  # points
_DIGIT = 0.62
"""Of the size of a font, how wide a digit is."""


def plot_reinitialization(
    robustness: Mapping[str, Any], *, title: str = "", path: str | Path | None = None
) -> "Figure":
    """Draw a heat map of accuracies: a row a layer that is put back, a column the epoch that it is put back to.

    Apart from the epochs stand fresh random draws: the mean of their accuracies, and where there is room the standard
    deviation behind it. The mark beside the colour bar is the accuracy of the model as it was trained. Numbers are left
    out where cells are too small for them.

    Args:
        robustness: What `ReinitializationRobustness.to_dict` of `hf_sphere.analysis` gives: `accuracy` from 0 to 1 and
            `layers`, each with `snapshots` (epoch to accuracy, null if not known) and `random` (`mean` and
            `deviation`, or null).
        title: Heading.
        path: Where to save the picture (the suffix says as what); not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there is no accuracy of any layer.

    Reference:
        Zhang, Bengio and Singer, "Are all layers created equal?", 2019.
    """
    check_matplotlib()
    from matplotlib.colors import Normalize
    from matplotlib.markers import CARETRIGHT

    table = _Table(robustness)
    untouched = 100 * robustness["accuracy"]
    rows, columns = table.accuracies.shape
    figure, _ = start_figure(min(7.2, 3.6 + 0.6 * columns), 1.3 + max(0.21, 0.36 - 0.008 * rows) * max(rows, 4))
    axes: Any = figure.subplots()
    lowest, highest = np.nanmin(table.accuracies), np.nanmax(table.accuracies)
    scale = Normalize(min(lowest, untouched), max(highest, untouched))
    for column, (start, end) in enumerate(table.sides):
        corners = np.meshgrid([start, end], np.arange(rows + 1) - 0.5)
        values = np.ma.masked_invalid(table.accuracies[:, column : column + 1])
        image = axes.pcolormesh(*corners, values, norm=scale, cmap="viridis", edgecolors="white", linewidth=0.4)
    _mark_missing(axes, table)
    axes.set(xlim=(table.sides[0, 0], table.sides[-1, 1]), ylim=(rows - 0.5, -0.5), ylabel="layer that is put back")
    if table.epochs:
        middle = len(table.epochs) / 2 / np.ptp(table.sides).item()
        axes.set_xlabel("to its state after this epoch", x=middle)
    axes.set_yticks(range(rows), table.layers, fontsize=_LABEL_SIZE if rows <= 30 else 8)
    axes.set_xticks(table.sides.mean(1), [*table.epochs, *["random"] * table.has_random], fontsize=_LABEL_SIZE)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(
        image, ax=axes, aspect=max(20, 1.3 * rows), pad=0.03, label=f"accuracy, % (as trained: {untouched:.1f})"
    )
    side = bar.ax.get_yaxis_transform()
    bar.ax.plot(0, untouched, marker=CARETRIGHT, color="black", markersize=6, transform=side, clip_on=False)
    figure.suptitle(title, fontsize=12, wrap=True)

    figure.draw_without_rendering()  # only now is known how large the cells are
    size = axes.get_window_extent()
    unit = 72 / figure.dpi * size.width / np.ptp(table.sides)
    _thin_out_epochs(axes, table, unit)
    _write_numbers(axes, table, image, unit, 72 / figure.dpi * size.height / rows)
    save_figure(figure, path)
    return figure


class _Table:
    """The accuracies in percent, rows and columns as they are drawn; the width of a snapshot's column is 1."""

    def __init__(self, robustness: Mapping[str, Any]):
        layers = robustness["layers"]
        self.layers = shorten_layer_names(list(layers))
        self.epochs = sorted({epoch for layer in layers.values() for epoch in layer["snapshots"]}, key=int)
        draws = [layer["random"] or {} for layer in layers.values()]
        self.has_random = any(draw.get("mean") is not None for draw in draws)
        values = [[layer["snapshots"].get(epoch) for epoch in self.epochs] for layer in layers.values()]
        if self.has_random:
            values = [[*row, draw.get("mean")] for row, draw in zip(values, draws, strict=True)]
        self.accuracies = 100 * np.array(values, dtype=np.float64)  # null is nan
        if not np.isfinite(self.accuracies).any():
            raise ValueError("there is no accuracy to draw: no layer was put back to a snapshot or drawn anew.")
        self.deviations = 100 * np.array([draw.get("deviation") for draw in draws], dtype=np.float64)
        count = len(self.epochs)
        sides: list[tuple[float, float]] = [(column, column + 1) for column in range(count)]
        if self.has_random:  # apart, and wide enough for its name and deviation
            start = count + max(0.35, count / 50) if count else 0.0
            sides.append((start, start + max(1.7, count / 10)))
        self.sides = np.array(sides)


def _mark_missing(axes: Any, table: _Table) -> None:
    from matplotlib.patches import Patch, Rectangle

    style: dict[str, Any] = {"facecolor": "0.93", "edgecolor": "0.55", "hatch": "xxxx", "linewidth": 0}
    missing = np.argwhere(np.isnan(table.accuracies))
    for row, column in missing:
        start, end = table.sides[column]
        axes.add_patch(Rectangle((start, row - 0.5), end - start, 1, **style))
    if len(missing):
        handle = Patch(label="not measured", **style)
        axes.figure.legend(handles=[handle], loc="outside lower center", frameon=False, fontsize=_LABEL_SIZE)


def _thin_out_epochs(axes: Any, table: _Table, unit: float) -> None:
    """Name only every so many epochs if their columns, `unit` points wide, are narrower than the names."""
    needed = (max(map(len, table.epochs), default=0) + 1) * _DIGIT * _LABEL_SIZE
    step = math.ceil(needed / unit)
    shown = [epoch if place % step == 0 else "" for place, epoch in enumerate(table.epochs)]
    axes.set_xticks(table.sides.mean(1), [*shown, *["random"] * table.has_random], fontsize=_LABEL_SIZE)


def _write_numbers(axes: Any, table: _Table, image: Any, unit: float, height: float) -> None:
    """Write accuracies into the cells, `unit` and `height` points large, with the digits that they have room for."""
    room = unit / (_DIGIT * _NUMBER_SIZE)  # in digits
    if room < 3 or height < 1.2 * _NUMBER_SIZE:
        return
    digits = 1 if room > 5 else 0
    for (row, column), accuracy in np.ndenumerate(table.accuracies):
        if np.isnan(accuracy):
            continue
        text = f"{accuracy:.{digits}f}"
        start, end = table.sides[column]
        if (
            column == len(table.epochs)
            and (end - start) * room > 7 + 3 * digits
            and not np.isnan(table.deviations[row])
        ):
            text += f" ± {table.deviations[row]:.{digits}f}"
        red, green, blue, _ = image.to_rgba(accuracy)
        color = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"
        axes.text((start + end) / 2, row, text, ha="center", va="center", fontsize=_NUMBER_SIZE, color=color)
