"""Share of filters on the negative side by layer, compared with random filters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hf_sphere.visualization.figures import COLORS, Figure, new_figure, plain_text, save_figure, style_axes
from hf_sphere.visualization.layer_names import shorten_layer_names

SIGNIFICANT = 0.05  # level of the adjusted p-values
DIFFERENT, ALIKE = f"unlike random filters (adjusted p < {SIGNIFICANT})", "no significant difference"
BAND = "95 % range of random filters"

_BAR = 0.21  # height of a bar, in inches


@plain_text()
def plot_projection_masses(statistics: Mapping[str, Any], *, title: str = "", path: str | Path | None = None) -> Figure:
    """Draw the share of projections that are not positive: one bar per layer, and the last one for the entire network.

    Behind each bar is the 95 % range of this share for the same number of random filters. Bars are filled if the sign
    test or the Kolmogorov-Smirnov test distinguishes the layer from random filters (p-value adjusted for the number of
    layers), and hatched otherwise. Dead filters, which have no direction, are noted beside the bar.

    Args:
        statistics: Returned by `ProjectionStatistics.to_dict` of `hf_sphere.analysis`: `layers` and `net`, each with
            `mass`, `null_mass_low`, `null_mass_high`, `num_filters`, `num_dead`, `sign_p_value_adjusted` and
            `ks_p_value_adjusted`; null where a number is undefined.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there are no layers.

    Reference:
        Gamba, Carlsson, Azizpour and Björkman, "Hyperplane arrangements of trained ConvNets are biased", 2020.
    """
    if not statistics.get("layers"):
        raise ValueError("there are no layers to draw: `layers` of the projection statistics is empty.")
    names = [*shorten_layer_names(list(statistics["layers"])), "network"]
    entries = [*statistics["layers"].values(), statistics["net"]]
    places = np.array([*range(len(names) - 1), len(names) - 0.5])  # with a gap before the network
    mass, low, high = (
        np.array([entry[name] for entry in entries], dtype=np.float64)  # null is nan
        for name in ("mass", "null_mass_low", "null_mass_high")
    )
    figure = new_figure(7.2, 1.3 + _BAR * max(len(names), 5), title)
    axes: Any = figure.subplots()
    known = ~np.isnan(low)
    if known.any():  # wider than the bars, which would hide it
        width = (high - low)[known]
        axes.barh(places[known], width, 0.94, left=low[known], color="0.8", label=BAND, zorder=1)
    differs = np.array([_differs(entry) for entry in entries])
    for chosen, style in (
        (differs, {"color": COLORS[0], "label": DIFFERENT}),
        (~differs, {"facecolor": "white", "edgecolor": COLORS[1], "hatch": "/////", "linewidth": 1.2, "label": ALIKE}),
    ):
        chosen = chosen & ~np.isnan(mass)
        if chosen.any():
            axes.barh(places[chosen], mass[chosen], 0.52, zorder=2, **style)
            # A line at the end of each bar, so that a bar of length 0 is visible.
            ends = places[chosen] - 0.26, places[chosen] + 0.26
            axes.vlines(mass[chosen], *ends, color="0.2", linewidth=2.2, clip_on=False, zorder=4)
    axes.axvline(0.5, color="0.2", linewidth=0.9, zorder=3)
    for place, entry in zip(places, entries, strict=True):
        dead, count = entry["num_dead"], entry["num_filters"]
        if dead:
            axes.text(1.015, place, f"{dead} of {count} dead", va="center", fontsize=8, color="0.25")

    axes.set_yticks(places, names, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.get_yticklabels()[-1].set_fontweight("bold")
    room = max(0.6, (5 - len(places)) / 2)  # a few bars should not be wide
    axes.set(xlim=(0, 1), ylim=(places[-1] + room, places[0] - room))  # the first layer on top
    axes.set_xlabel("share of projections ≤ 0")
    style_axes(axes, grid="x")
    figure.legend(loc="outside lower center", frameon=False, fontsize=9)  # side by side, the labels would not fit
    return save_figure(figure, path)


def _differs(entry: Mapping[str, Any]) -> bool:
    p_values = (entry["sign_p_value_adjusted"], entry["ks_p_value_adjusted"])
    return any(value is not None and value < SIGNIFICANT for value in p_values)
