"""Objectives of the placement searches, computed in blocks, with closed-form gradients."""

import math

import torch
from torch import Tensor

BLOCK_ENTRIES = 2**24  # maximum number of cosines in memory at a time; 128 MiB in float64


def soft_separation(points: Tensor, sharpness: float) -> tuple[float, Tensor]:
    """Log-sum-exp of the cosines between all pairs of points, a smooth upper bound on the largest one.

    `(1/b) log sum_{i != j} exp(b <p_i, p_j>)` exceeds the largest cosine by at most `log(K (K - 1)) / b`.

    Args:
        points: (K, d), unit vectors.
        sharpness: The inverse temperature b > 0.

    Returns:
        The value and its Euclidean gradient, (K, d).
    """
    gradient = torch.empty_like(points)
    largest, sums = [], []
    blocks = row_blocks(points)
    for start, block in blocks:
        cosines = cosines_to_others(points, start, block)
        top = cosines.amax()
        weights = cosines.sub_(top).mul_(sharpness).exp_()
        torch.mm(weights, points, out=gradient[start : start + len(block)])
        largest.append(top)
        sums.append(weights.sum())
    # Rescale the blocks from their own largest cosine to the overall largest one.
    all_largest = torch.stack(largest)
    top = all_largest.amax()
    factors = (all_largest - top).mul_(sharpness).exp_()
    total = (torch.stack(sums) * factors).sum()
    for (start, block), factor in zip(blocks, 2 * factors / total, strict=True):
        gradient[start : start + len(block)].mul_(factor)
    return (top + total.log() / sharpness).item(), gradient


def mean_nearest_cosine(points: Tensor) -> tuple[float, Tensor]:
    """Mean cosine of the points to their nearest neighbors, the loss of Mettes et al. (2019), equation 2.

    Args:
        points: (K, d), unit vectors.

    Returns:
        The value and a subgradient, (K, d).
    """
    cosines, nearest = [], []
    for start, block in row_blocks(points):
        largest = cosines_to_others(points, start, block).max(dim=1)
        cosines.append(largest.values)
        nearest.append(largest.indices)
    index = torch.cat(nearest)
    gradient = points[index].index_add_(0, index, points)
    return torch.cat(cosines).mean().item(), gradient.div_(len(points))


def row_blocks(points: Tensor) -> list[tuple[int, Tensor]]:
    """Split points into blocks of at most `BLOCK_ENTRIES` cosines to all points, each with its first index."""
    rows = max(1, BLOCK_ENTRIES // len(points))
    return [(start, points[start : start + rows]) for start in range(0, len(points), rows)]


def cosines_to_others(points: Tensor, start: int, block: Tensor) -> Tensor:
    """Cosines of a block of points to all points, (B, K), with -inf for each point and itself."""
    cosines = block @ points.T
    cosines[:, start : start + len(block)].fill_diagonal_(-math.inf)
    return cosines
