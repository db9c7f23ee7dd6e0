"""A metric along training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_sphere.visualization.figures import check_matplotlib, save_figure, start_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STROKES = ("-", "--", "-.", ":")  # tell curves apart in grey


def plot_training_curves(
    curves: Mapping[str, Sequence[Sequence[Mapping[str, float]]]],
    *,
    metric: str,
    title: str = "",
    path: str | Path | None = None,
) -> "Figure":
    """Draw a metric along training for several kinds of runs, the mean over runs with the range as a band.

    Args:
        curves: Name of each kind to its runs; a run is its history, an entry an epoch with `epoch` and the metric.
        metric: Key of the entries; an accuracy is drawn in percent.
        title: Heading.
        path: Where to save the picture (the suffix says as what); not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there is nothing to draw.
    """
    check_matplotlib()
    from matplotlib.ticker import MaxNLocator

    drawn = {name: [run for run in runs if run and metric in run[0]] for name, runs in curves.items()}
    drawn = {name: runs for name, runs in drawn.items() if runs}
    if not drawn:
        raise ValueError(f"there is no run with {metric} to draw.")
    percent = 100.0 if "accuracy" in metric else 1.0
    figure, colors = start_figure(7.2, 4.4)
    axes = figure.subplots()
    ends = []
    for number, (name, runs) in enumerate(drawn.items()):
        length = min(map(len, runs))  # runs that are under way are compared as far as all have come
        values = torch.tensor([[percent * entry[metric] for entry in run[:length]] for run in runs])
        epochs = [entry["epoch"] for entry in runs[0][:length]]
        color, stroke = colors[number % 10], _STROKES[number % len(_STROKES)]
        mean = values.mean(0)
        marker = "o" if length < 12 else None
        axes.plot(epochs, mean, stroke, color=color, marker=marker, markersize=4, linewidth=1.8, label=name)
        if len(runs) > 1:
            axes.fill_between(epochs, values.amin(0), values.amax(0), color=color, alpha=0.15, linewidth=0)
        ends.append((mean[-1].item(), name))
    # The legend in the order of the curves' ends, so that the eye finds its way.
    order = [name for _, name in sorted(ends, reverse=True)]
    handles, labels = axes.get_legend_handles_labels()
    ranked = sorted(zip(handles, labels, strict=True), key=lambda pair: order.index(pair[1]))
    texts = [f"{name}  {value:.2f}" for value, name in sorted(ends, reverse=True)]
    axes.legend([handle for handle, _ in ranked], texts, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label = metric.replace("eval_", "evaluation_").replace("_", " ")
    axes.set_ylabel(f"{label}, %" if percent > 1 else label)
    axes.set_title(title)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
    return figure
