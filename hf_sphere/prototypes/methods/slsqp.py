"""Sequential quadratic programming on the exact problem, for few points."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hf_sphere.prototypes.checks import check_integer
from hf_sphere.prototypes.methods.base import Candidate, Method, Task

MOST_NUMBERS = 400
"""Coordinates K d at most: the dense subproblems cost their cube."""


class SLSQP(Method):
    """Minimise t subject to <p_i, p_j> <= t for all pairs and one constraint |p_i|^2 = 1 a point.

    Exact to rounding, where the smoothed searches stop short; the time grows with the cube of K d.

    Args:
        task: What is to be placed.
        restarts: Random starts; None spends about half a second of one CPU core, and at least one start.
        max_iterations: Iterations of each.

    Raises:
        ValueError: If K d is larger than `MOST_NUMBERS`.

    Reference:
        Kraft, "A software package for sequential quadratic programming", DFVLR-FB 88-28, 1988 (as in scipy).
    """

    name = "slsqp"
    knows_ordering = False

    def __init__(self, task: Task, *, restarts: int | None = None, max_iterations: int = 200) -> None:
        super().__init__(task)
        if task.num_classes * task.dim > MOST_NUMBERS:
            raise ValueError(
                f"method 'slsqp' takes at most {MOST_NUMBERS} coordinates; {task.num_classes} points in {task.dim} "
                f"dimensions have {task.num_classes * task.dim}. Use method 'lbfgs'."
            )
        self.max_iterations = check_integer("max_iterations", max_iterations, 1)
        enough = min(max(1, int(0.5 / self.seconds())), 20)
        self.restarts = enough if restarts is None else check_integer("restarts", restarts, 1)

    def seconds(self) -> float:
        """Rough time of one start on one core; a formula and no clock, so that the same seed does the same."""
        return 1.5e-7 * (self.task.num_classes * self.task.dim) ** 3

    def __len__(self) -> int:
        return 2 * self.restarts

    def __iter__(self) -> Iterator[Candidate]:
        for _ in range(self.restarts):
            points = self.task.random_points()
            yield Candidate(points, "random start")
            yield Candidate(self._solve(points.cpu().numpy()).to(self.task.device), "search by SLSQP")

    def _solve(self, points: np.ndarray) -> torch.Tensor:
        from scipy.optimize import minimize

        count, dim = points.shape
        left, right = np.triu_indices(count, 1)
        pairs, rows = np.arange(len(left)), np.arange(count)

        def slack(x: np.ndarray) -> np.ndarray:
            p = x[:-1].reshape(count, dim)
            return x[-1] - np.einsum("id,id->i", p[left], p[right])

        def slack_slope(x: np.ndarray) -> np.ndarray:
            p = x[:-1].reshape(count, dim)
            slope = np.zeros((len(left), count, dim))
            slope[pairs, left] = -p[right]
            slope[pairs, right] = -p[left]
            return np.column_stack([slope.reshape(len(left), -1), np.ones(len(left))])

        def excess(x: np.ndarray) -> np.ndarray:
            p = x[:-1].reshape(count, dim)
            return np.einsum("id,id->i", p, p) - 1

        def excess_slope(x: np.ndarray) -> np.ndarray:
            slope = np.zeros((count, count, dim))
            slope[rows, rows] = 2 * x[:-1].reshape(count, dim)
            return np.column_stack([slope.reshape(count, -1), np.zeros(count)])

        largest = np.append(np.zeros(points.size), 1.0)
        cosines = points @ points.T
        start = np.append(points.ravel(), cosines[left, right].max())
        constraints: Any = [
            {"type": "ineq", "fun": slack, "jac": slack_slope},
            {"type": "eq", "fun": excess, "jac": excess_slope},
        ]

        def follow(x: np.ndarray) -> None:
            self.task.latest = Candidate(torch.from_numpy(x[:-1].reshape(count, dim).copy()), "search by SLSQP")

        result = minimize(
            lambda x: x[-1],
            start,
            jac=lambda x: largest,
            method="SLSQP",
            constraints=constraints,
            options={"maxiter": self.max_iterations, "ftol": 1e-14},
            callback=follow,
        )
        self.task.latest = None
        return F.normalize(torch.from_numpy(result.x[:-1].reshape(count, dim)), dim=1)
