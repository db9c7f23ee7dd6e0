"""How many filters of each layer point to the negative side, beside what random filters would do."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_sphere.visualization.figures import check_matplotlib, save_figure, start_figure
from hf_sphere.visualization.layer_names import shorten_layer_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIGNIFICANT = 0.05
"""Layers whose adjusted p-value is below this are told apart."""

DIFFERENT, ALIKE = f"unlike random filters (adjusted p < {SIGNIFICANT})", "no difference shown"
BAND = "95 % range of random filters"

_LETTER, _BAR = 0.075, 0.21
"""Inches that a letter of a name and a horizontal bar take."""


def plot_projection_masses(
    statistics: Mapping[str, Any], *, title: str = "", path: str | Path | None = None
) -> "Figure":
    """Draw the share of projections that are not positive, a bar a layer and the last one for the whole network.

    Behind each bar lies the range that the share of as many random filters has in 95 % of the cases. Bars of layers
    whose sign or Kolmogorov-Smirnov test (p-value adjusted for the number of layers) tells them from random ones are
    filled, the others hatched. Dead filters, which have no direction, are noted beside the bar. The bars lie where
    their names would not fit below them.

    Args:
        statistics: What `ProjectionStatistics.to_dict` of `hf_sphere.analysis` gives: `layers` and `net`, each with
            `mass`, `null_mass_low`, `null_mass_high`, `num_filters`, `num_dead`, `sign_p_value_adjusted` and
            `ks_p_value_adjusted`; null where there is no such number.
        title: Heading.
        path: Where to save the picture (the suffix says as what); not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there is no layer.

    Reference:
        Gamba, Carlsson, Azizpour and Björkman, "Hyperplane arrangements of trained ConvNets are biased", 2020.
    """
    check_matplotlib()
    if not statistics.get("layers"):
        raise ValueError("there is no layer to draw: `layers` of the projection statistics is empty.")
    names = [*shorten_layer_names(list(statistics["layers"])), "network"]
    entries = [*statistics["layers"].values(), statistics["net"]]
    places = [*range(len(names) - 1), len(names) - 0.5]  # the network stands a little apart
    lying = max(map(len, names)) * _LETTER > 6.4 / (places[-1] + 1)
    figure, colors = start_figure(7.2, 1.3 + _BAR * len(names) if lying else 3.8)
    axes: Any = figure.subplots()
    _draw_ranges(axes, lying, places, entries)
    for differs, label, style in (
        (True, DIFFERENT, {"color": colors[0]}),
        (False, ALIKE, {"facecolor": "white", "edgecolor": colors[1], "hatch": "/////", "linewidth": 1.2}),
    ):
        chosen = [
            (place, entry["mass"])
            for place, entry in zip(places, entries, strict=True)
            if entry["mass"] is not None and _differs(entry) == differs
        ]
        if chosen:
            at, masses = zip(*chosen, strict=True)
            _draw_bars(axes, lying, at, [0.0] * len(at), masses, 0.52, label=label, zorder=2, **style)
            # A line at the end of each, since a bar of length 0 is to be seen as well.
            draw_lines = axes.vlines if lying else axes.hlines
            starts, ends = ([place + side * 0.26 for place in at] for side in (-1, 1))
            draw_lines(masses, starts, ends, color="0.2", linewidth=2.2, clip_on=False, zorder=4)
    _note_dead_filters(axes, lying, places, entries)
    (axes.axvline if lying else axes.axhline)(0.5, color="0.2", linewidth=0.9, zorder=3)
    _label_axes(axes, lying, places, names)
    figure.suptitle(title, fontsize=12, wrap=True)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9, columnspacing=1.2)
    save_figure(figure, path)
    return figure


def _differs(entry: Mapping[str, Any]) -> bool:
    p_values = (entry["sign_p_value_adjusted"], entry["ks_p_value_adjusted"])
    return any(value is not None and value < SIGNIFICANT for value in p_values)


def _draw_bars(
    axes: Any,
    lying: bool,
    places: Sequence[float],
    starts: Sequence[float],
    ends: Sequence[float],
    thickness: float,
    **style: Any,
) -> None:
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    if lying:
        axes.barh(places, lengths, thickness, left=starts, **style)
    else:
        axes.bar(places, lengths, thickness, bottom=starts, **style)


def _draw_ranges(axes: Any, lying: bool, places: Sequence[float], entries: Sequence[Mapping[str, Any]]) -> None:
    """Draw what random filters do; it is wider than the bars, which would hide it."""
    known = [
        (place, entry["null_mass_low"], entry["null_mass_high"])
        for place, entry in zip(places, entries, strict=True)
        if entry["null_mass_low"] is not None
    ]
    if known:
        at, lows, highs = zip(*known, strict=True)
        _draw_bars(axes, lying, at, lows, highs, 0.94, color="0.8", label=BAND, zorder=1)


def _note_dead_filters(axes: Any, lying: bool, places: Sequence[float], entries: Sequence[Mapping[str, Any]]) -> None:
    for place, entry in zip(places, entries, strict=True):
        dead, count = entry["num_dead"], entry["num_filters"]
        if dead and lying:
            axes.text(1.015, place, f"{dead} of {count} dead", va="center", fontsize=8, color="0.25")
        elif dead:
            axes.text(place, 1.015, f"{dead} dead\nof {count}", ha="center", va="bottom", fontsize=8, color="0.25")


def _label_axes(axes: Any, lying: bool, places: Sequence[float], names: Sequence[str]) -> None:
    along, across = (axes.yaxis, axes.xaxis) if lying else (axes.xaxis, axes.yaxis)
    along.set_ticks(places, names, fontsize=9)
    along.set_tick_params(length=0)
    along.get_ticklabels()[-1].set_fontweight("bold")
    across.set_label_text("share of projections ≤ 0")
    room = max(0.6, (5 - len(places)) / 2)  # a few bars are not to be broad
    ends = (places[0] - room, places[-1] + room)
    if lying:
        axes.set(xlim=(0, 1), ylim=ends[::-1])  # the first layer on top
    else:
        axes.set(xlim=ends, ylim=(0, 1))
    across.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
