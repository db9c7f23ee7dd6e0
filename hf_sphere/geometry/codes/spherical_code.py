"""A spherical code given by a construction, whose properties are verified when it is built."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

# Up to this size all pairs of points are verified; for larger codes, the pairs of a sample with all points.
_FULLY_VERIFIED = 8192
_SAMPLE = 64
_BLOCK = 512


@dataclass(frozen=True)
class SphericalCode:
    """An algebraic construction of K unit vectors in R^d with a known largest cosine.

    Attributes:
        name: Name of the code.
        dim: Dimension d.
        size: Number K of points.
        cosine: Exact largest cosine between two points.
        optimal: Whether the code is proved optimal: no K points in R^d have a smaller largest cosine.
        source: Reference for the construction or the proof of optimality.
        builder: Function that returns the points, of any norm, as an array (K, d).
    """

    name: str
    dim: int
    size: int
    cosine: float
    optimal: bool
    source: str
    builder: Callable[[], np.ndarray] = field(repr=False, compare=False)

    def build(self, index: Tensor | slice = slice(None)) -> Tensor:
        """Return the points of the code.

        The code is constructed and verified once; every call returns a new copy. For codes of more than 8,192 points,
        64 evenly spaced points are compared with all others, which is sufficient by the symmetry of these codes.

        Args:
            index: Which points to return; all by default.

        Returns:
            Unit vectors, (K, d), float64.

        Raises:
            RuntimeError: If the construction does not have the stated properties, which is a bug in this library.
        """
        return _unit_rows(_verified_points(self)[index])


# The largest codes take more than 100 MB, so only a few are cached.
@lru_cache(maxsize=16)
def _verified_points(code: SphericalCode) -> np.ndarray:
    """Return the read-only array of the builder, in its own dtype, after verification."""
    points = code.builder()
    if points.shape != (code.size, code.dim):
        raise RuntimeError(f"internal error: {code.name} was built with the shape {points.shape}.")
    count = code.size if code.size <= _FULLY_VERIFIED else _SAMPLE
    sampled = torch.linspace(0, code.size - 1, count, dtype=torch.float64).round().long()
    sample, largest = _unit_rows(points[sampled]), torch.tensor(-1.0, dtype=torch.float64)
    for start in range(0, code.size, _BLOCK):
        cosines = _unit_rows(points[start : start + _BLOCK]) @ sample.T
        same = torch.arange(start, start + len(cosines))[:, None] == sampled
        largest = largest.maximum(cosines.masked_fill_(same, -2.0).max())
    # Coinciding points have the cosine 1. The negation also catches NaN.
    if not abs(largest.item() - code.cosine) <= 1e-9:
        raise RuntimeError(f"internal error: {code.name} was built with the largest cosine {largest.item()}.")
    points.setflags(write=False)
    return points


def _unit_rows(points: np.ndarray) -> Tensor:
    wide = torch.from_numpy(points.astype(np.float64))
    return wide.div_(wide.norm(dim=-1, keepdim=True))
