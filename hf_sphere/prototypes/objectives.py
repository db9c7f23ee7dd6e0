"""What a search minimises: smooth and plain forms of the largest cosine, in blocks, with closed-form gradients."""

import math

import torch
from torch import Tensor

ENTRIES_IN_MEMORY = 2**24
"""Cosines held at a time: 128 MiB in float64, whatever the number of points."""


def soft_separation(points: Tensor, sharpness: float) -> tuple[float, Tensor]:
    """Log-sum-exp of all cosines between different points: a smooth upper bound of the largest one.

    `(1/b) log sum_{i != j} exp(b <p_i, p_j>)` exceeds the largest cosine by at most `log(K (K - 1)) / b`.

    Args:
        points: (K, d), unit vectors.
        sharpness: The inverse temperature b > 0.

    Returns:
        The value, and its gradient (K, d) in the surrounding space.
    """
    gradient = torch.empty_like(points)
    tops, sums, rows = [], [], []
    for start, block in _row_blocks(points):
        cosines = _cosines_to_others(points, start, block)
        top = cosines.amax()
        weights = cosines.sub_(top).mul_(sharpness).exp_()
        torch.mm(weights, points, out=gradient[start : start + len(block)])
        tops.append(top)
        sums.append(weights.sum())
        rows.append(len(block))
    # Each block is relative to its own largest cosine; bring them to the largest of all.
    all_tops = torch.stack(tops)
    top = all_tops.amax()
    factors = (all_tops - top).mul_(sharpness).exp_()
    total = (torch.stack(sums) * factors).sum()
    if len(rows) == 1:
        gradient.mul_(2 / total)
    else:
        counts = torch.tensor(rows, device=points.device)
        gradient.mul_((2 * factors / total).repeat_interleave(counts)[:, None])
    return (top + total.log() / sharpness).item(), gradient


def mean_nearest_cosine(points: Tensor) -> tuple[float, Tensor]:
    """Mean over the points of the cosine to the nearest other one, the loss of Mettes et al. (2019), equation 2.

    Args:
        points: (K, d), unit vectors.

    Returns:
        The value, and a subgradient (K, d).
    """
    cosines, nearest = [], []
    for start, block in _row_blocks(points):
        largest = _cosines_to_others(points, start, block).max(dim=1)
        cosines.append(largest.values)
        nearest.append(largest.indices)
    index = torch.cat(nearest)
    gradient = points[index].index_add_(0, index, points)
    return torch.cat(cosines).mean().item(), gradient.div_(len(points))


def _row_blocks(points: Tensor) -> list[tuple[int, Tensor]]:
    rows = max(1, ENTRIES_IN_MEMORY // len(points))
    return [(start, points[start : start + rows]) for start in range(0, len(points), rows)]


def _cosines_to_others(points: Tensor, start: int, block: Tensor) -> Tensor:
    """Cosines of a block of rows to all points (B, K), with -inf for that of a point to itself."""
    cosines = block @ points.T
    cosines[:, start : start + len(block)].fill_diagonal_(-math.inf)
    return cosines
