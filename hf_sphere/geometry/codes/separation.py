"""How far apart points on the sphere are: the largest cosine between two of them."""

import torch
from torch import Tensor


def separation(points: Tensor) -> Tensor:
    """Largest cosine between two different points, the measure by which spherical codes are compared; lower is better.

    Differentiable: the gradient is that of the closest pair (of one of them where several are equally close).

    Args:
        points: K >= 2 points of shape (K, d), of any norms but zero.

    Returns:
        A 0-dim tensor, of the dtype of `points` and at least float32.

    Raises:
        TypeError: If `points` is not of a floating dtype.
        ValueError: If the shape is not (K, d) with K >= 2 and d >= 1, or a point is zero or not finite.
    """
    return nearest_cosines(points).max()


def nearest_cosines(points: Tensor) -> Tensor:
    """Largest cosine of each point with another one.

    Computed block by block in at least float32: K = 100,000 points take no K x K memory. Differentiable like
    `separation`.

    Args:
        points: K >= 2 points of shape (K, d), of any norms but zero.

    Returns:
        Cosines of shape (K,), of the dtype of `points` and at least float32.

    Raises:
        TypeError: If `points` is not of a floating dtype.
        ValueError: If the shape is not (K, d) with K >= 2 and d >= 1, or a point is zero or not finite.
    """
    unit = _unit_vectors(points)
    # The search needs no gradient; the cosines of the pairs that it finds are then computed once more, exactly.
    return (unit * unit[_nearest(unit.detach())]).sum(-1).clamp(-1.0, 1.0)


@torch.no_grad()
def _nearest(unit: Tensor) -> Tensor:
    """Index of each unit vector's nearest other one, (K, d) -> (K,)."""
    count = unit.shape[0]
    step = max(1, 2**22 // count)
    nearest = torch.empty(count, dtype=torch.long, device=unit.device)
    with torch.autocast(unit.device.type, enabled=False):
        for first in range(0, count, step):
            cosines = unit[first : first + step] @ unit.T
            cosines.diagonal(first).fill_(-2.0)
            nearest[first : first + step] = cosines.argmax(-1)
    return nearest


def _unit_vectors(points: Tensor) -> Tensor:
    if not points.is_floating_point():
        raise TypeError(f"points must be of a floating dtype; got {points.dtype}. Convert them with .float().")
    if points.ndim != 2 or points.shape[0] < 2 or points.shape[1] < 1:
        raise ValueError(f"points must have the shape (K, d) with K >= 2 and d >= 1; got {tuple(points.shape)}.")
    wide = points.to(torch.promote_types(points.dtype, torch.float32))
    # Dividing by the largest coordinate first keeps the squares of tiny and of huge vectors in range.
    largest = wide.detach().abs().amax(-1, keepdim=True)
    if not (largest.isfinite() & (largest > 0)).all():
        row = int((~(largest.isfinite() & (largest > 0))).squeeze(-1).nonzero()[0])
        raise ValueError(f"every point must be finite and not zero; point {row} is not. Remove it or replace it.")
    scaled = wide / largest
    return scaled / scaled.norm(dim=-1, keepdim=True)
