"""Projection statistics as a text table."""

from collections.abc import Mapping
from typing import Any

from hf_sphere.analysis.null_distribution import is_significant

LAYER_WIDTH = 28

HEADER = (
    f"{'layer':<{LAYER_WIDTH}} {'filters':>7} {'dead':>5} {'N':>6} {'mean':>8} {'mass':>6} {'isotropic':>11} "
    f"{'p KS':>8} {'p sign':>8}"
)


def projection_table(statistics: Mapping[str, Any]) -> str:
    """Format the output of `ProjectionStatistics.to_dict`, at most 100 columns wide.

    The column `isotropic` is the range of masses that isotropic filters have with a probability of at least 95 %. A
    star marks lines in which a p-value is below 0.05. There are two tests, each corrected for the number of layers, but
    not for the other test: 6 to 8 % of networks of isotropic filters have a star (measured, 2000 networks of each of
    several sizes).
    """
    lines = [HEADER]
    lines += [_line(_shortened(name), layer) for name, layer in statistics["layers"].items()]
    lines += ["-" * len(HEADER), _line("all layers", statistics["net"]), _verdict(statistics["net"])]
    return "\n".join(lines)


def _line(name: str, row: Mapping[str, Any]) -> str:
    if row["mass"] is None:
        numbers = f"{'-':>8} {'-':>6} {'-':>11}"
    else:
        band = f"{row['null_mass_low']:.3f}-{row['null_mass_high']:.3f}"
        numbers = f"{row['mean']:>8.{_decimals(row['mean'])}} {row['mass']:>6.3f} {band:>11}"
    p_values = [row["ks_p_value_adjusted"], row["sign_p_value_adjusted"]]
    star = " *" if any(map(is_significant, p_values)) else ""
    return (
        f"{name:<{LAYER_WIDTH}} {row['num_filters']:>7} {row['num_dead']:>5} {row.get('dim', ''):>6} {numbers} "
        f"{_p_value(p_values[0]):>8} {_p_value(p_values[1]):>8}{star}"
    )


def _verdict(net: Mapping[str, Any]) -> str:
    """Return a sentence about the bias of the arrangement and its direction."""
    if net["mass"] is None:
        return "There are no live filters, so no test is possible."
    negative = f"{net['mass']:.1%} are <= 0"
    expected = f"isotropic: {net['null_mass_low']:.1%} to {net['null_mass_high']:.1%}"
    projections, sign, ks = net["projections"], net["sign_p_value"], net["ks_p_value"]
    if is_significant(sign):
        below, above = sum(value < 0 for value in projections), sum(value > 0 for value in projections)
        side = "negative" if below > above else "positive"  # not by the mass, which counts zeros
        zeros = len(projections) - below - above
        return f"The arrangement is biased to {side} projections: {negative} ({expected})." + (
            f"\n{zeros} of the {len(projections)} projections are 0, which counts for neither side." if zeros else ""
        )
    if is_significant(ks):
        return f"The arrangement is neither isotropic nor biased: {negative} ({expected})."
    return f"No significant bias of the projections: {negative} ({expected})."


def _shortened(name: str) -> str:
    """Shorten a path at its beginning, where paths are similar."""
    return name if len(name) <= LAYER_WIDTH else f"..{name[2 - LAYER_WIDTH :]}"


def _p_value(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1e-300:  # including underflow
        return "<1e-300"
    return f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"


def _decimals(value: float) -> str:
    return "4f" if abs(value) < 100 else "3g"
