"""Placement methods: the default one, the best of closed forms, the catalogue and searches; each is also one.

To add one, write a function like these or those of `searches.py`, and add it to `METHODS`.
"""

from collections.abc import Iterator

from hf_sphere.geometry.codes import cross_polytope, find_code, fit_code, polygon, separation_bound, simplex
from hf_sphere.prototypes.methods.searches import (
    Candidate,
    Method,
    PlacementTask,
    lbfgs,
    lbfgs_seconds,
    sgd,
    sgd_as_published,
    slsqp,
)

__all__ = ["METHODS", "WITHOUT_CLASS_VECTORS", "Candidate", "Method", "PlacementTask"]


def closed_form(task: PlacementTask) -> Iterator[Candidate]:
    """Regular simplex (K <= d + 1), cross-polytope (K <= 2 d) or regular polygon (d = 2), which are proved optimal."""
    count, dim = task.num_classes, task.dim
    if count > 2 * dim > 4:
        raise ValueError(
            f"there is no closed form for {count} points in {dim} dimensions (only for K <= 2 d or d = 2). "
            "Use method 'auto'."
        )
    if count <= dim + 1:
        yield Candidate(simplex(count, dim), "regular simplex")
    elif count <= 2 * dim:
        yield Candidate(cross_polytope(count, dim), "cross-polytope")
    else:
        yield Candidate(polygon(count), "regular polygon")


def catalogue(task: PlacementTask) -> Iterator[Candidate]:
    """A random subset of the best constructed code with enough points, padded with zeros to the dimension."""
    code = find_code(task.num_classes, task.dim)
    if code is None:
        size = f"at least {task.num_classes} points in at most {task.dim} dimensions"
        raise ValueError(f"the catalogue has no code with {size}. Use method 'auto'.")
    points = fit_code(code, task.num_classes, task.dim, generator=task.generator)
    yield Candidate(points, f"{code.name} ({code.dim}, {code.size})")


MAX_EXACT_COORDINATES = 110  # maximum number K d of coordinates for which SLSQP takes a fraction of a second


def auto(task: PlacementTask, *, restarts: int | None = None, max_iterations: int = 60) -> Iterator[Candidate]:
    """The closed form if there is one, otherwise the best of the catalogue and the searches.

    If the catalogue has a code, L-BFGS runs only if it is likely to find a better placement or is fast. With a ranking
    loss only L-BFGS runs, since the other methods do not use class vectors.
    """
    for method in choose_methods(task, restarts, max_iterations):
        yield from method


def choose_methods(
    task: PlacementTask, restarts: int | None = None, max_iterations: int = 60
) -> list[Iterator[Candidate]]:
    """Return the methods of `auto`, with their options."""
    search = lbfgs(task, restarts=restarts, max_iterations=max_iterations)
    if task.ranking is not None:
        return [search]
    if task.num_classes <= 2 * task.dim or task.dim == 2:
        return [closed_form(task)]
    code = find_code(task.num_classes, task.dim)
    methods = [] if code is None else [catalogue(task)]
    if task.num_classes * task.dim <= MAX_EXACT_COORDINATES:
        methods.append(slsqp(task, restarts=restarts))
    # A search typically reaches 93 % of the bound in 1 - cosine, so it is likely to improve on worse codes.
    bound = separation_bound(task.num_classes, task.dim)
    seconds = 10.0 if code is not None and 1.0 - code.cosine < 0.93 * (1.0 - bound) else 0.3
    if code is None or restarts is not None or lbfgs_seconds(task, max_iterations) < seconds:
        methods.append(search)
    return methods


METHODS: dict[str, Method] = {
    method.__name__: method for method in (auto, catalogue, closed_form, lbfgs, sgd, sgd_as_published, slsqp)
}
"""Placement methods by name."""

WITHOUT_CLASS_VECTORS = {"catalogue", "closed_form", "slsqp"}
"""Names of the methods that do not take class vectors into account during the search."""
