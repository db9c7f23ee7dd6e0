"""Projection of embeddings of any dimension to a circle or a sphere, and validation of points and labels."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def project_to_sphere(points: Tensor, dim: int = 3, *, basis: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Project points of any dimension to a low-dimensional sphere for display.

    The points are normalized, projected on their leading principal directions about the origin (the great sphere that
    is closest to them) and normalized again. A point that is orthogonal to all these directions maps to the origin.

    Args:
        points: (N, d), of any nonzero norms.
        dim: Number of coordinates of the result, at most d.
        basis: (d, dim), orthonormal columns to project on instead, for instance the basis of another epoch.

    Returns:
        Unit vectors (N, dim), and the basis (d, dim), both float64 on the CPU.

    Raises:
        ValueError: If `dim` exceeds d, a point is zero or not finite, or the basis does not fit.
    """
    directions = normalize(check_points(points))
    width = directions.shape[1]
    if dim > width:
        raise ValueError(f"points of {width} coordinates cannot be shown in {dim} dimensions.")
    if basis is None:
        # Eigenvectors of the second moment, largest first, with fixed signs so that the figure is reproducible.
        basis = torch.linalg.eigh(directions.T @ directions).eigenvectors.flip(-1)[:, :dim]
        basis = basis * torch.where(basis.sum(0) < 0, -1.0, 1.0)
    basis = torch.as_tensor(basis).detach().cpu().double()
    if basis.shape != (width, dim):
        raise ValueError(f"the basis must have the shape {(width, dim)}; got {tuple(basis.shape)}.")
    if not torch.allclose(basis.T @ basis, torch.eye(dim, dtype=torch.float64), atol=1e-4):
        raise ValueError("the basis must have orthonormal columns, like the one that project_to_sphere returns.")
    return F.normalize(directions @ basis, dim=-1), basis


def share_kept(points: Tensor, basis: Tensor) -> float:
    """Return the share, in [0, 1], of the second moment of the directions of points (N, d) kept by a basis (d, dim)."""
    return min(1.0, (normalize(check_points(points)) @ basis).square().sum(1).mean().item())


def check_points(points: Tensor, what: str = "points") -> Tensor:
    """Return points (N, d) as float64 on the CPU.

    Raises:
        ValueError: If they have another shape or are not finite.
    """
    points = torch.as_tensor(points).detach().cpu().double()
    if points.ndim != 2 or 0 in points.shape:
        raise ValueError(f"{what} must have the shape (N, d) with N >= 1 and d >= 1; got {tuple(points.shape)}.")
    finite = points.isfinite().all(-1)
    if not finite.all():
        count, first = int((~finite).sum()), int((~finite).nonzero()[0])
        raise ValueError(f"{what} must be finite; {count} of {len(points)} are not, the first at index {first}.")
    return points


def check_labels(labels: Tensor, count: int, class_names: Sequence[str]) -> Tensor:
    """Return labels (count,) as int64 on the CPU.

    Raises:
        ValueError: If they have another shape, are not integers or have no class name.
    """
    labels = torch.as_tensor(labels).detach().cpu()
    if labels.shape != (count,):
        raise ValueError(f"labels must have the shape ({count},), one per point; got {tuple(labels.shape)}.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers; got {labels.dtype}. Convert them with .long().")
    low, high = labels.min().item(), labels.max().item()
    if low < 0 or high >= len(class_names):
        raise ValueError(f"labels must be from 0 to {len(class_names) - 1}, one per class name; got {low} to {high}.")
    return labels.long()


def normalize(points: Tensor, what: str = "point") -> Tensor:
    """Normalize vectors (N, d); they are divided by their largest coordinate first, since squares can underflow.

    Raises:
        ValueError: If a vector is zero.
    """
    largest = points.abs().amax(-1, keepdim=True)
    if (largest == 0).any():
        count, first = int((largest == 0).sum()), int((largest == 0).nonzero()[0, 0])
        raise ValueError(
            f"a {what} at the origin has no direction; got {count} of {len(points)}, the first at index {first}. "
            "Remove them."
        )
    return F.normalize(points / largest, dim=-1)
