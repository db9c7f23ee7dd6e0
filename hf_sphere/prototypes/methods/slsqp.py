"""Sequential quadratic programming on the exact problem, for few points."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hf_sphere.geometry.checks import check_integer
from hf_sphere.prototypes.methods.base import Candidate, Method, Task, number_of_restarts

MAX_COORDINATES = 400  # maximum number K d of coordinates; the cost of the dense subproblems is cubic in it


class SLSQP(Method):
    """Minimize t subject to <p_i, p_j> <= t for all pairs and |p_i|^2 = 1 for all points.

    Converges to machine precision, unlike the smoothed searches; the time grows with the cube of K d.

    Args:
        restarts: Number of random starts; None chooses as many as take about half a second, at least one.
        max_iterations: Maximum number of iterations per start.

    Raises:
        ValueError: If K d exceeds `MAX_COORDINATES`.

    Reference:
        Kraft, "A software package for sequential quadratic programming", DFVLR-FB 88-28, 1988 (as in scipy).
    """

    name = "slsqp"
    uses_class_vectors = False

    def __init__(self, task: Task, *, restarts: int | None = None, max_iterations: int = 200) -> None:
        super().__init__(task)
        if task.num_classes * task.dim > MAX_COORDINATES:
            size = f"{task.num_classes} points in {task.dim} dimensions have {task.num_classes * task.dim}"
            raise ValueError(f"'slsqp' supports at most {MAX_COORDINATES} coordinates; {size}. Use method 'lbfgs'.")
        self.max_iterations = check_integer("max_iterations", max_iterations, 1)
        # A start takes about 1.5e-7 (K d)^3 seconds. The time is not measured, so results depend only on the seed.
        self.restarts = number_of_restarts(restarts, 0.5 / (1.5e-7 * (task.num_classes * task.dim) ** 3))

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

        def slack_jacobian(x: np.ndarray) -> np.ndarray:
            p = x[:-1].reshape(count, dim)
            jacobian = np.zeros((len(left), count, dim))
            jacobian[pairs, left] = -p[right]
            jacobian[pairs, right] = -p[left]
            return np.column_stack([jacobian.reshape(len(left), -1), np.ones(len(left))])

        def excess(x: np.ndarray) -> np.ndarray:
            p = x[:-1].reshape(count, dim)
            return np.einsum("id,id->i", p, p) - 1

        def excess_jacobian(x: np.ndarray) -> np.ndarray:
            jacobian = np.zeros((count, count, dim))
            jacobian[rows, rows] = 2 * x[:-1].reshape(count, dim)
            return np.column_stack([jacobian.reshape(count, -1), np.zeros(count)])

        gradient = np.append(np.zeros(points.size), 1.0)
        start = np.append(points.ravel(), (points @ points.T)[left, right].max())
        constraints: Any = [
            {"type": "ineq", "fun": slack, "jac": slack_jacobian},
            {"type": "eq", "fun": excess, "jac": excess_jacobian},
        ]

        def record(x: np.ndarray) -> None:
            self.task.latest = Candidate(torch.from_numpy(x[:-1].reshape(count, dim).copy()), "search by SLSQP")

        result = minimize(
            lambda x: x[-1],
            start,
            jac=lambda x: gradient,
            method="SLSQP",
            constraints=constraints,
            options={"maxiter": self.max_iterations, "ftol": 1e-14},
            callback=record,
        )
        self.task.latest = None
        return F.normalize(torch.from_numpy(result.x[:-1].reshape(count, dim)), dim=1)
