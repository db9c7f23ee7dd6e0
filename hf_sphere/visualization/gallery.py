"""Several spheres or circles side by side, to compare models by."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from hf_sphere.visualization.circle import draw_circle, name_on_circle
from hf_sphere.visualization.class_marks import add_legend
from hf_sphere.visualization.figures import plain_text, save_figure, start_figure
from hf_sphere.visualization.scene import Scene
from hf_sphere.visualization.sphere import choose_view, draw_sphere, name_on_sphere

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMES_SIZE = 10.0
_LARGEST_NAMED = 30
"""Classes; more names than these find no room in a panel."""

_OF_ALL = ("height of", "lines")
"""How notes start that say what is drawn: once below all panels, rather than below each."""


@dataclass(frozen=True, eq=False)
class Panel:
    """What one part of a gallery shows.

    Attributes:
        points: (N, d), with d at least the dimensions of the gallery.
        labels: (N,) class indices.
        directions: (K, d), a direction a class, or None.
        lengths: Whether to draw points of two coordinates where they are in the plane, rather than on the circle.
    """

    points: Tensor
    labels: Tensor
    directions: Tensor | None = None
    lengths: bool = False


@plain_text()
def plot_gallery(
    panels: Mapping[str, Panel],
    class_names: Sequence[str],
    *,
    dim: Literal[2, 3],
    columns: int = 3,
    title: str = "",
    path: str | Path | None = None,
) -> "Figure":
    """Draw several spheres, or circles, as `plot_sphere` and `plot_circle` do, with one legend.

    Args:
        panels: Heading of each part to what it shows.
        class_names: Name of each class, the same in all parts.
        dim: 3 for spheres, 2 for circles and planes.
        columns: Parts beside each other.
        title: Heading of all.
        path: Where to save the picture (the suffix says as what); not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there is no panel, `dim` or `columns` is none of those, lengths are to be drawn in three
            dimensions, or as `plot_sphere` and `plot_circle` do, with the heading of the panel.
    """
    if dim not in (2, 3):
        raise ValueError(f"a gallery has 2 or 3 dimensions; got {dim}.")
    if columns < 1:
        raise ValueError(f"columns must be at least 1; got {columns}.")
    if not panels:
        raise ValueError("there is no panel to draw.")
    parts = {name: _prepare(name, panel, class_names, dim) for name, panel in panels.items()}
    views = {name: choose_view(scene.points) for name, scene in parts.items()} if dim == 3 else {}
    both = any(view.both_sides for view in views.values())
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure, colours = start_figure(1.0 + columns * (5.6 if both else 3.6), 0.8 + rows * (3.2 if both else 3.9))
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid[len(parts) :]:
        axes.set_visible(False)
    legends = []
    for axes, (name, scene) in zip(grid, parts.items(), strict=False):
        if dim == 3:
            notes = draw_sphere(axes, scene, views[name], colours, scale=0.5)
        else:
            notes = draw_circle(axes, scene, colours, lengths=panels[name].lengths, scale=0.5)
        if len(scene.present) > _LARGEST_NAMED and not scene.is_crowded:
            notes.append(f"{len(scene.present)} classes: too many to draw their names")
        axes.set_title(name, fontsize=11)
        legends += [note for note in notes if note.startswith(_OF_ALL)]
        own = [note for note in notes if not note.startswith(_OF_ALL)]
        if own:
            note = textwrap.fill("; ".join(own), 55)
            axes.text(0.5, -0.02, note, transform=axes.transAxes, ha="center", va="top", fontsize=8, color="0.35")
    figure.suptitle(title)
    if legends:
        figure.supxlabel("\n".join(dict.fromkeys(legends)), fontsize=9, color="0.35")
    add_legend(figure, sorted({index for scene in parts.values() for index in scene.present}), class_names, colours)
    figure.draw_without_rendering()
    for axes, (name, scene) in zip(grid, parts.items(), strict=False):
        if len(scene.present) > _LARGEST_NAMED:
            continue
        if dim == 3:
            name_on_sphere(axes, scene, views[name], colours, _NAMES_SIZE)
        else:
            name_on_circle(axes, scene, colours, _NAMES_SIZE, lengths=panels[name].lengths)
    save_figure(figure, path)
    return figure


def _prepare(name: str, panel: Panel, class_names: Sequence[str], dim: int) -> Scene:
    """Check the panel of this heading; return what is drawn of it."""
    try:
        if panel.lengths and dim == 3:
            raise ValueError("lengths are drawn in two dimensions only; leave them out or take dim=2.")
        if panel.lengths:
            return Scene.in_plane(panel.points, panel.labels, class_names, panel.directions)
        return Scene.on_sphere(panel.points, panel.labels, class_names, dim, panel.directions)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
