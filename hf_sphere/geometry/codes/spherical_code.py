"""A spherical code with a construction: what it is, how good it is, and its points, checked when they are built."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from hf_sphere.geometry.codes.separation import nearest_cosines

# Up to this many points every pair is checked when a code is built; of larger codes a sample against all.
_FULLY_CHECKED = 8192
_SAMPLE = 64
_BLOCK = 4096


@dataclass(frozen=True)
class SphericalCode:
    """K unit vectors in R^d that algebra describes, no two of them at a cosine above `cosine`.

    Attributes:
        name: What the code is called.
        dim: Dimension d.
        size: Number K of points.
        cosine: Exact largest cosine between two points.
        optimal: Whether it is proved that no K points in R^d have a smaller largest cosine.
        source: Who described the code, or proved it optimal.
        builder: Makes the points, of any common norm, as an array (K, d).
    """

    name: str
    dim: int
    size: int
    cosine: float
    optimal: bool
    source: str
    builder: Callable[[], np.ndarray] = field(repr=False, compare=False)

    def __str__(self) -> str:
        """One line of facts and one of source."""
        rank = "proved optimal" if self.optimal else "not proved optimal"
        facts = f"{self.name}: {self.size} points in dimension {self.dim}, largest cosine {self.cosine:.6f}, {rank}"
        return f"{facts}\n{textwrap.indent(self.source, '  ')}"

    def build(self) -> Tensor:
        """Points of the code.

        Built and checked once; a copy of the same points is returned every time. Of a code of more than 8,192 points
        64, evenly spread, are checked against all others, which with the symmetry of these codes stands for all.

        Returns:
            Unit vectors of shape (size, dim), float64.

        Raises:
            RuntimeError: If the construction does not give what the code claims: an error of this library.
        """
        return _unit_rows(_checked_points(self))

    def build_subset(self, num_points: int, generator: torch.Generator | None = None) -> Tensor:
        """Some of the points: the first ones, or random ones without repetition if there is a generator.

        Args:
            num_points: How many, 1 <= K <= size.
            generator: Source of randomness, on the CPU.

        Returns:
            Unit vectors of shape (K, dim), float64.

        Raises:
            ValueError: If the code has fewer points.
        """
        if not 1 <= num_points <= self.size:
            raise ValueError(
                f"{self.name} has {self.size} points; got num_points={num_points}. Choose 1 to {self.size}."
            )
        chosen = torch.arange(self.size) if generator is None else torch.randperm(self.size, generator=generator)
        return _unit_rows(_checked_points(self)[chosen[:num_points].numpy()])


# The largest codes take 100 MB and more; a few at a time are enough.
@lru_cache(maxsize=16)
def _checked_points(code: SphericalCode) -> np.ndarray:
    """The builder's array, after its check, in as few bytes as the builder used; not to be changed."""
    points = code.builder()
    if points.shape != (code.size, code.dim):
        raise RuntimeError(f"internal error: {code.name} was built with the shape {points.shape}.")
    if code.size <= _FULLY_CHECKED:
        unit = _unit_rows(points)
        if ((unit * unit).sum(-1) - 1).abs().max() > 1e-12:
            raise RuntimeError(f"internal error: {code.name} was built with points that are not of norm 1.")
        found = float(nearest_cosines(unit).max())
    else:
        found = _largest_sampled_cosine(points)
    # Points that coincide would show as the cosine 1.
    if not abs(found - code.cosine) <= 1e-9:  # so written, it also catches NaN
        raise RuntimeError(f"internal error: {code.name} was built with the largest cosine {found}.")
    points.setflags(write=False)
    return points


def _largest_sampled_cosine(points: np.ndarray) -> float:
    """Largest cosine of evenly spread points with any other one."""
    chosen = torch.linspace(0, len(points) - 1, _SAMPLE).round().long()
    sample, found = _unit_rows(points[chosen.numpy()]), -1.0
    for first in range(0, len(points), _BLOCK):
        cosines = _unit_rows(points[first : first + _BLOCK]) @ sample.T
        itself = torch.arange(first, first + len(cosines))[:, None] == chosen
        found = max(found, float(cosines.masked_fill_(itself, -2.0).max()))
    return found


def _unit_rows(points: np.ndarray) -> Tensor:
    wide = torch.from_numpy(points.astype(np.float64))
    return wide.div_(wide.norm(dim=-1, keepdim=True))
