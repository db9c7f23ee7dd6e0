"""Privileged information: prototypes that keep the order of similarities between given class vectors."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.prototypes.checks import check_integer, check_positive

TRIPLETS_IN_MEMORY = 100_000
"""Triplets a search looks at at once: all where there are fewer, else a sample."""
FEW_CLASSES = 4096
"""Up to so many classes all cosines at once are less work than those of pairs or triplets one by one."""


class Ordering:
    """The ranking loss on triplets of classes (i, j, k), j among the nearest of i and k among the rest.

    Args:
        class_vectors: (K, any length), a vector a class, for instance word embeddings of the class names.
        weight: Weight of the ranking loss beside the separation.
        num_neighbors: Nearest classes of each class that count as near, 1 to K - 2; a tenth of the classes if None.

    Raises:
        ValueError: If the vectors are no (K, length) matrix of finite, non-zero, mutually different directions.

    Reference:
        Mettes, van der Pol and Snoek, "Hyperspherical prototype networks", NeurIPS 2019, section 2.1; the loss on one
        triplet is that of RankNet (Burges et al., 2005), log(1 + exp(cos(p_i, p_k) - cos(p_i, p_j))).
    """

    def __init__(self, class_vectors: Tensor, *, weight: float = 1.0, num_neighbors: int | None = None) -> None:
        self.directions = check_class_vectors(class_vectors)
        num_classes = len(self.directions)
        if num_classes < 3:
            raise ValueError("class vectors order nothing with fewer than 3 classes; leave class_vectors out.")
        check_positive("ordering_weight", weight)
        if num_neighbors is None:
            num_neighbors = min(max(1, round(num_classes / 10)), num_classes - 2)
        num_neighbors = check_integer("num_neighbors", num_neighbors, 1)
        if num_neighbors > num_classes - 2:
            raise ValueError(
                f"num_neighbors must be at most {num_classes - 2} for {num_classes} classes; got {num_neighbors}."
            )
        self.weight = weight
        self.num_neighbors = num_neighbors
        self._neighbors = self._nearest(num_neighbors)
        # The classes that are no negatives of class i, in order, each less the number of those before it and plus i K:
        # one rising sequence for all classes, in which a search tells how many of them a negative has to step over.
        excluded = torch.cat([self._neighbors, torch.arange(num_classes)[:, None]], dim=1).sort(dim=1).values
        excluded += torch.arange(num_classes)[:, None] * num_classes - torch.arange(num_neighbors + 1)
        self._excluded = excluded.view(-1)

    def triplets(self, generator: torch.Generator) -> Tensor:
        """Draw triplets (T, 3), or list all of them where there are at most `TRIPLETS_IN_MEMORY`."""
        num_classes, near = self._neighbors.shape
        far = num_classes - 1 - near
        total = num_classes * near * far
        if total <= TRIPLETS_IN_MEMORY:
            number = torch.arange(total)
        else:
            number = torch.randint(total, (TRIPLETS_IN_MEMORY,), generator=generator)
        anchor, rest = number // (near * far), number % (near * far)
        positive, negative = self._neighbors[anchor, rest // far], rest % far
        # The negative is counted among the classes that are neither the anchor nor its neighbours: step over those.
        steps = torch.searchsorted(self._excluded, anchor * num_classes + negative, right=True)
        negative += steps - anchor * (near + 1)
        return torch.stack([anchor, positive, negative], dim=1)

    def _nearest(self, count: int) -> Tensor:
        nearest = []
        for start in range(0, len(self.directions), 1024):
            cosines = self.directions[start : start + 1024] @ self.directions.T
            cosines[:, start : start + 1024].fill_diagonal_(-torch.inf)
            nearest.append(cosines.topk(count, dim=1).indices)
        return torch.cat(nearest)


def ranking_loss(points: Tensor, triplets: Tensor) -> tuple[float, Tensor]:
    """Mean RankNet loss of triplets (T, 3) at unit vectors (K, d), and its gradient (K, d)."""
    anchor, near, far = triplets.unbind(1)
    count = len(points)
    if count <= FEW_CLASSES:
        cosines = (points @ points.T).view(-1)
        pairs = torch.stack([anchor * count + near, anchor * count + far])
        margin = cosines[pairs[0]] - cosines[pairs[1]]
        pull = torch.sigmoid(-margin) / -len(triplets)
        slope = torch.zeros_like(cosines).index_add_(0, pairs.view(-1), torch.cat([pull, -pull])).view(count, count)
        gradient = (slope + slope.T) @ points
    else:
        apart = points[near] - points[far]
        margin = (points[anchor] * apart).sum(dim=1)
        pull = (torch.sigmoid(-margin) / -len(triplets))[:, None]
        toward = pull * points[anchor]
        gradient = torch.zeros_like(points).index_add_(0, anchor, pull * apart)
        gradient.index_add_(0, near, toward).index_add_(0, far, toward, alpha=-1)
    return F.softplus(-margin).mean().item(), gradient


@dataclass(frozen=True)
class OrderPreservation:
    """How well prototypes keep the order of the class vectors' similarities.

    Attributes:
        triplet_accuracy: Share of triplets of different classes (i, j, k) whose nearer one of j and k is the same for
            prototypes and class vectors; a tie of either counts one half, so that chance is 0.5.
        rank_correlation: Spearman's correlation of the cosines over all pairs of classes.
    """

    triplet_accuracy: float
    rank_correlation: float


def measure_order(prototypes: Tensor, class_vectors: Tensor, *, seed: int = 0) -> OrderPreservation:
    """Compare the similarities of prototypes (K, d) with those of class vectors (K, any length), K >= 3.

    Args:
        prototypes: One point a class.
        class_vectors: One vector a class.
        seed: Seed of the sample, where there are more than a million triplets or pairs.
    """
    from scipy.stats import spearmanr

    points = F.normalize(prototypes.double().cpu(), dim=1)
    vectors = check_class_vectors(class_vectors, len(points))
    count = len(points)
    if count < 3:
        raise ValueError(f"an order needs at least 3 classes; got {count}.")
    generator = torch.Generator().manual_seed(seed)
    anchor, second, third = _different(count, 3, generator).unbind(1)

    def nearer(unit: Tensor) -> Tensor:
        return _tied_sign(_cosines(unit, anchor, second) - _cosines(unit, anchor, third))

    agreement = 0.5 + 0.5 * nearer(points) * nearer(vectors)
    left, right = _different(count, 2, generator).unbind(1)
    ours, theirs = _cosines(points, left, right), _cosines(vectors, left, right)
    # Equal cosines differ by rounding, and a rank would make an order of that.
    ours, theirs = (ours * 1e9).round(), (theirs * 1e9).round()
    same = bool((ours == ours[0]).all() or (theirs == theirs[0]).all())
    correlation = 0.0 if same else float(spearmanr(ours.numpy(), theirs.numpy()).statistic)
    return OrderPreservation(agreement.mean().item(), correlation)


def assign_to_classes(points: Tensor, class_vectors: Tensor, *, generator: torch.Generator) -> Tensor:
    """Choose which point belongs to which class so that similar classes get near points; the separation stays.

    A quadratic assignment between the cosines of the points and the ranks of the class vectors' cosines, solved
    approximately (Vogelstein et al., "Fast approximate quadratic programming for graph matching", PLOS ONE 2015).

    Args:
        points: (K, d), unit vectors.
        class_vectors: (K, any length).
        generator: Seeds the search.

    Returns:
        The points in the order of the classes, (K, d).

    Raises:
        ValueError: If there are more than `FEW_CLASSES` points, or the vectors do not fit.
    """
    from scipy.optimize import quadratic_assignment

    if len(points) > FEW_CLASSES:
        raise ValueError(
            f"ordering 'assignment' is for up to {FEW_CLASSES} classes, for its time grows with their cube; got "
            f"{len(points)}. Use ordering 'ranking'."
        )
    vectors = check_class_vectors(class_vectors, len(points))
    count = len(points)
    cosines = (points @ points.T).numpy()
    similarity = vectors @ vectors.T
    ranks = similarity.flatten().argsort().argsort().double().reshape(count, count) / count**2
    ranks = ((ranks + ranks.T) / 2).fill_diagonal_(0)
    random = np.random.default_rng(int(torch.randint(2**31, (1,), generator=generator)))
    best: Any = None
    for _ in range(10 if count <= 200 else 1):  # the result depends on where it starts
        options = {"maximize": True, "rng": random, "P0": "randomized"}
        found = quadratic_assignment(ranks.numpy(), cosines, method="faq", options=options)
        best = found if best is None or found.fun > best.fun else best
    return points[torch.as_tensor(best.col_ind)]


def check_class_vectors(class_vectors: Tensor, num_classes: int | None = None) -> Tensor:
    """Return class vectors as unit vectors (K, length) in float64, or say what is wrong with them."""
    try:
        vectors = torch.as_tensor(class_vectors).detach().double().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"class_vectors must be a (num_classes, length) tensor; got {type(class_vectors)}.") from error
    wanted = "(num_classes, length)" if num_classes is None else f"({num_classes}, length)"
    if vectors.ndim != 2 or (num_classes is not None and len(vectors) != num_classes) or vectors.shape[-1] < 1:
        raise ValueError(f"class_vectors must have the shape {wanted}, one row a class; got {tuple(vectors.shape)}.")
    finite = vectors.isfinite().all(dim=1)
    if not finite.all():
        raise ValueError(f"class_vectors must be finite; row {_list(~finite)} is not.")
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    if not norms.all():
        raise ValueError(
            f"class_vectors must not be zero; row {_list(norms[:, 0] == 0)} is. Give every class a vector of its own."
        )
    directions = vectors / norms
    # Rounded, so that copies are found by sorting rather than by comparing all with all.
    kinds, counts = torch.unique(directions.mul(1e9).round(), dim=0, return_inverse=True, return_counts=True)[1:]
    if (counts > 1).any():
        twins = (kinds == counts.gt(1).nonzero()[0]).nonzero()[:, 0]
        raise ValueError(
            f"rows {', '.join(map(str, twins[:5].tolist()))} of class_vectors point in the same direction, so they say "
            "nothing about these classes; give every class a vector of its own."
        )
    return directions


def _list(mask: Tensor) -> str:
    rows = mask.nonzero()[:, 0].tolist()
    return ", ".join(map(str, rows[:5])) + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")


def _different(count: int, size: int, generator: torch.Generator, most: int = 1_000_000) -> Tensor:
    """Tuples of different classes (N, size): all ordered ones, or a sample where there are more than `most`."""
    if count**size <= most:
        index = torch.cartesian_prod(*[torch.arange(count)] * size)
    else:
        index = torch.randint(count, (most, size), generator=generator)
    ordered = index.sort(dim=1).values
    return index[(ordered[:, 1:] != ordered[:, :-1]).all(dim=1)]


def _cosines(unit: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Cosines of pairs of unit vectors, (K, d) and twice (N,) -> (N,)."""
    if len(unit) <= FEW_CLASSES:
        return (unit @ unit.T)[left, right]
    chunks = zip(left.split(10_000), right.split(10_000), strict=True)
    return torch.cat([(unit[i] * unit[j]).sum(1) for i, j in chunks])


def _tied_sign(values: Tensor) -> Tensor:
    return torch.where(values.abs() < 1e-9, 0.0, values.sign())
