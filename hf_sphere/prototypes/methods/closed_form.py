"""Optimal placements in closed form."""

from collections.abc import Iterator

from hf_sphere.geometry.codes import cross_polytope, polygon, simplex
from hf_sphere.prototypes.methods.base import Candidate, Method, Task


class ClosedForm(Method):
    """Regular simplex (K <= d + 1), cross-polytope (K <= 2 d) or regular polygon (d = 2), which are proved optimal.

    Raises:
        ValueError: If there is no closed form for K and d.
    """

    name = "closed_form"
    uses_class_vectors = False

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if not has_closed_form(task):
            size = f"{task.num_classes} points in {task.dim} dimensions"
            raise ValueError(f"there is no closed form for {size} (only for K <= 2 d or d = 2). Use method 'auto'.")

    def __iter__(self) -> Iterator[Candidate]:
        count, dim = self.task.num_classes, self.task.dim
        if count <= dim + 1:
            yield Candidate(simplex(count, dim), "regular simplex")
        elif count <= 2 * dim:
            yield Candidate(cross_polytope(count, dim), "cross-polytope")
        else:
            yield Candidate(polygon(count), "regular polygon")


def has_closed_form(task: Task) -> bool:
    """Whether `ClosedForm` supports a task."""
    return task.num_classes <= 2 * task.dim or task.dim == 2
