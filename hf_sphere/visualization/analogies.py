"""Accuracies on word analogies, compared with guessing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_sphere.visualization.figures import COLORS, Figure, add_legend_below, new_figure, plain_text, save_figure

GROUP_WIDTH = 0.8  # width of the bars of a benchmark, relative to the distance between two benchmarks
GUESSING = "guessing"


@plain_text()
def plot_analogy_accuracies(
    results: Sequence[Mapping[str, Any]], *, title: str = "", path: str | Path | None = None
) -> Figure:
    """Draw accuracies on word analogies: one panel per scoring, with a group per benchmark and a bar per model.

    The error bar is the interval of the accuracy. The dashed line across a group is the accuracy of guessing.

    Args:
        results: Results of `hf-sphere analogies`, one per model, benchmark and scoring. Each has `model`,
            `benchmark` and `scoring`, and `eval_accuracy`, `eval_accuracy_low`, `eval_accuracy_high` and `chance_level`
            from 0 to 1.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there are no results, or two have the same model, benchmark and scoring.

    Example:
        >>> plot_analogy_accuracies(results, path="accuracies.png")  # doctest: +SKIP
    """
    names = [tuple(result[name] for name in ("model", "benchmark", "scoring")) for result in results]
    if not results or len(set(names)) < len(names):
        raise ValueError(f"pass accuracies to draw, one per model, benchmark and scoring; got those of {names}.")
    models, benchmarks, scorings = (list(dict.fromkeys(column)) for column in zip(*names, strict=True))
    size = max(5.4, 1.0 + 0.28 * len(benchmarks) * (len(models) + 1))
    figure = new_figure(size, 0.6 + 3.0 * len(scorings), title)
    panels = figure.subplots(len(scorings), squeeze=False, sharey=True).flatten()
    width = GROUP_WIDTH / len(models)
    handles: dict[str, Any] = {}  # by label; not every panel has every model
    for axes, scoring in zip(panels, scorings, strict=True):
        drawn = [result for result in results if result["scoring"] == scoring]
        for index, model in enumerate(models):
            of_model = [result for result in drawn if result["model"] == model]
            shift = (index - (len(models) - 1) / 2) * width
            positions = [benchmarks.index(result["benchmark"]) + shift for result in of_model]
            accuracy, low, high = (
                np.array([100 * result[f"eval_accuracy{end}"] for result in of_model]) for end in ("", "_low", "_high")
            )
            if of_model:
                axes.bar(positions, accuracy, 0.9 * width, color=COLORS[index % len(COLORS)], alpha=0.75, label=model)
                ends = [(accuracy - low).clip(0), (high - accuracy).clip(0)]
                axes.errorbar(positions, accuracy, yerr=ends, fmt="none", ecolor="0.2", elinewidth=1.1, capsize=2.5)
        chance = {benchmarks.index(result["benchmark"]): 100 * result["chance_level"] for result in drawn}
        starts, ends = ([place + side for place in chance] for side in (-0.47, 0.47))
        style = {"color": "0.35", "linestyle": "--", "linewidth": 1.1, "label": GUESSING}
        axes.hlines(list(chance.values()), starts, ends, zorder=3, **style)
        axes.set(xticks=range(len(benchmarks)), xticklabels=benchmarks, xlim=(-0.6, len(benchmarks) - 0.4))
        axes.set(title=scoring.replace("_", " "), ylabel="accuracy on test questions, %")
        axes.grid(axis="y")
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    highest = max(100 * result["eval_accuracy_high"] for result in results)
    panels[0].set_ylim(0, min(101.0, 1.05 * highest) or 101.0)  # shared by all panels
    labels = [*models, GUESSING]
    add_legend_below(figure, [handles[label] for label in labels], labels)
    return save_figure(figure, path)
