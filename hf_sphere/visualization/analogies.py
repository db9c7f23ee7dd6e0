"""Accuracies on word analogies, compared with guessing and with the noise level."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_sphere.visualization.figures import COLORS, Figure, add_legend_below, new_figure, plain_text, save_figure

GROUP_WIDTH = 0.8  # width of the bars of a benchmark, relative to the distance between two benchmarks
GUESSING, NOISE = "guessing", "noise level"

_NAMES = ("model", "benchmark", "scoring")


@plain_text()
def plot_analogy_accuracies(
    results: Sequence[Mapping[str, Any]], *, title: str = "", path: str | Path | None = None
) -> Figure:
    """Draw accuracies on word analogies: one panel per scoring, with a group per benchmark and a bar per model.

    The error bar is the interval of the accuracy. The dashed line across a group is the accuracy of guessing. The short
    thick line on a bar is the noise level: 95 of 100 models stay below it if their scores are uninformative, so a bar
    below it is not significant.

    Args:
        results: Results of `hf-sphere analogies`, one per model, benchmark and scoring. Each has `model`,
            `benchmark` and `scoring`, and `eval_accuracy`, `eval_accuracy_low`, `eval_accuracy_high`, `chance_level`
            and `selection_noise_high` from 0 to 1.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there are no results, or two have the same model, benchmark and scoring.

    Example:
        >>> plot_analogy_accuracies(results, path="accuracies.png")  # doctest: +SKIP
    """
    if not results:
        raise ValueError("there are no accuracies to draw.")
    names = [tuple(result[name] for name in _NAMES) for result in results]
    if len(set(names)) < len(names):
        raise ValueError(f"there are two results of {', '.join(Counter(names).most_common(1)[0][0])}; pass only one.")
    models, benchmarks, scorings = (list(dict.fromkeys(result[name] for result in results)) for name in _NAMES)
    columns = min(2, len(scorings))
    rows = -(-len(scorings) // columns)
    width = columns * max(5.4 / columns, 1.0 + 0.28 * len(benchmarks) * (len(models) + 1))
    figure = new_figure(width, 0.6 + 3.0 * rows, title)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    handles: dict[str, Any] = {}  # by label; not every panel has every model
    for axes, scoring in zip(panels, scorings, strict=False):
        _draw_scoring(axes, [result for result in results if result["scoring"] == scoring], models, benchmarks)
        axes.set_title(scoring.replace("_", " "))
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    for axes in panels[len(scorings) :]:
        axes.set_visible(False)
    for axes in panels[: len(scorings) : columns]:
        axes.set_ylabel("accuracy on test questions, %")
    highest = max(100 * max(result["eval_accuracy_high"], result["selection_noise_high"]) for result in results)
    panels[0].set_ylim(0, min(101.0, 1.05 * highest) or 101.0)  # shared by all panels
    labels = [*models, GUESSING, NOISE]
    shown = [handles[label] for label in labels]
    add_legend_below(figure, shown, labels)
    return save_figure(figure, path)


def _draw_scoring(
    axes: Any, results: Sequence[Mapping[str, Any]], models: Sequence[str], benchmarks: Sequence[str]
) -> None:
    """Draw the bars of one scoring; a model without it leaves a gap."""
    width = GROUP_WIDTH / len(models)
    for index, model in enumerate(models):
        rows = [result for result in results if result["model"] == model]
        if not rows:
            continue
        positions = [benchmarks.index(row["benchmark"]) + (index - (len(models) - 1) / 2) * width for row in rows]
        accuracy, low, high, noise = (
            [100 * row[name] for row in rows]
            for name in ("eval_accuracy", "eval_accuracy_low", "eval_accuracy_high", "selection_noise_high")
        )
        below = [max(0.0, value - end) for value, end in zip(accuracy, low, strict=True)]
        above = [max(0.0, end - value) for value, end in zip(accuracy, high, strict=True)]
        axes.bar(positions, accuracy, 0.9 * width, color=COLORS[index % len(COLORS)], alpha=0.75, label=model)
        axes.errorbar(positions, accuracy, yerr=[below, above], fmt="none", ecolor="0.2", elinewidth=1.1, capsize=2.5)
        _draw_levels(axes, positions, noise, width / 2, color="black", linewidth=2.2, label=NOISE)
    chance = {benchmarks.index(result["benchmark"]): 100 * result["chance_level"] for result in results}
    style = {"color": "0.35", "linestyle": "--", "linewidth": 1.1, "label": GUESSING}
    _draw_levels(axes, chance.keys(), chance.values(), 0.47, **style)
    axes.set(xticks=range(len(benchmarks)), xticklabels=benchmarks, xlim=(-0.6, len(benchmarks) - 0.4))
    axes.grid(axis="y")


def _draw_levels(axes: Any, positions: Iterable[float], levels: Iterable[float], half: float, **style: Any) -> None:
    """Draw horizontal lines at these levels, from `half` to the left of each place to `half` to its right."""
    starts, ends = ([position + side * half for position in positions] for side in (-1, 1))
    axes.hlines(list(levels), starts, ends, zorder=3, **style)
