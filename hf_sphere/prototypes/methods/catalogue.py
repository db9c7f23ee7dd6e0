"""Placements from the catalogue of constructed spherical codes."""

from collections.abc import Iterator

from hf_sphere.geometry.codes import find_code, fit_code
from hf_sphere.prototypes.methods.base import Candidate, Method, Task


class Catalogue(Method):
    """A random part of the best constructed code that is large enough, padded with zeros to the dimension.

    Raises:
        ValueError: If no code of the catalogue has enough points in so few dimensions.
    """

    name = "catalogue"
    knows_ordering = False

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        code = find_code(task.num_classes, task.dim)
        if code is None:
            raise ValueError(
                f"the catalogue has no code of {task.num_classes} points or more in {task.dim} dimensions or fewer. "
                "Use method 'auto' or 'lbfgs'."
            )
        self.code = code

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Candidate]:
        points = fit_code(self.code, self.task.num_classes, self.task.dim, generator=self.task.generator)
        yield Candidate(points, f"{self.code.name} ({self.code.dim}, {self.code.size})")
