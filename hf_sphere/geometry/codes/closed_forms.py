"""Optimal codes in closed form: the simplex, the cross-polytope and the regular polygon."""

import math

import torch
from torch import Tensor


def simplex(num_points: int, dim: int) -> Tensor:
    """Vertices of a regular simplex, which is optimal: all cosines are -1 / (K - 1).

    Args:
        num_points: Number K of points, 2 <= K <= d + 1.
        dim: Dimension d; coordinates after the first K - 1 are zero.

    Returns:
        Unit vectors, (K, d), float64, with sum zero.

    Raises:
        ValueError: If K is outside 2..d + 1.

    Reference:
        Rankin, "The closest packing of spherical caps in n dimensions", 1955.
    """
    if not 2 <= num_points <= dim + 1:
        raise ValueError(f"a simplex in dimension {dim} has 2 to {dim + 1} points; got {num_points}. See find_code.")
    # Columns of a Helmert matrix: before scaling, point i has -i in coordinate i and 1 in all later coordinates.
    order = torch.arange(1, num_points, dtype=torch.float64)
    columns = torch.ones(num_points, num_points - 1, dtype=torch.float64).triu()
    columns[1:].diagonal().copy_(-order)
    points = torch.zeros(num_points, dim, dtype=torch.float64)
    points[:, : num_points - 1] = columns * torch.sqrt(num_points / (num_points - 1) / (order * (order + 1)))
    return points


def cross_polytope(num_points: int, dim: int) -> Tensor:
    """First K vertices e_1, ..., e_d, -e_1, ..., -e_d of the cross-polytope.

    All cosines are 0 or -1, which is optimal for K >= d + 2.

    Args:
        num_points: Number K of points, 2 <= K <= 2 d.
        dim: Dimension d.

    Returns:
        Unit vectors, (K, d), float64.

    Raises:
        ValueError: If K is outside 2..2 d.

    Reference:
        Rankin, "The closest packing of spherical caps in n dimensions", 1955.
    """
    if not 2 <= num_points <= 2 * dim:
        raise ValueError(f"a cross-polytope in R^{dim} has 2 to {2 * dim} points; got {num_points}. See find_code.")
    identity = torch.eye(dim, dtype=torch.float64)
    return torch.cat([identity, -identity])[:num_points].clone()


def polygon(num_points: int) -> Tensor:
    """Vertices of the regular polygon, which is optimal in dimension 2: the largest cosine is cos(2 pi / K).

    Args:
        num_points: Number K >= 2 of points.

    Returns:
        Unit vectors, (K, 2), float64, in counterclockwise order from (1, 0).

    Raises:
        ValueError: If K is below 2.
    """
    if num_points < 2:
        raise ValueError(f"a polygon has at least 2 points; got {num_points}.")
    angle = torch.arange(num_points, dtype=torch.float64) * (2 * math.pi / num_points)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)
