"""The content of a figure of embeddings: validated, projected to two or three dimensions, and drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.metrics.checks import check_directions, check_embeddings
from hf_sphere.visualization.class_marks import add_legend
from hf_sphere.visualization.figures import Figure, add_caption, new_figure, save_figure
from hf_sphere.visualization.projection import check_class_labels, project_to_sphere, share_kept

LARGEST_NAMED = 50
"""Number of classes; names and directions of more classes would cover the figure."""


@dataclass(frozen=True, eq=False)
class Panel:
    """The content of one panel of a gallery.

    Attributes:
        points: (N, d), with d at least the dimensions of the gallery.
        labels: (N,) class indices.
        directions: (K, d), a direction per class, or None.
        lengths: Whether to draw points of two coordinates in the plane, not on the circle.
    """

    points: Tensor
    labels: Tensor
    directions: Tensor | None = None
    lengths: bool = False


class Scene:
    """Points of classes in two or three dimensions; subclasses draw them.

    Points are projected by `project_to_sphere`. Without a basis, points with as many coordinates as the scene has
    dimensions are only normalized; with `panel.lengths` they are not changed.

    Args:
        panel: What to draw.
        class_names: Names of the K classes.
        dim: Dimensions of the scene, 2 or 3.
        basis: (d, dim), a basis to project on; see `project_to_sphere`.

    Attributes:
        points: (N, dim), unit vectors unless `panel.lengths` is true, float64 on the CPU.
        labels: (N,), int64 on the CPU.
        directions: (K, dim), a unit vector per class, or None.
        note: Describes the projection, if there is one.
        present: Classes that have points.
        drawn_directions: Directions (dim,) of the classes that have points, by class; empty if there are too many.

    Raises:
        TypeError: If the labels are not integers.
        ValueError: If the points have too few coordinates or, with lengths, not two; if a shape does not fit; if a
            label has no name; or if a vector is not finite or, unless it is a point with `lengths`, zero.
    """

    def __init__(self, panel: Panel, class_names: Sequence[str], dim: int, basis: Tensor | None = None) -> None:
        points = check_embeddings(panel.points, what="points").cpu().double()
        directions, lengths = panel.directions, panel.lengths
        width = points.shape[1]
        if lengths and width != 2:
            raise ValueError(f"lengths can be drawn for points of 2 coordinates only; got {width}.")
        if width < dim:
            raise ValueError(f"the {'circle' if dim == 2 else 'sphere'} needs at least {dim} coordinates; got {width}.")
        labels = check_class_labels(panel.labels, len(points), class_names)
        if directions is not None:
            directions = check_directions(directions, what="directions")
            if directions.shape != (len(class_names), width):
                raise ValueError(
                    f"directions must have the shape {(len(class_names), width)}, one per class; got "
                    f"{tuple(directions.shape)}."
                )
        note = ""
        if not lengths and width == dim and basis is None:
            points = check_directions(points, what="points")
        elif not lengths:
            number = "two" if dim == 2 else "three"
            which = f"the {number} leading principal" if basis is None else f"{number} given"
            shown, basis = project_to_sphere(points, dim, basis=basis)
            kept = 100 * share_kept(points, basis)
            points, directions = shown, None if directions is None else F.normalize(directions @ basis, dim=-1)
            note = f"{width} coordinates, projected on {which} directions, which keep {kept:.0f} % of the second moment"
        self.points, self.labels, self.directions, self.class_names = points, labels, directions, class_names
        self.lengths, self.note = lengths, note
        self.present: list[int] = labels.unique().tolist()
        self.drawn_directions: dict[int, Tensor] = {}
        if directions is not None and len(self.present) <= LARGEST_NAMED:
            self.drawn_directions = {index: directions[index] for index in self.present}

    def draw(self, axes: Any, *, scale: float = 1.0) -> list[str]:
        """Draw into empty axes, with markers `scale` times as large as usual, and return the lines of the caption."""
        raise NotImplementedError

    def draw_names(self, axes: Any, size: float) -> None:
        """Write the names of the classes, `size` points large, after `draw` and `Figure.draw_without_rendering`."""
        raise NotImplementedError

    def plot(self, width: float, height: float, title: str, path: str | Path | None) -> Figure:
        """Draw a figure of this scene alone; sizes in inches."""
        figure = new_figure(width, height, title)
        axes = figure.subplots()
        add_caption(figure, *self.draw(axes))
        add_legend(figure, self.present, self.class_names)
        figure.draw_without_rendering()
        classes = len(self.present)
        if classes <= LARGEST_NAMED:
            self.draw_names(axes, 13.0 if classes <= 10 else 10.5 if classes <= 30 else 8.0)
        return save_figure(figure, path)

    def members(self) -> list[Tensor]:
        """Return the points (n, dim) of each class of `present`."""
        return [self.points[self.labels == index] for index in self.present]

    def mean_directions(self) -> Tensor:
        """Return the mean direction (dim,) of each class of `present`, stacked."""
        return F.normalize(torch.stack([F.normalize(own, dim=1).mean(0) for own in self.members()]), dim=1)

    def describe(self, *before: str, marks: str, shown: int, whole: str, outside: Sequence[str] = ()) -> list[str]:
        """Return the lines of the caption, those about the kind of figure `before` the others.

        `marks` are the marks of the directions, `shown` is the number of directions inside the figure, which may show a
        part of the `whole` circle or sphere, and `outside` are other items outside the figure.
        """
        count, classes = len(self.drawn_directions), len(self.present)
        lines = [self.note, *before]
        if shown:
            lines.append(f"{marks}: directions of the classes")
        elif count:
            lines.append(f"no class direction lies in this part of the {whole}")
        if 0 < shown < count:
            outside = [*outside, f"{count - shown} of {count} class directions"]
        if outside:
            lines.append("outside the picture: " + " and ".join(outside))
        if classes > LARGEST_NAMED:
            what = "names" if self.directions is None else "names and directions"
            lines.append(f"{classes} classes: too many to draw their {what}")
        return [line for line in lines if line]
