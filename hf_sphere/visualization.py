"""Pictures of embeddings on the sphere and of training (extra `plots`)."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def project_to_sphere(points: Tensor, dim: int = 3) -> tuple[Tensor, Tensor]:
    """Bring points of any dimension onto a small sphere for looking at.

    The points are normalised, projected on their leading principal directions about the origin (the great sphere they
    lie closest to) and normalised again.

    Args:
        points: (N, d).
        dim: Coordinates of the result, at most d.

    Returns:
        Unit vectors (N, dim), and the basis (d, dim).

    Raises:
        ValueError: If `dim` exceeds d.
    """
    if dim > points.shape[-1]:
        raise ValueError(f"points of {points.shape[-1]} coordinates cannot be shown in {dim} dimensions.")
    directions = F.normalize(points.detach().double(), dim=-1)
    # Eigenvectors of the second moment, largest first; their signs are fixed so that the picture is.
    basis = torch.linalg.eigh(directions.T @ directions).eigenvectors.flip(-1)[:, :dim]
    basis = basis * torch.where(basis.sum(0) < 0, -1.0, 1.0)
    return F.normalize(directions @ basis, dim=-1), basis


def plot_sphere(
    points: Tensor,
    labels: Tensor,
    class_names: Sequence[str],
    *,
    directions: Tensor | None = None,
    title: str = "",
    path: str | Path | None = None,
) -> "Figure":
    """Draw points on the unit sphere in three dimensions, coloured by class.

    Points of more than three coordinates are projected by `project_to_sphere`, and the caption says so. Each class is
    named beside its mean direction.

    Args:
        points: (N, d) with d >= 3; only their directions are drawn.
        labels: (N,) class indices.
        class_names: Name of each class.
        directions: (K, 3), a direction a class to draw as a line, for instance class weights. Only for points of three
            coordinates: a projection would not show where class weights point.
        title: Heading.
        path: Where to save the picture (the suffix says as what); not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If `points` have fewer than three coordinates, or more and `directions` are given.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.patheffects import withStroke
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'hf_sphere[plots]'") from error

    points, labels = points.cpu(), labels.cpu()
    projected = points.shape[-1] > 3
    if projected and directions is not None:
        raise ValueError(f"directions can be drawn only on points of 3 coordinates; these have {points.shape[-1]}.")
    shown = project_to_sphere(points)[0] if projected else F.normalize(points.detach().double(), dim=-1)
    if shown.shape[-1] < 3:
        raise ValueError(f"the sphere needs points of at least 3 coordinates; got {points.shape[-1]}.")
    center = F.normalize(shown.mean(0), dim=0)
    figure = Figure(figsize=(7.5, 6.5), layout="constrained")
    axes = figure.add_subplot(projection="3d", computed_zorder=False)
    _draw_globe(axes)
    colours = matplotlib.color_sequences["petroff10"]  # distinguishable with any colour vision
    for index, name in enumerate(class_names):
        colour, chosen = colours[index % 10], shown[labels == index]
        if len(chosen) == 0:
            continue
        axes.scatter(*chosen.T, s=14, color=colour, label=name, alpha=0.85, linewidths=0, zorder=2)
        place = 1.15 * F.normalize(chosen.mean(0), dim=0)
        text = axes.text(*place, name, color=colour, weight="bold", size=13, ha="center", va="center", zorder=4)
        text.set_path_effects([withStroke(linewidth=3, foreground="white")])
        if directions is not None:
            axes.plot(*torch.stack([torch.zeros(3), directions[index].cpu()]).T, color=colour, linewidth=2, zorder=3)
    # Look from where most points are, a little from the side.
    elevation = torch.asin(center[2]).rad2deg().item()
    azimuth = torch.atan2(center[1], center[0]).rad2deg().item()
    axes.view_init(elev=elevation + 15, azim=azimuth + 15)
    axes.set_box_aspect((1, 1, 1), zoom=1.55)
    axes.set_axis_off()
    axes.set_title(title)
    if projected:
        note = f"{points.shape[-1]} coordinates, projected on the three leading principal directions"
        figure.supxlabel(note, fontsize=9, color="0.35")
    axes.legend(loc="center left", bbox_to_anchor=(0.98, 0.5), frameon=False, markerscale=2)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _draw_globe(axes: Any) -> None:
    turn = torch.linspace(0, 2 * torch.pi, 121)
    circle = torch.stack([turn.cos(), turn.sin(), torch.zeros_like(turn)])
    for latitude in torch.deg2rad(torch.arange(-60.0, 61.0, 30.0)):
        ring = circle * latitude.cos() + torch.tensor([[0.0], [0.0], [1.0]]) * latitude.sin()
        axes.plot(*ring, color="0.8", linewidth=0.6, zorder=1)
    for longitude in torch.deg2rad(torch.arange(0.0, 180.0, 30.0)):
        ring = torch.stack([longitude.cos() * turn.cos(), longitude.sin() * turn.cos(), turn.sin()])
        axes.plot(*ring, color="0.8", linewidth=0.6, zorder=1)


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
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'hf_sphere[plots]'.") from error
    drawn = {name: [run for run in runs if run and metric in run[0]] for name, runs in curves.items()}
    drawn = {name: runs for name, runs in drawn.items() if runs}
    if not drawn:
        raise ValueError(f"there is no run with {metric} to draw.")
    percent = 100.0 if "accuracy" in metric else 1.0
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    colors = matplotlib.color_sequences["petroff10"]  # distinguishable with any colour vision
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
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure


