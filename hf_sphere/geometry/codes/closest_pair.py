"""The closest pair of points on the sphere."""

import torch
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere


def separation(points: Tensor) -> Tensor:
    """Largest cosine between two different points; lower is better.

    Computed block by block in at least float32, without a K x K matrix. Differentiable: the gradient is that of the
    closest pair, or of one of them if several are equally close.

    Args:
        points: Non-zero points, (K, d) with K >= 2.

    Returns:
        A 0-dim tensor with the dtype of `points`, but at least float32.

    Raises:
        TypeError: If `points` does not have a floating-point dtype.
        ValueError: If the shape is not (K, d) with K >= 2 and d >= 1, or a point is zero or not finite.

    Example:
        >>> separation(torch.eye(3))
        tensor(0.)
    """
    if not points.is_floating_point():
        raise TypeError(f"points must have a floating-point dtype; got {points.dtype}. Convert them with .float().")
    if points.ndim != 2 or points.shape[0] < 2 or points.shape[1] < 1:
        raise ValueError(f"points must have the shape (K, d) with K >= 2 and d >= 1; got {tuple(points.shape)}.")
    invalid = ~(points.isfinite().all(-1) & points.any(-1))
    if invalid.any():
        row = int(invalid.nonzero()[0])
        raise ValueError(f"all points must be finite and non-zero; point {row} is not. Remove or replace it.")
    unit = project_to_sphere(points.to(torch.promote_types(points.dtype, torch.float32)))
    # The search is done without gradients; the cosines of the pairs found are then recomputed.
    return (unit * unit[_nearest(unit.detach())]).sum(-1).clamp(-1.0, 1.0).max()


@torch.no_grad()
def _nearest(unit: Tensor) -> Tensor:
    """Index of the nearest other vector for each unit vector, (K, d) -> (K,)."""
    count = unit.shape[0]
    step = max(1, 2**22 // count)
    nearest = torch.empty(count, dtype=torch.long, device=unit.device)
    with torch.autocast(unit.device.type, enabled=False):
        for first in range(0, count, step):
            cosines = unit[first : first + step] @ unit.T
            cosines.diagonal(first).fill_(-2.0)
            nearest[first : first + step] = cosines.argmax(-1)
    return nearest
