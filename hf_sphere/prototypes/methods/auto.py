"""Placements in closed form and from the catalogue, and the default method: the best of these and of searches."""

from collections.abc import Iterator

from hf_sphere.geometry.codes import cross_polytope, find_code, fit_code, polygon, separation_bound, simplex
from hf_sphere.prototypes.methods.base import Candidate, Method, Task
from hf_sphere.prototypes.methods.searches import LBFGS, SLSQP


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


MAX_EXACT_COORDINATES = 110  # maximum number K d of coordinates for which SLSQP takes a fraction of a second


class Auto(Method):
    """The closed form if there is one, otherwise the best of the catalogue and the searches.

    If the catalogue has a code, L-BFGS runs only if it is likely to find a better placement or is fast. With a ranking
    loss only L-BFGS runs, since the other methods do not use class vectors.

    Args:
        restarts: Number of random starts of each search; see `LBFGS` and `SLSQP` for the defaults.
        max_iterations: See `LBFGS`.
    """

    name = "auto"

    def __init__(self, task: Task, *, restarts: int | None = None, max_iterations: int = 60) -> None:
        super().__init__(task)
        search = LBFGS(task, restarts=restarts, max_iterations=max_iterations)
        self.parts: list[Method]
        if task.ranking is not None:
            self.parts = [search]
        elif has_closed_form(task):
            self.parts = [ClosedForm(task)]
        else:
            code = find_code(task.num_classes, task.dim)
            self.parts = [] if code is None else [Catalogue(task)]
            if task.num_classes * task.dim <= MAX_EXACT_COORDINATES:
                self.parts.append(SLSQP(task, restarts=restarts))
            # A search typically reaches 93 % of the bound in 1 - cosine, so it is likely to improve on worse codes.
            bound = separation_bound(task.num_classes, task.dim)
            seconds = 10.0 if code is not None and 1.0 - code.cosine < 0.93 * (1.0 - bound) else 0.3
            if code is None or restarts is not None or search.seconds() < seconds:
                self.parts.append(search)

    def __iter__(self) -> Iterator[Candidate]:
        for method in self.parts:
            yield from method