def plot_cosines(
    points: Tensor, *, bound: float | None = None, title: str = "", path: str | Path | None = None
) -> "Figure":
    """Draw the histogram of the cosines between all pairs of points, with the largest one marked.

    Args:
        points: (K, d), of any norms but zero.
        bound: A lower bound of the largest cosine to mark beside it.
        title: Heading.
        path: Where to save the picture (the suffix says as what); not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there are fewer than two points.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'hf_sphere[plots]'.") from error
    if len(points) < 2:
        raise ValueError(f"cosines are between two points at least; got {len(points)}.")
    unit = F.normalize(points.detach().double().cpu(), dim=1)
    ends = torch.stack([torch.stack(pairs.aminmax()) for pairs in _cosines_of_pairs(unit)])
    lowest, largest = ends[:, 0].min().item(), ends[:, 1].max().item()
    # The first and the last bar are centred on the extremes, so that the mark of the largest cosine stands on its bar.
    width = max((largest - lowest) / 79, 0.002)
    bins = round((largest - lowest) / width) + 1
    left, right = lowest - width / 2, lowest + (bins - 0.5) * width
    counts = torch.zeros(bins, dtype=torch.float64)
    for pairs in _cosines_of_pairs(unit):
        counts += torch.histc(pairs, bins, left, right)
    colors = matplotlib.color_sequences["petroff10"]
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.stairs(counts, torch.linspace(left, right, bins + 1), fill=True, color=colors[0])
    # Marks stand behind the bars and above them: a line before a thin bar would hide it.
    proved = bound is not None and largest - bound <= 1e-6
    label = f"largest {largest:.4f}{', the smallest possible' if proved else ''}"
    axes.axvline(largest, color=colors[2], linewidth=1.8, zorder=0, label=label)
    if bound is not None and not proved:
        label = f"no placement is below {bound:.4f}"
        axes.axvline(bound, color="0.25", linewidth=1.8, linestyle="--", zorder=0, label=label)
    lowest = lowest if bound is None else min(lowest, bound)
    margin = max(0.06 * (largest - lowest), 0.05)
    axes.set_xlim(max(lowest - margin, -1.02), min(largest + margin, 1.02))
    axes.set_ylim(0, 1.15 * counts.max().item())
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("cosine between two points")
    axes.set_ylabel("pairs")
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure


def _cosines_of_pairs(unit: Tensor) -> Iterator[Tensor]:
    """Yield the cosines between all pairs of unit vectors (K, d), each pair once, some rows at a time."""
    step = max(1, 2**22 // len(unit))
    for start in range(0, len(unit) - 1, step):  # the last row has no pair to its right
        cosines = unit[start : start + step] @ unit.T
        yield cosines[torch.ones_like(cosines, dtype=torch.bool).triu(start + 1)].clamp(-1.0, 1.0)
