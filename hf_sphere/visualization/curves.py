"""Curves of a metric during training."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hf_sphere.visualization.figures import Figure, new_figure, plain_text, save_figure, style_axes, style_line


@plain_text()
def plot_training_curves(
    curves: Mapping[str, Sequence[Sequence[Mapping[str, float]]]],
    *,
    metric: str,
    against: str = "epoch",
    title: str = "",
    path: str | Path | None = None,
) -> Figure:
    """Draw a metric during training for several kinds of runs: the mean over the runs, with a band of their range.

    Args:
        curves: Runs by the name of their kind; a run is a list with one entry per epoch, which has the metric and the
            key `against`.
        metric: Key of the entries; accuracies are drawn in percent.
        against: Key of the entries on the horizontal axis, for instance `minutes`; of the first run of a kind.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there is nothing to draw.
    """
    from matplotlib.ticker import MaxNLocator

    drawn = {name: [run for run in runs if run and metric in run[0]] for name, runs in curves.items()}
    drawn = {name: runs for name, runs in drawn.items() if runs}
    if not drawn:
        raise ValueError(f"no run has {metric} to draw.")
    percent = 100.0 if "accuracy" in metric else 1.0
    figure = new_figure(7.2, 4.4)
    axes = figure.subplots()
    ends = []
    for number, (name, runs) in enumerate(drawn.items()):
        length = min(map(len, runs))  # unfinished runs are compared up to the shortest
        values = torch.tensor([[percent * entry[metric] for entry in run[:length]] for run in runs])
        positions = [entry[against] for entry in runs[0][:length]]
        mean, style = values.mean(0), style_line(number)
        marker = "o" if length < 12 else None
        (line,) = axes.plot(positions, mean, marker=marker, markersize=4, linewidth=1.8, label=name, **style)
        if len(runs) > 1:
            axes.fill_between(positions, values.amin(0), values.amax(0), color=style["color"], alpha=0.15, linewidth=0)
        ends.append((mean[-1].item(), name, line))
    ends.sort(key=lambda end: end[:2], reverse=True)  # the legend is in the order of the ends of the curves
    texts = [f"{name}  {value:.2f}" for value, name, _ in ends]
    axes.legend([line for *_, line in ends], texts, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label = metric.replace("eval_", "evaluation_").replace("_", " ")
    axes.set(xlabel=against, ylabel=f"{label}, %" if percent > 1 else label, title=title)
    style_axes(axes)
    return save_figure(figure, path)
