"""From embeddings of any dimension to points on a circle or a sphere that can be looked at."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

DIMENSIONS = {2: "two", 3: "three"}


@dataclass(frozen=True, eq=False)
class Shown:
    """What can be looked at of points and directions.

    Attributes:
        points: (N, dim), unit vectors, float64 on the CPU.
        directions: (K, dim), unit vectors as well, or None.
        note: That the points are projected and how much of them is seen; empty for points that are as they were given.
    """

    points: Tensor
    directions: Tensor | None
    note: str


def project_to_sphere(points: Tensor, dim: int = 3, *, basis: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Bring points of any dimension onto a small sphere for looking at.

    The points are normalised, projected on their leading principal directions about the origin (the great sphere they
    lie closest to) and normalised again. A point at right angles to all of these has no direction: it comes to the
    origin.

    Args:
        points: (N, d), of any norms but zero.
        dim: Coordinates of the result, at most d.
        basis: (d, dim), orthonormal columns to project on instead, for instance those of another epoch.

    Returns:
        Unit vectors (N, dim), and the basis (d, dim), both float64 on the CPU.

    Raises:
        ValueError: If `dim` exceeds d, a point is zero or not finite, or the basis does not fit.
    """
    directions = _normalize(check_points(points))
    width = directions.shape[1]
    if dim > width:
        raise ValueError(f"points of {width} coordinates cannot be shown in {dim} dimensions.")
    if basis is None:
        # Eigenvectors of the second moment, largest first; their signs are fixed so that the picture is.
        basis = torch.linalg.eigh(directions.T @ directions).eigenvectors.flip(-1)[:, :dim]
        basis = basis * torch.where(basis.sum(0) < 0, -1.0, 1.0)
    else:
        basis = _check_basis(basis, (width, dim))
    return F.normalize(directions @ basis, dim=-1), basis


def share_kept(points: Tensor, basis: Tensor) -> float:
    """Share of the second moment of the directions of points (N, d) that a basis (d, dim) keeps, from 0 to 1."""
    return min(1.0, (_normalize(check_points(points)) @ basis).square().sum(1).mean().item())


def show_on_sphere(points: Tensor, dim: int, directions: Tensor | None = None, basis: Tensor | None = None) -> Shown:
    """Bring points (N, d), and directions (K, d) with them, onto the sphere in `dim` dimensions.

    Points of `dim` coordinates stay as they are, up to their lengths, unless there is a basis.

    Raises:
        ValueError: If the points have too few coordinates, the directions or the basis do not fit them, or one is zero
            or not finite.
    """
    points = check_points(points)
    width = points.shape[1]
    if width < dim:
        kind = {2: "circle", 3: "sphere"}[dim]
        raise ValueError(f"the {kind} needs points of at least {dim} coordinates; got {width}.")
    turned = None if directions is None else check_directions(directions, width)
    if width == dim and basis is None:
        return Shown(_normalize(points), turned, "")
    shown, used = project_to_sphere(points, dim, basis=basis)
    if turned is not None:
        turned = F.normalize(turned @ used, dim=-1)
    kept = 100 * share_kept(points, used)
    which = f"the {DIMENSIONS[dim]} leading principal" if basis is None else f"{DIMENSIONS[dim]} given"
    note = f"{width} coordinates, projected on {which} directions, which keep {kept:.0f} % of the second moment"
    return Shown(shown, turned, note)


def check_points(points: Tensor, what: str = "points") -> Tensor:
    """Return points (N, d) as float64 on the CPU, or say what is wrong with them."""
    points = torch.as_tensor(points).detach().cpu().double()
    if points.ndim != 2 or 0 in points.shape:
        raise ValueError(f"{what} must have the shape (N, d) with N >= 1 and d >= 1; got {tuple(points.shape)}.")
    finite = points.isfinite().all(-1)
    if not finite.all():
        count, first = int((~finite).sum()), int((~finite).nonzero()[0])
        raise ValueError(f"{what} must be finite; {count} of {len(points)} are not, the first is number {first}.")
    return points


def check_labels(labels: Tensor, count: int, class_names: Sequence[str]) -> Tensor:
    """Return labels (count,) as int64 on the CPU, or say what is wrong with them."""
    labels = torch.as_tensor(labels).detach().cpu()
    if labels.shape != (count,):
        raise ValueError(f"labels must have the shape ({count},), one a point; got {tuple(labels.shape)}.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers; got {labels.dtype}. Convert them with .long().")
    low, high = labels.min().item(), labels.max().item()
    if low < 0 or high >= len(class_names):
        raise ValueError(f"labels must be from 0 to {len(class_names) - 1}, one a class name; got {low} to {high}.")
    return labels.long()


def check_directions(directions: Tensor, width: int) -> Tensor:
    """Return directions (K, width) as unit vectors, or say what is wrong with them."""
    directions = check_points(directions, "directions")
    if directions.shape[1] != width:
        raise ValueError(f"directions must have {width} coordinates as the points; got {directions.shape[1]}.")
    return _normalize(directions, "direction")


def _check_basis(basis: Tensor, shape: tuple[int, int]) -> Tensor:
    basis = torch.as_tensor(basis).detach().cpu().double()
    if basis.shape != shape:
        raise ValueError(f"the basis must have the shape {shape}; got {tuple(basis.shape)}.")
    if not torch.allclose(basis.T @ basis, torch.eye(shape[1], dtype=torch.float64), atol=1e-4):
        raise ValueError("the basis must have orthonormal columns, as those that project_to_sphere returns.")
    return basis


def _normalize(points: Tensor, what: str = "point") -> Tensor:
    """Divide vectors (N, d) by their lengths; by the largest coordinate first, for squares of tiny ones vanish."""
    largest = points.abs().amax(-1, keepdim=True)
    if (largest == 0).any():
        count, first = int((largest == 0).sum()), int((largest == 0).nonzero()[0, 0])
        raise ValueError(
            f"a {what} at the origin has no direction; {count} of {len(points)} are there, the first is number "
            f"{first}. Leave them out."
        )
    return F.normalize(points / largest, dim=-1)
