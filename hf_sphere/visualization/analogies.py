"""How many analogy questions models answer, beside what guessing and what luck reach."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_sphere.visualization.figures import check_matplotlib, save_figure, start_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROUP_WIDTH = 0.8
"""Of the distance between two benchmarks, how much their bars take."""

GUESSING, NOISE = "guessing", "noise level of the search"

NEEDED = (
    *("model", "benchmark", "scoring", "eval_accuracy", "eval_accuracy_low", "eval_accuracy_high"),
    *("chance_level", "selection_noise_high"),
)


def plot_analogy_accuracies(
    results: Sequence[Mapping[str, Any]], *, title: str = "", path: str | Path | None = None
) -> "Figure":
    """Draw accuracies on word analogies: a part for each scoring, in it a group a benchmark and a bar a model.

    The line on a bar is the interval of its accuracy. The broken line across a group is what guessing reaches. The
    short thick line on a bar is the noise level: what 95 of 100 such searches stay below if the scores know nothing, so
    a bar that ends below it has shown nothing.

    Args:
        results: What `recipes/evaluate_analogies.py` writes for each model, benchmark and scoring. Each has `model`,
            `benchmark` and `scoring`, and `eval_accuracy`, `eval_accuracy_low`, `eval_accuracy_high`, `chance_level`
            and `selection_noise_high` from 0 to 1.
        title: Heading.
        path: Where to save the picture (the suffix says as what); not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there is no result, one lacks an entry, or two are of one model, benchmark and scoring.
    """
    check_matplotlib()
    _check(results)
    models, benchmarks, scorings = (
        list(dict.fromkeys(result[name] for result in results)) for name in ("model", "benchmark", "scoring")
    )
    columns = min(2, len(scorings))
    lines = -(-len(scorings) // columns)
    wide = max(5.4 / columns, 1.0 + 0.28 * len(benchmarks) * (len(models) + 1))
    figure, colors = start_figure(columns * wide, 0.6 + 3.0 * lines)
    parts = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    for axes, scoring in zip(parts, scorings, strict=False):
        shown = [result for result in results if result["scoring"] == scoring]
        _draw_scoring(axes, shown, models, benchmarks, colors)
        axes.set_title(scoring.replace("_", " "), fontsize=10)
    for axes in parts[len(scorings) :]:
        axes.set_visible(False)
    for axes in parts[: len(scorings) : columns]:
        axes.set_ylabel("accuracy on test questions, %")
    highest = max(100 * max(result["eval_accuracy_high"], result["selection_noise_high"]) for result in results)
    parts[0].set_ylim(0, min(101.0, 1.05 * highest) or 101.0)  # of all parts
    figure.suptitle(title)
    drawn: dict[str, Any] = {}
    for axes in parts[: len(scorings)]:  # not every model has every scoring
        handles, labels = axes.get_legend_handles_labels()
        drawn |= dict(zip(labels, handles, strict=True))
    labels = [*(model for model in models if model in drawn), GUESSING, NOISE]
    handles = [drawn[label] for label in labels]
    ncols = 4 if columns * wide > 7 else 2
    figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False, fontsize=9)
    save_figure(figure, path)
    return figure


def _check(results: Sequence[Mapping[str, Any]]) -> None:
    if not results:
        raise ValueError("there is no accuracy to draw.")
    seen = set()
    for result in results:
        missing = [name for name in NEEDED if name not in result]
        if missing:
            raise ValueError(f"a result has no {', '.join(missing)}; it has: {', '.join(result)}.")
        key = result["model"], result["benchmark"], result["scoring"]
        if key in seen:
            raise ValueError(f"there are two results of {', '.join(key)}; give one of each.")
        seen.add(key)


def _draw_scoring(
    axes: Any,
    results: Sequence[Mapping[str, Any]],
    models: Sequence[str],
    benchmarks: Sequence[str],
    colors: Sequence[Any],
) -> None:
    """Draw the bars of one scoring; a model that it does not fit leaves a gap."""
    width = GROUP_WIDTH / len(models)
    for number, model in enumerate(models):
        own = [result for result in results if result["model"] == model]
        if not own:
            continue
        places = [benchmarks.index(result["benchmark"]) + (number - (len(models) - 1) / 2) * width for result in own]
        accuracy, low, high, noise = (
            [100 * result[name] for result in own]
            for name in ("eval_accuracy", "eval_accuracy_low", "eval_accuracy_high", "selection_noise_high")
        )
        below = [max(0.0, value - end) for value, end in zip(accuracy, low, strict=True)]
        above = [max(0.0, end - value) for value, end in zip(accuracy, high, strict=True)]
        axes.bar(places, accuracy, 0.9 * width, color=colors[number % 10], alpha=0.75, label=model)
        axes.errorbar(places, accuracy, yerr=[below, above], fmt="none", ecolor="0.2", elinewidth=1.1, capsize=2.5)
        starts, ends = ([place + side * width / 2 for place in places] for side in (-1, 1))
        axes.hlines(noise, starts, ends, color="black", linewidth=2.2, zorder=3, label=NOISE)
    chance = {benchmarks.index(result["benchmark"]): 100 * result["chance_level"] for result in results}
    axes.hlines(
        list(chance.values()),
        [place - 0.47 for place in chance],
        [place + 0.47 for place in chance],
        color="0.35",
        linestyle="--",
        linewidth=1.1,
        zorder=3,
        label=GUESSING,
    )
    axes.set_xticks(range(len(benchmarks)), benchmarks)
    axes.set_xlim(-0.6, len(benchmarks) - 0.4)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
