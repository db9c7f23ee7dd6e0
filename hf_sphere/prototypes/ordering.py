"""Objectives of the placement searches, among them one that preserves the similarity order of class vectors."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.codes.bounds import cosine_blocks, nearest_others
from hf_sphere.geometry.manifold import check_directions
from hf_sphere.utils.checks import check_seed

BLOCK_ENTRIES = 2**24  # maximum number of cosines in memory at a time; 128 MiB in float64

MAX_TRIPLETS = 100_000  # maximum number of triplets in the ranking loss; more are sampled


def soft_separation(points: Tensor, sharpness: float) -> tuple[float, Tensor]:
    """`(1/b) log sum_{i != j} exp(b <p_i, p_j>)` of unit vectors (K, d), a smooth largest cosine, and its gradient."""
    gradient = torch.empty_like(points)
    largest, sums, parts = [], [], []
    for start, cosines in cosine_blocks(points, BLOCK_ENTRIES):
        top = cosines.amax()
        weights = cosines.sub_(top).mul_(sharpness).exp_()
        parts.append(torch.mm(weights, points, out=gradient[start : start + len(weights)]))
        largest.append(top)
        sums.append(weights.sum())
    # Rescale the blocks from their own largest cosine to the overall largest one.
    all_largest = torch.stack(largest)
    top = all_largest.amax()
    factors = (all_largest - top).mul_(sharpness).exp_()
    total = (torch.stack(sums) * factors).sum()
    for part, factor in zip(parts, 2 * factors / total, strict=True):
        part.mul_(factor)
    return (top + total.log() / sharpness).item(), gradient


def mean_nearest_cosine(points: Tensor) -> tuple[float, Tensor]:
    """Mean cosine of unit vectors (K, d) to their nearest neighbors, the loss of Mettes et al., and a subgradient."""
    cosines, index = nearest_others(points)
    gradient = points[index].index_add_(0, index, points)
    return cosines.mean().item(), gradient.div_(len(points))


class TripletRanking:
    """Triplets of classes (i, j, k) for the ranking loss: j is in the nearest tenth of the classes to i, and k not.

    The loss per triplet is that of RankNet, log(1 + exp(cos(p_i, p_k) - cos(p_i, p_j))) (Mettes et al., section 2.1).
    """

    def __init__(self, directions: Tensor) -> None:
        self.directions = directions
        count = min(max(1, round(len(directions) / 10)), len(directions) - 2)
        blocks = cosine_blocks(directions, BLOCK_ENTRIES)
        order = torch.cat([block.sort(dim=1, descending=True, stable=True).indices.int() for _, block in blocks])
        self._near, self._far = order[:, :count], order[:, count:-1].sort(dim=1).values  # the class itself is the last

    def triplets(self, generator: torch.Generator) -> Tensor:
        """Return all triplets (T, 3), or a random sample if there are more than `MAX_TRIPLETS`."""
        near, far = self._near.shape[1], self._far.shape[1]
        total = self._near.numel() * far
        if total <= MAX_TRIPLETS:
            index = torch.arange(total)
        else:
            index = torch.randint(total, (MAX_TRIPLETS,), generator=generator)
        anchor, pair = index // (near * far), index % (near * far)
        return torch.stack([anchor, self._near[anchor, pair // far], self._far[anchor, pair % far]], dim=1)


def ranking_loss(points: Tensor, triplets: Tensor) -> tuple[float, Tensor]:
    """Mean RankNet loss on triplets (T, 3) at unit vectors (K, d), and its gradient (K, d)."""
    anchor, near, far = triplets.unbind(1)
    count, cosines = len(points), (points @ points.T).view(-1)
    pairs = torch.stack([anchor * count + near, anchor * count + far])
    margin = cosines[pairs[0]] - cosines[pairs[1]]
    pull = torch.sigmoid(-margin) / -len(triplets)
    slope = torch.zeros_like(cosines).index_add_(0, pairs.view(-1), torch.cat([pull, -pull])).view(count, count)
    return F.softplus(-margin).mean().item(), (slope + slope.T) @ points


@dataclass(frozen=True)
class OrderPreservation:
    """How well prototypes preserve the similarity order of class vectors.

    Attributes:
        triplet_accuracy: Fraction of triplets of different classes (i, j, k) for which prototypes and class vectors
            agree on whether j or k is closer to i. Ties count as one half, so chance level is 0.5.
        rank_correlation: Spearman's rank correlation of the cosines over all pairs of classes.
    """

    triplet_accuracy: float
    rank_correlation: float


def measure_order(prototypes: Tensor, class_vectors: Tensor, *, seed: int = 0) -> OrderPreservation:
    """Measure how well prototypes preserve the similarity order of class vectors.

    Args:
        prototypes: One point per class, (K, d) with K >= 3.
        class_vectors: One vector per class, (K, any length).
        seed: Seed of the sample of triplets and pairs, if there are more than a million.

    Raises:
        ValueError: If there are fewer than 3 classes or the class vectors are invalid.

    Example:
        >>> measure_order(torch.eye(4), torch.randn(4, 8))
        OrderPreservation(triplet_accuracy=0.5, rank_correlation=0.0)
    """
    from scipy.stats import spearmanr

    points = check_directions(prototypes, what="prototypes")
    directions = class_directions(class_vectors, len(points))
    count, generator = len(points), torch.Generator().manual_seed(check_seed(seed))
    cosines = [unit @ unit.T for unit in (points, directions)]
    anchor, second, third = _different(count, 3, generator).unbind(1)
    differences = [each[anchor, second] - each[anchor, third] for each in cosines]
    closer = [torch.where(each.abs() < 1e-9, 0.0, each.sign()) for each in differences]  # 0 for ties
    agreement = 0.5 + 0.5 * closer[0] * closer[1]
    left, right = _different(count, 2, generator).unbind(1)
    # Round, so that rounding errors do not break ties.
    ours, theirs = ((each[left, right] * 1e9).round() for each in cosines)
    same = (ours == ours[0]).all() or (theirs == theirs[0]).all()
    correlation = 0.0 if same else float(spearmanr(ours.numpy(), theirs.numpy()).statistic)
    return OrderPreservation(agreement.mean().item(), correlation)


def assign_to_classes(points: Tensor, directions: Tensor, generator: torch.Generator) -> Tensor:
    """Order unit vectors (K, d) so that similar classes have nearby points, by an approximate quadratic assignment."""
    from scipy.optimize import quadratic_assignment

    if len(points) > 4096:  # the time grows cubically
        raise ValueError(f"ordering 'assignment' takes up to 4096 classes; got {len(points)}. Use 'ranking'.")
    count, cosines = len(points), (points @ points.T).numpy()
    similarity = directions @ directions.T
    ranks = similarity.flatten().argsort().argsort().double().reshape(count, count) / count**2
    ranks = ((ranks + ranks.T) / 2).fill_diagonal_(0)
    random = np.random.default_rng(int(torch.randint(2**31, (1,), generator=generator)))
    best: Any = None
    for _ in range(10 if count <= 200 else 1):  # random restarts
        options = {"maximize": True, "rng": random, "P0": "randomized"}
        result = quadratic_assignment(ranks.numpy(), cosines, method="faq", options=options)
        best = result if best is None or result.fun > best.fun else best
    return points[torch.as_tensor(best.col_ind)]


def class_directions(class_vectors: Any, num_classes: int) -> Tensor:
    """Return class vectors (K, any length) as unit vectors in float64, or raise an error."""
    directions = check_directions(class_vectors, what="class_vectors")
    if len(directions) != num_classes:
        raise ValueError(f"class_vectors must be one row for each of {num_classes} classes; got {len(directions)}.")
    if num_classes < 3:
        raise ValueError(f"class_vectors require at least 3 classes; got {num_classes}. Leave class_vectors out.")
    # Rounded, so that duplicates are found by sorting instead of comparing all pairs.
    kinds, counts = torch.unique(directions.mul(1e9).round(), dim=0, return_inverse=True, return_counts=True)[1:]
    if (counts > 1).any():
        rows = ", ".join(map(str, (kinds == counts.gt(1).nonzero()[0]).nonzero()[:5, 0].tolist()))
        raise ValueError(f"rows {rows} of class_vectors have the same direction. Give each class a different vector.")
    return directions


def _different(count: int, size: int, generator: torch.Generator, max_tuples: int = 1_000_000) -> Tensor:
    """Tuples of different classes, (N, size): all ordered tuples, or a sample if there are more than `max_tuples`."""
    if count**size <= max_tuples:
        index = torch.cartesian_prod(*[torch.arange(count)] * size)
    else:
        index = torch.randint(count, (max_tuples, size), generator=generator)
    ordered = index.sort(dim=1).values
    return index[(ordered[:, 1:] != ordered[:, :-1]).all(dim=1)]
