"""Gradient descent on the mean nearest cosine, the method of the hyperspherical-prototype paper."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from hf_sphere.geometry.checks import check_integer, check_positive
from hf_sphere.prototypes.methods.base import Candidate, Method, Task
from hf_sphere.prototypes.ordering import mean_nearest_cosine


class SGD(Method):
    """Projected gradient descent with momentum on the mean cosine of the points to their nearest neighbors.

    Args:
        learning_rate: Learning rate.
        momentum: Momentum factor, in [0, 1).
        max_iterations: Number of steps.

    Reference:
        Mettes, van der Pol and Snoek, "Hyperspherical prototype networks", NeurIPS 2019, equation 2 and section 4.
    """

    name = "sgd"

    def __init__(
        self, task: Task, *, learning_rate: float = 0.1, momentum: float = 0.9, max_iterations: int = 10_000
    ) -> None:
        super().__init__(task)
        check_positive("learning_rate", learning_rate)
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must lie in [0, 1); got {momentum}.")
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.max_iterations = check_integer("max_iterations", max_iterations, 1)
        self.steps_per_candidate = max(1, self.max_iterations // 200)

    def __len__(self) -> int:
        return 1 + -(-self.max_iterations // self.steps_per_candidate)

    def __iter__(self) -> Iterator[Candidate]:
        points = self.task.random_points()
        yield Candidate(points, "random start")
        velocity = torch.zeros_like(points)
        objective = self.task.with_ranking_loss(mean_nearest_cosine)
        for step in range(1, self.max_iterations + 1):
            if step % 100 == 0:  # resample the triplets
                objective = self.task.with_ranking_loss(mean_nearest_cosine)
            velocity.mul_(self.momentum).add_(objective(points)[1])
            points = F.normalize(points - self.learning_rate * velocity, dim=1)
            self.task.latest = Candidate(points, f"{self.name}, {step} steps")
            if step % self.steps_per_candidate == 0 or step == self.max_iterations:
                yield self.task.latest
        self.task.latest = None


class SGDAsPublished(SGD):
    """The published program of the paper, which creates a new optimizer at each step, so momentum has no effect.

    Args:
        learning_rate: Learning rate.
        max_iterations: Number of steps.
    """

    name = "sgd_as_published"

    def __init__(self, task: Task, *, learning_rate: float = 0.1, max_iterations: int = 10_000) -> None:
        super().__init__(task, learning_rate=learning_rate, momentum=0.0, max_iterations=max_iterations)
