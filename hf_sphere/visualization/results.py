"""Figures of results: metrics, runs with several seeds, reports on vectors, and word analogies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hf_sphere.comparison import RunComparison
from hf_sphere.metrics import ReliabilityBins
from hf_sphere.metrics.geometry import MAX_PAIRS, class_angles
from hf_sphere.search.report import K, VectorReport
from hf_sphere.visualization import figures
from hf_sphere.visualization.figures import COLORS, Figure, add_legend_below, new_figure, plain_text, save_figure

GROUP_WIDTH = 0.8  # width of the bars of a benchmark, relative to the distance between two benchmarks
GUESSING = "guessing"
_MOST_POINTS = 4000  # points of a curve; more are not visible and enlarge the file
_ANGLE_BINS = 180


@plain_text()
def plot_reliability(
    bins: ReliabilityBins, *, title: str = "", path: str | Path | None = None, caption: str = ""
) -> Figure:
    """Draw accuracy over confidence with one point per bin, and below it the number of predictions in each bin.

    The error bar of a point is the 95 % interval of its accuracy (Wilson), so that a bin of few predictions is not
    mistaken for miscalibration. Both axes show the same range, as small as the points allow.

    Args:
        bins: The bins, see `hf_sphere.metrics.reliability_bins`; empty ones are ignored.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.
        caption: Caption below the figure.

    Raises:
        ImportError: If matplotlib is missing.

    Reference:
        Guo, Pleiss, Sun and Weinberger, "On calibration of modern neural networks", ICML 2017, figure 1.

    Example:
        >>> bins = hf_sphere.metrics.reliability_bins(torch.rand(100), torch.rand(100) > 0.5)
        >>> figure = plot_reliability(bins, path="reliability.png")
    """
    from matplotlib.ticker import MaxNLocator
    from scipy.stats import binomtest

    used = bins.count > 0
    count = bins.count[used].double().cpu()
    confidence, accuracy = (100.0 * value[used].double().cpu() for value in (bins.confidence, bins.accuracy))
    correct = (accuracy / 100 * count).round()
    tests = [binomtest(int(k), int(n)) for k, n in zip(correct, count, strict=True)]
    ends = 100 * torch.tensor([test.proportion_ci(method="wilson") for test in tests])
    figure = new_figure(5.6, 6.8, title)
    axes, below = figure.subplots(2, height_ratios=(5, 1), sharex=True)
    span = 1.15 * (100 - min(confidence.min().item(), accuracy.min().item()))
    start = 100 - next((size for size in (0.5, 1, 2, 5, 10, 20, 30, 50, 70) if size >= span), 100)
    end = 100 + 0.02 * (100 - start)
    axes.plot((start, end), (start, end), "--", color="0.45", linewidth=1.2, zorder=1, label="perfect calibration")
    errors = torch.stack([accuracy - ends[:, 0], ends[:, 1] - accuracy]).clamp_min(0)
    style = {"color": COLORS[0], "markersize": 5, "elinewidth": 1.2, "capsize": 2.5, "zorder": 2}
    axes.errorbar(confidence, accuracy, yerr=errors, fmt="o", label="bins, with 95 % intervals", **style)
    axes.set(xlim=(start, end), ylim=(start, end), ylabel="accuracy, %")
    # Above the axes, since points can be anywhere inside.
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    below.vlines(confidence, 0, count, color=COLORS[0], linewidth=3)
    below.set(ylim=(0, 1.15 * count.max().item()), ylabel="images", xlabel="confidence, %")
    below.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    for panel in (axes, below):
        panel.grid()
    figures.add_caption(figure, caption)
    return save_figure(figure, path)


@plain_text()
def plot_risk_coverage(
    curves: Mapping[str, tuple[Tensor, Tensor]], *, title: str = "", path: str | Path | None = None
) -> Figure:
    """Draw the risk, which is the error rate of the most confident predictions, over their fraction, the coverage.

    Args:
        curves: Coverage (N,), increasing, and risk (N,), both from 0 to 1, by name of the certainty measure; see
            `hf_sphere.metrics.risk_coverage`.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there are no curves, or values are not from 0 to 1.

    Reference:
        Geifman and El-Yaniv, "Selective classification for deep neural networks", NeurIPS 2017.

    Example:
        >>> curve = hf_sphere.metrics.risk_coverage(torch.rand(100), torch.rand(100) > 0.5)
        >>> figure = plot_risk_coverage({"norm": curve}, path="risk.png")
    """
    figure = new_figure(6.4, 4.2, title)
    axes: Any = figure.subplots()
    if not curves or max(float(values.max()) for curve in curves.values() for values in curve) > 1 + 1e-9:
        raise ValueError("curves must be at least one, of coverages and risks from 0 to 1.")
    top, of_all = 0.0, {round(float(risk[-1]), 9) for _, risk in curves.values()}
    for index, (name, (coverage, risk)) in enumerate(curves.items()):
        shown = torch.linspace(0, len(coverage) - 1, min(len(coverage), _MOST_POINTS)).round().long()
        x, y = (100.0 * values.double().cpu()[shown] for values in (coverage, risk))
        axes.plot(x, y, linewidth=1.8, label=name, **figures.style_line(index))
        # Among the first few predictions a single error is a large share, which must not set the scale.
        top = max(top, y[x >= min(5.0, x[-1].item())].max().item())
    if len(of_all) == 1:  # curves of several models have several
        axes.axhline(100 * of_all.pop(), color="0.45", linewidth=1.0, linestyle=(0, (1, 2)), label="all kept")
    room = top or 1.0
    axes.set(xlim=(0, 101), ylim=(-0.02 * room, 1.08 * room))  # a curve at zero must be visible
    axes.set(xlabel="share of images kept, most confident first, %", ylabel="error rate among them, %")
    axes.grid()
    add_legend_below(figure, *axes.get_legend_handles_labels())
    return save_figure(figure, path)


@plain_text()
def plot_class_angles(points: Tensor, labels: Tensor, *, title: str = "", path: str | Path | None = None) -> Figure:
    """Draw the histograms of the angles between points of the same class and between points of different classes.

    Both have the same area, whatever their number of pairs, so that their overlap is visible. For more than about 1000
    points only a sample of the pairs is used, as stated in the caption.

    Args:
        points: (N, d), of any nonzero norms.
        labels: (N,), class of each point; any integers.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        TypeError: If the labels are not integers.
        ValueError: For the reasons of `hf_sphere.metrics.class_angles`.

    Example:
        >>> figure = plot_class_angles(embeddings, labels, path="angles.png")
    """
    within, between = class_angles(points, labels)
    figure = new_figure(7.2, 4.0, title)
    axes = figure.subplots()
    edges = torch.linspace(0.0, 180.0, _ANGLE_BINS + 1, dtype=torch.float64)
    for kind, angles, color, stroke in (
        ("within a class", within, COLORS[0], "-"),
        ("between classes", between, COLORS[2], "--"),
    ):
        percent = 100.0 * torch.histc(angles, _ANGLE_BINS, 0.0, 180.0) / len(angles) / (180.0 / _ANGLE_BINS)
        axes.stairs(percent, edges, fill=True, color=color, alpha=0.35, linewidth=0)
        axes.stairs(percent, edges, color=color, linewidth=1.3, label=kind)
        mean = angles.mean().item()
        axes.axvline(mean, color=color, linewidth=1.8, linestyle=stroke, zorder=0, label=f"mean {mean:.1f}°")
    axes.set(xlim=(0.0, 180.0), xticks=range(0, 181, 30), xlabel="angle between two points, degrees")
    axes.set(ylim=(0.0, None), ylabel="pairs, % per degree")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    every = len(points) * (len(points) - 1) // 2
    drawn = f"a sample of {MAX_PAIRS:,} pairs of each kind, of {every:,} in all"
    figures.add_caption(figure, drawn if every > MAX_PAIRS else f"all {every:,} pairs")
    return save_figure(figure, path)


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
    labels = [f"difference from {figures.shorten(comparison.reference)}", "with its 95 % interval"]
    if comparison.margin is not None:
        labels.append(f"gray: margin of equivalence, {comparison.margin:.2g}")
        right.axvspan(-comparison.margin, comparison.margin, color="0.92", zorder=0)
    right.axvline(0.0, color="0.5", linewidth=1)
    left.set_yticks(range(len(runs)), map(figures.shorten, runs))
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
    frame, names = pd.DataFrame(results), ["model", "benchmark", "scoring"]
    if frame.duplicated(names).any():
        raise ValueError(f"pass one accuracy per model, benchmark and scoring; got\n{frame[names]}")
    if (highest := frame["eval_accuracy_high"].max()) > 1:
        raise ValueError(f"accuracies must be from 0 to 1, not in percent; got {highest:g}.")
    models, benchmarks, scorings = (frame[name].unique().tolist() for name in names)
    size = max(5.4, 1.0 + 0.28 * len(benchmarks) * (len(models) + 1))
    figure = new_figure(size, 0.6 + 3.0 * len(scorings), title)
    panels = figure.subplots(len(scorings), squeeze=False, sharey=True).flatten()
    width = GROUP_WIDTH / len(models)
    handles: dict[str, Any] = {}  # by label; not every panel has every model
    for axes, scoring in zip(panels, scorings, strict=True):
        drawn = frame[frame["scoring"] == scoring]
        places = drawn["benchmark"].map(benchmarks.index)
        for index, model in enumerate(models):
            of_model = drawn[drawn["model"] == model]
            positions = places[of_model.index] + (index - (len(models) - 1) / 2) * width
            accuracy, low, high = (100 * of_model[f"eval_accuracy{end}"] for end in ("", "_low", "_high"))
            if len(of_model):
                axes.bar(positions, accuracy, 0.9 * width, color=COLORS[index % len(COLORS)], alpha=0.75, label=model)
                ends = [(accuracy - low).clip(0), (high - accuracy).clip(0)]
                axes.errorbar(positions, accuracy, yerr=ends, fmt="none", ecolor="0.2", elinewidth=1.1, capsize=2.5)
        style = {"color": "0.35", "linestyle": "--", "linewidth": 1.1, "label": GUESSING}
        chance = drawn.drop_duplicates("benchmark", keep="last")["chance_level"]
        axes.hlines(100 * chance, places[chance.index] - 0.47, places[chance.index] + 0.47, zorder=3, **style)
        axes.set(xticks=range(len(benchmarks)), xticklabels=benchmarks, xlim=(-0.6, len(benchmarks) - 0.4))
        axes.set(title=scoring.replace("_", " "), ylabel="accuracy on test questions, %")
        axes.grid(axis="y")
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    panels[0].set_ylim(0, min(101.0, 105 * highest) or 101.0)  # shared by all panels
    labels = [*models, GUESSING]
    add_legend_below(figure, [handles[label] for label in labels], labels)
    return save_figure(figure, path)
