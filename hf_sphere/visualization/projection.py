"""Projection of embeddings of any dimension to a circle or a sphere, and validation of labels."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.metrics.checks import check_directions, check_labels


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
    directions = check_directions(points, what="points")
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
    return min(1.0, (check_directions(points, what="points") @ basis).square().sum(1).mean().item())


def check_class_labels(labels: Tensor, count: int, class_names: Sequence[str]) -> Tensor:
    """Return labels (count,), each the index of a class name, as int64 on the CPU.

    Raises:
        TypeError: If they are not integers.
        ValueError: If they have another shape or have no class name.
    """
    labels = check_labels(labels, count).detach().cpu().long()
    low, high = labels.min().item(), labels.max().item()
    if low < 0 or high >= len(class_names):
        raise ValueError(f"labels must be from 0 to {len(class_names) - 1}, one per class name; got {low} to {high}.")
    return labels
