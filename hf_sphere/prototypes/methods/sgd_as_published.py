"""Gradient descent as in the published program of the hyperspherical-prototype paper."""

from hf_sphere.prototypes.methods.base import Task
from hf_sphere.prototypes.methods.sgd import SGD


class SGDAsPublished(SGD):
    """The published program of the paper, which creates a new optimizer at each step, so momentum has no effect.

    Args:
        learning_rate: Learning rate.
        max_iterations: Number of steps.
    """

    name = "sgd_as_published"

    def __init__(self, task: Task, *, learning_rate: float = 0.1, max_iterations: int = 10_000) -> None:
        super().__init__(task, learning_rate=learning_rate, momentum=0.0, max_iterations=max_iterations)
