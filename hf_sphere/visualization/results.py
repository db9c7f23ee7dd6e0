"""Figures of results: runs with several seeds, reports on vectors, and word analogies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_sphere.comparison import RunComparison
from hf_sphere.search.report import K, VectorReport
from hf_sphere.visualization.figures import (
    COLORS,
    Figure,
    add_legend_below,
    new_figure,
    plain_text,
    save_figure,
    shorten,
)

GROUP_WIDTH = 0.8  # width of the bars of a benchmark, relative to the distance between two benchmarks
GUESSING = "guessing"


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


@plain_text()
def plot_report(report: VectorReport, *, title: str = "", path: str | Path | None = None) -> Figure:
    """Draw four panels: cosines, variances, the k-occurrence, and remedies, or the norms if none was measured.

    Args:
        report: What `hf_sphere.search.report_vectors` returned.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If the report describes no directions.

    Example:
        >>> figure = plot_report(hf_sphere.search.report_vectors(embeddings), path="report.png")
    """
    from scipy.stats import beta

    if "pairs" not in report.drawn:
        raise ValueError(f"the report has nothing to draw: {report.verdicts[-1]}")
    drawn, dim = {name: tensor.numpy() for name, tensor in report.drawn.items()}, report.numbers["dimensions"]
    figure = new_figure(10.5, 7.0, title)
    (cosines, variances), (hubs, last) = figure.subplots(2, 2)
    edges = np.linspace(min(-0.5, drawn["pairs"].min()), 1.0, 121)
    for name, label, color in (("pairs", "random pairs", COLORS[0]), ("nearest", "nearest rows", COLORS[1])):
        cosines.hist(drawn[name], edges, density=True, color=color, alpha=0.6, label=label)
    uniform = {"color": "0.3", "linestyle": "--", "linewidth": 1.2, "label": "uniform"}
    cosines.plot(edges, beta((dim - 1) / 2, (dim - 1) / 2, -1, 2).pdf(edges), **uniform)
    cosines.set(xlabel="cosine", ylabel="density")
    (value, *ends), parts = report.numbers["effective_dimension_and_interval"], drawn["variances"]
    parts = parts / parts.mean()
    variances.plot(range(1, dim + 1), parts, color=COLORS[0])
    variances.axhline(1.0, **uniform)
    variances.axvspan(*ends, color=COLORS[1], alpha=0.5, label=f"effective dimension {value:.1f}, with interval")
    variances.set(yscale="log", ylim=(np.clip(parts.min() / 2, 1e-4, 0.1), 2 * parts.max()))
    variances.set(xlabel="principal component", ylabel="variance / mean variance")
    counts = np.bincount(drawn["occurrence"].astype(int))
    hubs.bar(range(len(counts)), counts, width=1.0, color=COLORS[0])
    hubs.set(yscale="log", ylim=(0.5, None), xlabel=f"times among the nearest {K} of others", ylabel="rows")
    for axes in (variances, hubs):
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    for line, remedy in enumerate(report.remedies):
        last.plot([100 * remedy.low, 100 * remedy.high], [line, line], color=COLORS[0], linewidth=2)
        last.plot(100 * remedy.change, line, "|", color="black", markersize=12, markeredgewidth=2)
    if report.remedies:
        last.set_yticks(range(len(report.remedies)), [remedy.name for remedy in report.remedies])
        last.invert_yaxis()
        last.set_xlabel(f"change of the Recall@1 of {100 * report.remedies[0].recall_at_1:.1f} %, points")
    else:
        smallest, largest = drawn["norms"][0].item(), drawn["norms"][-1].item()
        ends = (smallest, largest) if largest > 1.001 * smallest else (0.9 * smallest, 1.1 * largest)  # or rounding
        last.hist(drawn["norms"], 61, range=ends, color=COLORS[0])
        last.set(xlabel="norm", ylabel="rows")
    name_of_last = "Remedies" if report.remedies else "Norms"
    titles = ("Cosines", "Variances", "Hubs", name_of_last)
    for axes, name in zip((cosines, variances, hubs, last), titles, strict=True):
        axes.set_title(name)
        axes.grid()
    for axes in (cosines, variances):
        axes.legend()
    return save_figure(figure, path)


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
        ValueError: If two results have the same model, benchmark and scoring, or accuracies are in percent.

    Example:
        >>> plot_analogy_accuracies(results, path="accuracies.png")  # doctest: +SKIP
    """
    names = [tuple(result[name] for name in ("model", "benchmark", "scoring")) for result in results]
    if len(set(names)) < len(names):
        raise ValueError(f"pass one accuracy per model, benchmark and scoring; got those of {names}.")
    if (highest := max(result["eval_accuracy_high"] for result in results)) > 1:
        raise ValueError(f"accuracies must be from 0 to 1, not in percent; got {highest:g}.")
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
    panels[0].set_ylim(0, min(101.0, 105 * highest) or 101.0)  # shared by all panels
    labels = [*models, GUESSING]
    add_legend_below(figure, [handles[label] for label in labels], labels)
    return save_figure(figure, path)
