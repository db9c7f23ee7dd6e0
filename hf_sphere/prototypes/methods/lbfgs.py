"""Annealed search by L-BFGS, the best general method for typical numbers of classes."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from hf_sphere.geometry.checks import check_integer
from hf_sphere.geometry.codes import separation_bound
from hf_sphere.prototypes.methods.base import Candidate, Method, Task, minimize_on_sphere, number_of_restarts
from hf_sphere.prototypes.ordering import soft_separation

# Inverse temperatures in units of 1 / (1 - separation bound). The arrangement is decided at the temperatures at which
# only near neighbors repel each other, so most stages are spent there; the last ones only refine it.
SHARPNESS = np.concatenate([np.geomspace(5.5, 270, 10), np.geomspace(700, 7e5, 5)])


class LBFGS(Method):
    """L-BFGS on the log-sum-exp of the cosines at increasing sharpness, from several random starts, in float64.

    The time per iteration grows with K^2 d: a start takes a third of a second for 100 points, and about 40 seconds for
    1,000 points in 64 dimensions. For slightly better results increase both options, for instance `restarts=80,
    max_iterations=100`.

    Args:
        restarts: Number of random starts; None chooses as many as take about half a second, at least one.
        max_iterations: Maximum number of iterations at each of the fifteen sharpness values.
    """

    name = "lbfgs"

    def __init__(self, task: Task, *, restarts: int | None = None, max_iterations: int = 60) -> None:
        super().__init__(task)
        self.max_iterations = check_integer("max_iterations", max_iterations, 1)
        self.restarts = number_of_restarts(restarts, 0.6 / self.seconds())

    def seconds(self) -> float:
        """Estimated time of one start on one core; not measured, so that results depend only on the seed."""
        count, dim = self.task.num_classes, self.task.dim
        evaluation = 1.2e-4 + count**2 * (0.9e-8 + 0.5e-9 * dim)
        return evaluation * self.max_iterations * len(SHARPNESS)

    def __len__(self) -> int:
        return self.restarts * (1 + len(SHARPNESS))

    def __iter__(self) -> Iterator[Candidate]:
        task = self.task
        scale = 1.0 / (1.0 - separation_bound(task.num_classes, task.dim))
        for _ in range(self.restarts):
            points = task.random_points()
            yield Candidate(points, "random start")
            for sharpness in SHARPNESS * scale:
                objective = task.with_ranking_loss(partial(soft_separation, sharpness=sharpness))
                points = minimize_on_sphere(objective, points, task, max_iterations=self.max_iterations)
                yield Candidate(points, "search by L-BFGS")
