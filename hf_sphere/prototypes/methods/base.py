"""What every placement method has in common: a task in, a stream of candidates out."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.codes import separation
from hf_sphere.prototypes.ordering import Ordering, assign_to_classes, ranking_loss

Objective = Callable[[Tensor], tuple[float, Tensor]]
"""From unit vectors (K, d) to a value and its gradient (K, d) in the surrounding space."""


@dataclass
class Task:
    """What is to be placed.

    Attributes:
        num_classes: Number of points K.
        dim: Dimension d of the space they lie in.
        ordering: What is known of the classes, if anything.
        seed: Seed of all random numbers.
        device: Where the search computes.
        generator: Random numbers on the CPU, from `seed`.
        latest: Where a search is between two candidates, for those who stop it there.
    """

    num_classes: int
    dim: int
    ordering: Ordering | None = None
    seed: int = 0
    device: torch.device | str = "cpu"
    generator: torch.Generator = field(init=False)
    latest: "Candidate | None" = field(default=None, init=False)

    def __post_init__(self) -> None:
        try:
            torch.zeros(1, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(
                f"there is no device {self.device} here to search on; leave it out for the CPU."
            ) from error
        self.generator = torch.Generator().manual_seed(self.seed)

    def random_points(self) -> Tensor:
        """Draw points uniformly on the sphere: (K, d), float64."""
        points = torch.randn(self.num_classes, self.dim, dtype=torch.float64, generator=self.generator)
        points = F.normalize(points, dim=1)
        if self.ordering is not None and self.num_classes <= 200:
            # A start in which similar classes are near already; for more classes that takes as long as the search.
            points = assign_to_classes(points, self.ordering.directions, generator=self.generator)
        return points.to(self.device)

    def score(self, points: Tensor) -> float:
        """What makes one candidate better than another: its largest cosine plus the weighted ranking loss."""
        value = separation(points).item()
        if self.ordering is not None:
            triplets = self.ordering.triplets(torch.Generator().manual_seed(self.seed)).to(points.device)
            value += self.ordering.weight * ranking_loss(points, triplets)[0]
        return value

    def with_ordering(self, objective: Objective) -> Objective:
        """Add the ranking loss, on triplets drawn now, to an objective; without class vectors nothing changes."""
        if self.ordering is None:
            return objective
        triplets = self.ordering.triplets(self.generator).to(self.device)
        weight = self.ordering.weight

        def both(points: Tensor) -> tuple[float, Tensor]:
            value, gradient = objective(points)
            loss, slope = ranking_loss(points, triplets)
            return value + weight * loss, gradient.add_(slope, alpha=weight)

        return both


class Candidate(NamedTuple):
    """A placement that a method has reached: points (K, d) in float64, and where they come from."""

    points: Tensor
    origin: str


class Method:
    """A way to place points. Iterating over it yields ever further candidates; the caller keeps the best.

    A subclass in a file of this folder that sets `name` is found by that name. Its options are the keyword-only
    arguments of its constructor.

    Args:
        task: What is to be placed.
    """

    name: ClassVar[str] = ""
    knows_ordering: ClassVar[bool] = True
    """Whether the method takes class vectors into account while it searches."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __len__(self) -> int:
        """How many candidates will come at most."""
        raise NotImplementedError(f"{type(self).__name__} must define `__len__`.")

    def __iter__(self) -> Iterator[Candidate]:
        raise NotImplementedError(f"{type(self).__name__} must define `__iter__`.")

    @classmethod
    def options(cls) -> list[str]:
        """Names of the options the method takes."""
        parameters = inspect.signature(cls.__init__).parameters.values()
        return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def minimize_on_sphere(objective: Objective, points: Tensor, task: Task, *, max_iterations: int) -> Tensor:
    """Minimise by L-BFGS over points of unit norm, parametrised as x / |x|.

    Args:
        objective: Value and gradient at unit vectors (K, d).
        points: Where to start, (K, d).
        task: Whose `latest` follows the iterations.
        max_iterations: Iterations at most.

    Returns:
        Unit vectors (K, d), on the device of `points`.
    """
    from scipy.optimize import minimize

    shape, device = points.shape, points.device

    def value_and_gradient(flat: Any) -> tuple[float, Any]:
        x = torch.from_numpy(flat).view(shape).to(device)
        norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        unit = x / norms
        value, gradient = objective(unit)
        gradient.addcmul_((gradient * unit).sum(1, keepdim=True), unit, value=-1).div_(norms)
        return value, gradient.cpu().numpy().ravel()

    options: dict[str, Any] = {"maxiter": max_iterations, "maxfun": 4 * max_iterations, "ftol": 0.0, "gtol": 1e-12}
    # Twenty pairs of vectors of history, fewer where they would outgrow the points' own cosines.
    options["maxcor"] = 20 if points.numel() < 10**6 else 6
    start = points.cpu().numpy().ravel()

    def follow(flat: Any) -> None:
        task.latest = Candidate(torch.from_numpy(flat.copy()).view(shape), "search by L-BFGS")

    result = minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options, callback=follow)
    task.latest = None
    return F.normalize(torch.from_numpy(result.x).view(shape), dim=1).to(device)
