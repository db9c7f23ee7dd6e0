"""Placements from the catalogue of constructed spherical codes."""

from collections.abc import Iterator

from hf_sphere.geometry.codes import find_code, fit_code
from hf_sphere.prototypes.methods.base import Candidate, Method, Task


class Catalogue(Method):
    """A random subset of the best constructed code with enough points, padded with zeros to the dimension.

    Raises:
        ValueError: If the catalogue has no such code.
    """

    name = "catalogue"
    uses_class_vectors = False

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        code = find_code(task.num_classes, task.dim)
        if code is None:
            size = f"at least {task.num_classes} points in at most {task.dim} dimensions"
            raise ValueError(f"the catalogue has no code with {size}. Use method 'auto' or 'lbfgs'.")
        self.code = code

    def __iter__(self) -> Iterator[Candidate]:
        points = fit_code(self.code, self.task.num_classes, self.task.dim, generator=self.task.generator)
        yield Candidate(points, f"{self.code.name} ({self.code.dim}, {self.code.size})")
