"""Interface of the placement methods: the input is a task, the output an iterator of candidates."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.codes import separation
from hf_sphere.prototypes.ordering import TripletRanking, assign_to_classes, ranking_loss
from hf_sphere.utils.checks import check_integer
from hf_sphere.utils.devices import check_float64

Objective = Callable[[Tensor], tuple[float, Tensor]]
"""Function from unit vectors (K, d) to a value and its Euclidean gradient (K, d)."""


@dataclass
class PlacementTask:
    """Placement of K points in d dimensions, with a ranking loss on class vectors, if any."""

    num_classes: int
    dim: int
    ranking: TripletRanking | None = None
    seed: int = 0
    device: torch.device | str = "cpu"
    generator: torch.Generator = field(init=False)  # CPU generator, seeded with `seed`

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def random_points(self) -> Tensor:
        """Draw points uniformly on the sphere: (K, d), float64."""
        check_float64("the search of prototypes", torch.device(self.device), "Use device='cpu'.")
        points = torch.randn(self.num_classes, self.dim, dtype=torch.float64, generator=self.generator)
        points = F.normalize(points, dim=1)
        if self.ranking is not None and self.num_classes <= 200:
            # Start with similar classes close together. For more classes the assignment takes as long as the search.
            points = assign_to_classes(points, self.ranking.directions, self.generator)
        return points.to(self.device)

    def score(self, points: Tensor) -> float:
        """Score of a candidate, lower is better: its largest cosine plus the weighted ranking loss."""
        value = separation(points).item()
        if self.ranking is not None:
            triplets = self.ranking.triplets(torch.Generator().manual_seed(self.seed)).to(points.device)
            value += self.ranking.weight * ranking_loss(points, triplets)[0]
        return value

    def with_ranking_loss(self, objective: Objective) -> Objective:
        """Add the ranking loss on resampled triplets to an objective, if there are class vectors."""
        if self.ranking is None:
            return objective
        triplets = self.ranking.triplets(self.generator).to(self.device)
        weight = self.ranking.weight

        def both(points: Tensor) -> tuple[float, Tensor]:
            value, gradient = objective(points)
            loss, slope = ranking_loss(points, triplets)
            return value + weight * loss, gradient.add_(slope, alpha=weight)

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

    shape, device = points.shape, points.device

    def value_and_gradient(flat: Any) -> tuple[float, Any]:
        x = torch.from_numpy(flat).view(shape).to(device)
        norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        unit = x / norms
        value, gradient = objective(unit)
        gradient.addcmul_((gradient * unit).sum(1, keepdim=True), unit, value=-1).div_(norms)
        return value, gradient.cpu().numpy().ravel()

    options: dict[str, Any] = {"maxiter": max_iterations, "maxfun": 4 * max_iterations, "ftol": 0.0, "gtol": 1e-12}
    # A history of 20 vector pairs; fewer for many points, to limit the memory.
    options["maxcor"] = 20 if points.numel() < 10**6 else 6
    start = points.cpu().numpy().ravel()
    result = minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    return F.normalize(torch.from_numpy(result.x).view(shape), dim=1).to(device)
