"""Runs with several seeds: values, means, and intervals of the differences from a reference."""

from pathlib import Path

from hf_sphere.comparison import RunComparison
from hf_sphere.visualization.figures import COLORS, Figure, new_figure, plain_text, save_figure, shorten


@plain_text()
def plot_comparison(comparison: RunComparison, *, title: str = "", path: str | Path | None = None) -> Figure:
    """Draw a line per run: on the left the value of each seed and the mean, on the right the interval.

    The interval is for the difference from the reference. The gray band is the margin of equivalence.

    Args:
        comparison: What `hf_sphere.comparison.compare_runs` returned.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.

    Example:
        >>> plot_comparison(comparison, path="comparison.png")  # doctest: +SKIP
    """
    runs = {comparison.reference: comparison.reference_values}
    runs |= {name: result.values for name, result in comparison.items()}
    figure = new_figure(9.0, 1.3 + 0.4 * len(runs), title)
    left, right = figure.subplots(1, 2, sharey=True)
    for line, values in enumerate(runs.values()):
        left.plot([*values.values()], [line] * len(values), "o", color=COLORS[0], alpha=0.5, markersize=4)
        left.plot(sum(values.values()) / len(values), line, "|", color="black", markersize=14, markeredgewidth=2)
    for line, result in enumerate(comparison.values(), start=1):
        if result.interval is not None:
            right.plot(result.interval, [line, line], color=COLORS[0], linewidth=2)
        right.plot(result.difference, line, "|", color="black", markersize=14, markeredgewidth=2)
        right.annotate(result.verdict, (1.02, line), xycoords=("axes fraction", "data"), va="center")
    labels = [f"difference from {shorten(comparison.reference)}", "with its 95 % interval"]
    if comparison.margin is not None:
        labels.append(f"gray: margin of equivalence, {comparison.margin:.2g}")
        right.axvspan(-comparison.margin, comparison.margin, color="0.92", zorder=0)
    right.axvline(0.0, color="0.5", linewidth=1)
    left.set_yticks(range(len(runs)), map(shorten, runs))
    left.set_ylim(len(runs) - 0.5, -0.5)  # the first run is at the top
    left.set_xlabel(f"each seed, and mean\n{'higher' if comparison.higher_is_better else 'lower'} is better")
    right.set_xlabel("\n".join(labels))
    for axes in (left, right):
        axes.grid(axis="x")
    return save_figure(figure, path)
