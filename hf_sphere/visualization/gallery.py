"""Several spheres or circles side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from hf_sphere.visualization.circle import CircleScene
from hf_sphere.visualization.figures import Figure, plain_text
from hf_sphere.visualization.scene import Panel, Scene, plot_scenes
from hf_sphere.visualization.sphere import SphereScene


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
        ValueError: If there are no panels, `lengths` is set in three dimensions, or `plot_sphere` or `plot_circle`
            raises it; the message then starts with the title of the panel.

    Example:
        >>> panels = {"mine": Panel(embeddings, labels), "negated": Panel(-embeddings, labels)}
        >>> figure = plot_gallery(panels, ["cat", "dog", "fox"], dim=3, path="gallery.png")
    """
    scenes = {name: make_scene(name, panel, class_names, dim) for name, panel in panels.items()}
    return plot_scenes(scenes, title, path, columns)


def make_scene(name: str, panel: Panel, class_names: Sequence[str], dim: int) -> Scene:
    """Return the scene of a panel on the circle or sphere; error messages start with its name."""
    try:
        return {2: CircleScene, 3: SphereScene}[dim](panel, class_names)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
