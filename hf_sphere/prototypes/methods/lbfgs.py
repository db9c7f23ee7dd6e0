"""Annealed search by L-BFGS: the best general method for the sizes that class prototypes have."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from hf_sphere.geometry.codes import separation_bound
from hf_sphere.prototypes.checks import check_integer
from hf_sphere.prototypes.methods.base import Candidate, Method, Task, minimize_on_sphere
from hf_sphere.prototypes.objectives import soft_separation

# Inverse temperatures in units of 1 / (1 - largest possible separation). The places are decided where the points begin
# to repel only their neighbours, so most stages are spent there; the last ones only sharpen what has been decided.
SHARPNESS = np.concatenate([np.geomspace(5.5, 270, 10), np.geomspace(700, 7e5, 5)])


class LBFGS(Method):
    """L-BFGS on the log-sum-exp of the cosines, ever sharper, from several random starts, in float64.

    The time of an iteration grows with K^2 d: a start of 100 points takes a third of a second, of 1,000 points in 64
    dimensions some forty. For the last thousandths give more of both: `restarts=80, max_iterations=100`.

    Args:
        task: What is to be placed.
        restarts: Random starts; None spends about half a second of one CPU core, and at least one start.
        max_iterations: Iterations at each of the fifteen sharpnesses.
    """

    name = "lbfgs"

    def __init__(self, task: Task, *, restarts: int | None = None, max_iterations: int = 60) -> None:
        super().__init__(task)
        self.max_iterations = check_integer("max_iterations", max_iterations, 1)
        enough = min(max(1, int(0.6 / self.seconds())), 20)
        self.restarts = enough if restarts is None else check_integer("restarts", restarts, 1)

    def seconds(self) -> float:
        """Rough time of one start on one core; a formula and no clock, so that the same seed does the same."""
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
                objective = task.with_ordering(partial(soft_separation, sharpness=sharpness))
                points = minimize_on_sphere(objective, points, task, max_iterations=self.max_iterations)
                yield Candidate(points, "search by L-BFGS")
