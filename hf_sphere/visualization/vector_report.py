"""A report on vectors: cosines, variances, hubs, and what remedies change."""

from pathlib import Path

import numpy as np

from hf_sphere.search.report import K, VectorReport
from hf_sphere.visualization.figures import COLORS, Figure, new_figure, plain_text, save_figure


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
        last.hist(drawn["norms"], 60, color=COLORS[0])
        last.set(xlabel="norm", ylabel="rows")
    ends = "Remedies" if report.remedies else "Norms"
    for axes, name in zip((cosines, variances, hubs, last), ("Cosines", "Variances", "Hubs", ends), strict=True):
        axes.set_title(name)
        axes.grid()
    for axes in (cosines, variances):
        axes.legend()
    return save_figure(figure, path)
