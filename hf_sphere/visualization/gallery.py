"""Several spheres or circles side by side, to compare models."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from hf_sphere.visualization.circle import CircleScene
from hf_sphere.visualization.class_marks import add_legend
from hf_sphere.visualization.figures import Figure, add_caption, new_figure, plain_text, save_figure
from hf_sphere.visualization.scene import LARGEST_NAMED, Panel, Scene
from hf_sphere.visualization.sphere import SphereScene

_LARGEST_NAMED = 30  # number of classes; a panel does not have room for more names
_SHARED_NOTES = ("height of", "lines")
"""Beginnings of the caption lines that explain marks; they are drawn once below all panels, not below each."""


@plain_text()
def plot_gallery(
    panels: Mapping[str, Panel],
    class_names: Sequence[str],
    *,
    dim: Literal[2, 3],
    columns: int = 3,
    title: str = "",
    path: str | Path | None = None,
) -> Figure:
    """Draw several spheres or circles, as `plot_sphere` and `plot_circle` do, with one legend.

    Args:
        panels: Content of each panel by its title.
        class_names: Name of each class, the same in all panels.
        dim: 3 for spheres, 2 for circles and planes.
        columns: Panels per row.
        title: Title of the figure.
        path: Where to save the figure, in the format of the suffix; not saved if None.

    Raises:
        ImportError: If matplotlib is missing.
        ValueError: If there are no panels, `dim` or `columns` is invalid, `lengths` is set in three dimensions, or
            `plot_sphere` or `plot_circle` raises it; the message then starts with the title of the panel.
    """
    if dim not in (2, 3):
        raise ValueError(f"dim must be 2 or 3; got {dim}.")
    if columns < 1:
        raise ValueError(f"columns must be at least 1; got {columns}.")
    if not panels:
        raise ValueError("there are no panels to draw.")
    scenes = {name: _make_scene(name, panel, class_names, dim) for name, panel in panels.items()}
    wide = any(isinstance(scene, SphereScene) and scene.view.both_sides for scene in scenes.values())
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(1.0 + columns * (5.6 if wide else 3.6), 0.8 + rows * (3.2 if wide else 3.9), title)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    shared: list[str] = []
    for axes, (name, scene) in zip(grid, scenes.items(), strict=False):
        notes = scene.draw(axes, scale=0.5)
        if _LARGEST_NAMED < len(scene.present) <= LARGEST_NAMED:
            notes.append(f"{len(scene.present)} classes: too many to draw their names")
        axes.set_title(name, fontsize=11)
        shared += [note for note in notes if note.startswith(_SHARED_NOTES)]
        own = "; ".join(note for note in notes if not note.startswith(_SHARED_NOTES))
        style = {"transform": axes.transAxes, "ha": "center", "va": "top", "fontsize": 8, "color": "0.35"}
        if own:
            axes.text(0.5, -0.02, textwrap.fill(own, 55), **style)
    add_caption(figure, *dict.fromkeys(shared))
    present = {index for scene in scenes.values() for index in scene.present}
    add_legend(figure, sorted(present), class_names)
    figure.draw_without_rendering()
    for axes, scene in zip(grid, scenes.values(), strict=False):
        if len(scene.present) <= _LARGEST_NAMED:
            scene.draw_names(axes, 10.0)
    return save_figure(figure, path)


def _make_scene(name: str, panel: Panel, class_names: Sequence[str], dim: int) -> Scene:
    """Check a panel; error messages start with its name."""
    try:
        if panel.lengths and dim == 3:
            raise ValueError("lengths can be drawn in two dimensions only; unset them or use dim=2.")
        return SphereScene(panel, class_names, None, None) if dim == 3 else CircleScene(panel, class_names, 2)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
