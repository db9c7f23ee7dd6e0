"""Embeddings on the sphere, seen in three dimensions."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.visualization.figures import check_matplotlib, save_figure, start_figure

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
    check_matplotlib()
    from matplotlib.patheffects import withStroke

    points, labels = points.cpu(), labels.cpu()
    projected = points.shape[-1] > 3
    if projected and directions is not None:
        raise ValueError(f"directions can be drawn only on points of 3 coordinates; these have {points.shape[-1]}.")
    shown = project_to_sphere(points)[0] if projected else F.normalize(points.detach().double(), dim=-1)
    if shown.shape[-1] < 3:
        raise ValueError(f"the sphere needs points of at least 3 coordinates; got {points.shape[-1]}.")
    center = F.normalize(shown.mean(0), dim=0)
    figure, colours = start_figure(7.5, 6.5)
    axes = figure.add_subplot(projection="3d", computed_zorder=False)
    _draw_globe(axes)
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
    save_figure(figure, path)
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
