"""What a picture of embeddings shows, checked and brought into two or three dimensions."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_sphere.visualization.projection import check_directions, check_labels, check_points, show_on_sphere

LARGEST_NAMED = 50
"""Classes; names and directions of more cover the picture."""


@dataclass(frozen=True, eq=False)
class Scene:
    """Points of classes in two or three dimensions.

    Attributes:
        points: (N, dim), unit vectors unless lengths are to be seen, float64 on the CPU.
        labels: (N,), int64 on the CPU.
        class_names: Of the K classes.
        directions: (K, dim), a unit vector a class, or None.
        note: That the points are projected and how much of them is seen; empty for points that are as they were given.
    """

    points: Tensor
    labels: Tensor
    class_names: Sequence[str]
    directions: Tensor | None
    note: str = ""

    @property
    def present(self) -> list[int]:
        """Classes that have points."""
        return self.labels.unique().tolist()

    @property
    def is_crowded(self) -> bool:
        """Whether there are too many classes to name them or to draw their directions."""
        return len(self.present) > LARGEST_NAMED

    @property
    def drawn_directions(self) -> dict[int, Tensor]:
        """Class to direction, (dim,), of the classes that have points; empty if there are none to draw."""
        if self.directions is None or self.is_crowded:
            return {}
        return {index: self.directions[index] for index in self.present}

    @property
    def crowd_note(self) -> str:
        """That names, and directions if there are any, are left out of a crowded picture; else empty."""
        if not self.is_crowded:
            return ""
        what = "names" if self.directions is None else "names and directions"
        return f"{len(self.present)} classes: too many to draw their {what}"

    def members(self) -> list[Tensor]:
        """Points of each class of `present`, (n, dim)."""
        return [self.points[self.labels == index] for index in self.present]

    @classmethod
    def on_sphere(
        cls,
        points: Tensor,
        labels: Tensor,
        class_names: Sequence[str],
        dim: int,
        directions: Tensor | None = None,
        basis: Tensor | None = None,
    ) -> "Scene":
        """See `show_on_sphere`; labels (N,) and directions, one a class, are checked as well."""
        shown = show_on_sphere(points, dim, directions, basis)
        labels = check_labels(labels, len(shown.points), class_names)
        _check_count(shown.directions, class_names)
        return cls(shown.points, labels, class_names, shown.directions, shown.note)

    @classmethod
    def in_plane(cls, points: Tensor, labels: Tensor, class_names: Sequence[str], directions: Tensor | None) -> "Scene":
        """Take points (N, 2) as they are, lengths as well, and directions (K, 2) with them.

        Raises:
            ValueError: If they have not two coordinates or are not finite, a direction is zero or missing, or the
                labels do not fit.
        """
        points = check_points(points)
        if points.shape[1] != 2:
            raise ValueError(f"lengths can be drawn of points of 2 coordinates only; got {points.shape[1]}.")
        turned = None if directions is None else check_directions(directions, 2)
        _check_count(turned, class_names)
        return cls(points, check_labels(labels, len(points), class_names), class_names, turned)


def _check_count(directions: Tensor | None, class_names: Sequence[str]) -> None:
    if directions is not None and len(directions) != len(class_names):
        raise ValueError(f"directions must be one a class, {len(class_names)}; got {len(directions)}.")
