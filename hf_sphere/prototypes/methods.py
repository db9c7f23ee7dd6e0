"""Placement methods: closed forms, the catalogue, searches, and the default method, the best of these.

A method is a function of a task that returns an iterator of candidates. To add one, write a function like these, and
add it to `METHODS`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry import codes
from hf_sphere.prototypes import ordering
from hf_sphere.utils.checks import check_integer

# Inverse temperatures in units of 1 / (1 - separation bound). The arrangement is decided at the temperatures at which
# only near neighbors repel each other, so most stages are spent there; the last ones only refine it.
SHARPNESS = np.concatenate([np.geomspace(5.5, 270, 10), np.geomspace(700, 7e5, 5)])

MAX_COORDINATES = 400  # maximum number K d of coordinates of SLSQP, whose dense subproblems have a cubic cost
MAX_EXACT_COORDINATES = 110  # maximum number for which it takes a fraction of a second

Objective = Callable[[Tensor], tuple[float, Tensor]]
"""Function from unit vectors (K, d) to a value and its Euclidean gradient (K, d)."""


@dataclass
class PlacementTask:
    """Placement of K points in d dimensions, with a ranking loss on class vectors, if any."""

    num_classes: int
    dim: int
    ranking: ordering.TripletRanking | None = None
    seed: int = 0
    generator: torch.Generator = field(init=False)  # CPU generator, seeded with `seed`

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def random_points(self) -> Tensor:
        """Draw points uniformly on the sphere: (K, d), float64."""
        points = torch.randn(self.num_classes, self.dim, dtype=torch.float64, generator=self.generator)
        points = F.normalize(points, dim=1)
        if self.ranking is not None and self.num_classes <= 200:
            # Start with similar classes close together. For more classes the assignment takes as long as the search.
            points = ordering.assign_to_classes(points, self.ranking.directions, self.generator)
        return points

    def score(self, points: Tensor) -> float:
        """Score of a candidate, lower is better: its largest cosine plus the ranking loss."""
        value = codes.separation(points).item()
        if self.ranking is not None:
            triplets = self.ranking.triplets(torch.Generator().manual_seed(self.seed))
            value += ordering.ranking_loss(points, triplets)[0]
        return value

    def with_ranking_loss(self, objective: Objective) -> Objective:
        """Add the ranking loss on resampled triplets to an objective, if there are class vectors."""
        if self.ranking is None:
            return objective
        triplets = self.ranking.triplets(self.generator)

        def both(points: Tensor) -> tuple[float, Tensor]:
            value, gradient = objective(points)
            loss, slope = ordering.ranking_loss(points, triplets)
            return value + loss, gradient.add_(slope)

        return both


class Candidate(NamedTuple):
    """A placement found by a method: points (K, d) in float64, and a description of how they were found."""

    points: Tensor
    origin: str


Method = Callable[..., Iterator[Candidate]]
"""Function of a `PlacementTask` and options, its keyword-only arguments; the caller keeps its best candidate."""


def number_of_restarts(restarts: int | None, affordable: float) -> int:
    """Return the requested number of random starts, or by default the affordable number, from 1 to 20."""
    return min(max(1, int(affordable)), 20) if restarts is None else check_integer("restarts", restarts, 1)


def minimize_on_sphere(objective: Objective, points: Tensor, *, max_iterations: int) -> Tensor:
    """Minimize an objective over unit vectors (K, d), parametrized as x / |x|, by L-BFGS from initial points (K, d)."""
    from scipy.optimize import minimize

    def value_and_gradient(flat: Any) -> tuple[float, Any]:
        x = torch.from_numpy(flat).view(points.shape)
        norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        unit = x / norms
        value, gradient = objective(unit)
        gradient.addcmul_((gradient * unit).sum(1, keepdim=True), unit, value=-1).div_(norms)
        return value, gradient.numpy().ravel()

    options: dict[str, Any] = {"maxiter": max_iterations, "maxfun": 4 * max_iterations, "ftol": 0.0, "gtol": 1e-12}
    # A history of 20 vector pairs; fewer for many points, to limit the memory.
    options["maxcor"] = 20 if points.numel() < 10**6 else 6
    result = minimize(value_and_gradient, points.numpy().ravel(), jac=True, method="L-BFGS-B", options=options)
    return F.normalize(torch.from_numpy(result.x).view(points.shape), dim=1)


def lbfgs(task: PlacementTask, *, restarts: int | None = None, max_iterations: int = 60) -> Iterator[Candidate]:
    """L-BFGS on the log-sum-exp of the cosines at fifteen sharpness values, from several random starts."""
    scale = 1.0 / (1.0 - codes.separation_bound(task.num_classes, task.dim))
    for _ in range(number_of_restarts(restarts, 0.6 / lbfgs_seconds(task, max_iterations))):
        points = task.random_points()
        yield Candidate(points, "random start")
        for sharpness in SHARPNESS * scale:
            objective = task.with_ranking_loss(partial(ordering.soft_separation, sharpness=sharpness))
            points = minimize_on_sphere(objective, points, max_iterations=max_iterations)
            yield Candidate(points, "search by L-BFGS")


def lbfgs_seconds(task: PlacementTask, max_iterations: int) -> float:
    """Estimated time of one start on one core; not measured, so that results depend only on the seed."""
    evaluation = 1.2e-4 + task.num_classes**2 * (0.9e-8 + 0.5e-9 * task.dim)
    return evaluation * max_iterations * len(SHARPNESS)


def sgd(task: PlacementTask, *, max_iterations: int = 10_000) -> Iterator[Candidate]:
    """Projected gradient descent on the mean cosine of the points to their nearest neighbors (Mettes et al., 2019)."""
    return _descend(task, max_iterations, "sgd", momentum=0.9)


def sgd_as_published(task: PlacementTask, *, max_iterations: int = 10_000) -> Iterator[Candidate]:
    """The published program of the paper, which creates a new optimizer at each step, so momentum has no effect."""
    return _descend(task, max_iterations, "sgd_as_published", momentum=0.0)


def _descend(task: PlacementTask, max_iterations: int, name: str, momentum: float) -> Iterator[Candidate]:
    steps_per_candidate = max(1, max_iterations // 200)
    points = task.random_points()
    yield Candidate(points, "random start")
    velocity = torch.zeros_like(points)
    objective = task.with_ranking_loss(ordering.mean_nearest_cosine)
    for step in range(1, max_iterations + 1):
        if step % 100 == 0:  # resample the triplets
            objective = task.with_ranking_loss(ordering.mean_nearest_cosine)
        velocity.mul_(momentum).add_(objective(points)[1])
        points = F.normalize(points - 0.1 * velocity, dim=1)
        if step % steps_per_candidate == 0 or step == max_iterations:
            yield Candidate(points, f"{name}, {step} steps")


def slsqp(task: PlacementTask, *, restarts: int | None = None, max_iterations: int = 200) -> Iterator[Candidate]:
    """Minimize t subject to <p_i, p_j> <= t for all pairs and |p_i|^2 = 1, to machine precision, by scipy's SLSQP."""
    from scipy.optimize import minimize

    coordinates = task.num_classes * task.dim
    if coordinates > MAX_COORDINATES:
        raise ValueError(
            f"'slsqp' supports at most {MAX_COORDINATES} coordinates; {task.num_classes} points in {task.dim} "
            f"dimensions have {coordinates}. Use method 'lbfgs'."
        )
    # A start takes about 1.5e-7 (K d)^3 seconds. The time is not measured, so results depend only on the seed.
    restarts = number_of_restarts(restarts, 0.5 / (1.5e-7 * coordinates**3))
    count, dim = task.num_classes, task.dim
    pairs, own = np.triu_indices(count, 1), (np.arange(count),) * 2

    def products(x: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        p = x[:-1].reshape(count, dim)
        return np.einsum("id,id->i", p[left], p[right])

    def gradients(x: np.ndarray, left: np.ndarray, right: np.ndarray, sign: int, of_t: float) -> np.ndarray:
        p, rows = sign * x[:-1].reshape(count, dim), np.arange(len(left))
        jacobian = np.zeros((len(left), count, dim))
        jacobian[rows, left] += p[right]
        jacobian[rows, right] += p[left]
        return np.column_stack([jacobian.reshape(len(left), -1), np.full(len(left), of_t)])

    is_t = np.append(np.zeros(coordinates), 1.0)
    constraints: Any = [
        {"type": "ineq", "fun": lambda x: x[-1] - products(x, *pairs), "jac": lambda x: gradients(x, *pairs, -1, 1.0)},
        {"type": "eq", "fun": lambda x: products(x, *own) - 1, "jac": lambda x: gradients(x, *own, 1, 0.0)},
    ]
    options: Any = {"constraints": constraints, "options": {"maxiter": max_iterations, "ftol": 1e-14}}
    for _ in range(restarts):
        points = task.random_points()
        yield Candidate(points, "random start")
        first = points.numpy()
        start = np.append(first.ravel(), (first @ first.T)[pairs].max())
        result = minimize(lambda x: x[-1], start, jac=lambda x: is_t, method="SLSQP", **options)
        found = torch.from_numpy(result.x[:-1].reshape(count, dim))
        yield Candidate(F.normalize(found, dim=1), "search by SLSQP")


def closed_form(task: PlacementTask) -> Iterator[Candidate]:
    """Regular simplex (K <= d + 1), cross-polytope (K <= 2 d) or regular polygon (d = 2), which are proved optimal."""
    count, dim = task.num_classes, task.dim
    if count > 2 * dim > 4:
        raise ValueError(
            f"there is no closed form for {count} points in {dim} dimensions (only for K <= 2 d or d = 2). "
            "Use method 'auto'."
        )
    if count <= dim + 1:
        yield Candidate(codes.simplex(count, dim), "regular simplex")
    elif count <= 2 * dim:
        yield Candidate(codes.cross_polytope(count, dim), "cross-polytope")
    else:
        yield Candidate(codes.polygon(count), "regular polygon")


def catalogue(task: PlacementTask) -> Iterator[Candidate]:
    """A random subset of the best constructed code with enough points, padded with zeros to the dimension."""
    code = codes.find_code(task.num_classes, task.dim)
    if code is None:
        size = f"at least {task.num_classes} points in at most {task.dim} dimensions"
        raise ValueError(f"the catalogue has no code with {size}. Use method 'auto'.")
    points = codes.fit_code(code, task.num_classes, task.dim, generator=task.generator)
    yield Candidate(points, f"{code.name} ({code.dim}, {code.size})")


def auto(task: PlacementTask, *, restarts: int | None = None, max_iterations: int = 60) -> Iterator[Candidate]:
    """The closed form if there is one, otherwise the best of the catalogue and the searches.

    If the catalogue has a code, L-BFGS runs only if it is likely to find a better placement or is fast. With a ranking
    loss only L-BFGS runs, since the other methods do not use class vectors.
    """
    code = None
    if task.ranking is None:
        if task.num_classes <= 2 * task.dim or task.dim == 2:
            yield from closed_form(task)
            return
        code = codes.find_code(task.num_classes, task.dim)
        if code is not None:
            yield from catalogue(task)
        if task.num_classes * task.dim <= MAX_EXACT_COORDINATES:
            yield from slsqp(task, restarts=restarts)
    # A search typically reaches 93 % of the bound in 1 - cosine, so it is likely to improve on worse codes.
    bound = codes.separation_bound(task.num_classes, task.dim)
    seconds = 10.0 if code is not None and 1.0 - code.cosine < 0.93 * (1.0 - bound) else 0.3
    if code is None or restarts is not None or lbfgs_seconds(task, max_iterations) < seconds:
        yield from lbfgs(task, restarts=restarts, max_iterations=max_iterations)


METHODS: dict[str, Method] = {
    method.__name__: method for method in (auto, catalogue, closed_form, lbfgs, sgd, sgd_as_published, slsqp)
}
"""Placement methods by name."""

WITHOUT_CLASS_VECTORS = {"catalogue", "closed_form", "slsqp"}
"""Names of the methods that do not take class vectors into account during the search."""
