"""Searches for placements by L-BFGS, gradient descent and sequential quadratic programming."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hf_sphere.geometry.codes import separation_bound
from hf_sphere.prototypes.methods.placement_task import Candidate, PlacementTask, minimize_on_sphere, number_of_restarts
from hf_sphere.prototypes.ordering import mean_nearest_cosine, soft_separation
from hf_sphere.utils.checks import check_number, check_positive

# Inverse temperatures in units of 1 / (1 - separation bound). The arrangement is decided at the temperatures at which
# only near neighbors repel each other, so most stages are spent there; the last ones only refine it.
SHARPNESS = np.concatenate([np.geomspace(5.5, 270, 10), np.geomspace(700, 7e5, 5)])

MAX_COORDINATES = 400  # maximum number K d of coordinates; the cost of the dense subproblems is cubic in it


def lbfgs(task: PlacementTask, *, restarts: int | None = None, max_iterations: int = 60) -> Iterator[Candidate]:
    """L-BFGS on the log-sum-exp of the cosines at fifteen sharpness values, from several random starts."""
    scale = 1.0 / (1.0 - separation_bound(task.num_classes, task.dim))
    for _ in range(number_of_restarts(restarts, 0.6 / lbfgs_seconds(task, max_iterations))):
        points = task.random_points()
        yield Candidate(points, "random start")
        for sharpness in SHARPNESS * scale:
            objective = task.with_ranking_loss(partial(soft_separation, sharpness=sharpness))
            points = minimize_on_sphere(objective, points, max_iterations=max_iterations)
            yield Candidate(points, "search by L-BFGS")


def lbfgs_seconds(task: PlacementTask, max_iterations: int) -> float:
    """Estimated time of one start on one core; not measured, so that results depend only on the seed."""
    evaluation = 1.2e-4 + task.num_classes**2 * (0.9e-8 + 0.5e-9 * task.dim)
    return evaluation * max_iterations * len(SHARPNESS)


def sgd(
    task: PlacementTask, *, learning_rate: float = 0.1, momentum: float = 0.9, max_iterations: int = 10_000
) -> Iterator[Candidate]:
    """Projected gradient descent on the mean cosine of the points to their nearest neighbors (Mettes et al., 2019)."""
    check_positive("learning_rate", learning_rate)
    check_number("momentum", momentum, "[0, 1)")
    steps_per_candidate = max(1, max_iterations // 200)
    points = task.random_points()
    yield Candidate(points, "random start")
    velocity = torch.zeros_like(points)
    objective = task.with_ranking_loss(mean_nearest_cosine)
    for step in range(1, max_iterations + 1):
        if step % 100 == 0:  # resample the triplets
            objective = task.with_ranking_loss(mean_nearest_cosine)
        velocity.mul_(momentum).add_(objective(points)[1])
        points = F.normalize(points - learning_rate * velocity, dim=1)
        if step % steps_per_candidate == 0 or step == max_iterations:
            yield Candidate(points, f"sgd, {step} steps")


def sgd_as_published(
    task: PlacementTask, *, learning_rate: float = 0.1, max_iterations: int = 10_000
) -> Iterator[Candidate]:
    """The published program of the paper, which creates a new optimizer at each step, so momentum has no effect."""
    for points, origin in sgd(task, learning_rate=learning_rate, momentum=0.0, max_iterations=max_iterations):
        yield Candidate(points, origin.replace("sgd", "sgd_as_published"))


def slsqp(task: PlacementTask, *, restarts: int | None = None, max_iterations: int = 200) -> Iterator[Candidate]:
    """Minimize t subject to <p_i, p_j> <= t for all pairs and |p_i|^2 = 1, to machine precision, by scipy's SLSQP."""
    coordinates = task.num_classes * task.dim
    if coordinates > MAX_COORDINATES:
        raise ValueError(
            f"'slsqp' supports at most {MAX_COORDINATES} coordinates; {task.num_classes} points in {task.dim} "
            f"dimensions have {coordinates}. Use method 'lbfgs'."
        )
    # A start takes about 1.5e-7 (K d)^3 seconds. The time is not measured, so results depend only on the seed.
    for _ in range(number_of_restarts(restarts, 0.5 / (1.5e-7 * coordinates**3))):
        points = task.random_points()
        yield Candidate(points, "random start")
        yield Candidate(solve_slsqp(points.cpu().numpy(), max_iterations).to(task.device), "search by SLSQP")


def solve_slsqp(points: np.ndarray, max_iterations: int) -> torch.Tensor:
    """Run SLSQP from initial points (K, d)."""
    from scipy.optimize import minimize

    count, dim = points.shape
    left, right = np.triu_indices(count, 1)
    own = np.arange(count)

    def products(x: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        p = x[:-1].reshape(count, dim)
        return np.einsum("id,id->i", p[left], p[right])

    def gradients(x: np.ndarray, left: np.ndarray, right: np.ndarray, sign: int, of_t: float) -> np.ndarray:
        p, rows = sign * x[:-1].reshape(count, dim), np.arange(len(left))
        jacobian = np.zeros((len(left), count, dim))
        jacobian[rows, left] += p[right]
        jacobian[rows, right] += p[left]
        return np.column_stack([jacobian.reshape(len(left), -1), np.full(len(left), of_t)])

    start = np.append(points.ravel(), (points @ points.T)[left, right].max())
    is_t = np.append(np.zeros(points.size), 1.0)
    constraints: Any = [
        {
            "type": "ineq",
            "fun": lambda x: x[-1] - products(x, left, right),
            "jac": lambda x: gradients(x, left, right, -1, 1.0),
        },
        {"type": "eq", "fun": lambda x: products(x, own, own) - 1, "jac": lambda x: gradients(x, own, own, 1, 0.0)},
    ]
    options: Any = {"constraints": constraints, "options": {"maxiter": max_iterations, "ftol": 1e-14}}
    result = minimize(lambda x: x[-1], start, jac=lambda x: is_t, method="SLSQP", **options)
    return F.normalize(torch.from_numpy(result.x[:-1].reshape(count, dim)), dim=1)
