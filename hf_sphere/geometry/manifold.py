"""Geodesics of the unit sphere: distances, exponential and logarithmic maps, transport, means and rotations.

Points are unit vectors along the last axis; leading axes broadcast. Distances are never arc cosines of inner products,
which lose half of the digits near 0 and pi, and all maps are smooth at 0. Computed in at least float32 and returned in
the dtype of the arguments. Between antipodal points the shortest path is not unique; one of them is used.
"""

import functools
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_sphere.geometry.checks import check_embeddings, check_floating, check_points, check_rows, to_tensor
from hf_sphere.geometry.decorators import with_gradient

F = TypeVar("F", bound=Callable[..., Tensor])

_COSINE = [(-1) ** k / math.factorial(2 * k) for k in range(8)]
_SINC = [(-1) ** k / math.factorial(2 * k + 1) for k in range(8)]
_ARCSINE = [math.comb(2 * k, k) / (4**k * (2 * k + 1)) for k in range(8)]
"""Taylor coefficients of cos(a), sin(a) / a and asin(a) / a, in powers of a^2."""

LONGEST_STEP, MAX_ITERATIONS = 20.0, 1000
"""Largest factor of the gradient in a step of `frechet_mean`, and maximum number of steps."""


def _upcast(function: F) -> F:
    """Check tensor arguments and pass them in a common dtype of at least float32; return the result in their dtype."""
    hints = {name: option.annotation for name, option in inspect.signature(function).parameters.items()}

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        values = {**dict(zip(hints, args, strict=False)), **kwargs}
        tensors = {name: v for name, v in values.items() if hints.get(name) is Tensor or hasattr(v, "__len__")}
        for name, value in tensors.items():
            check_floating(name, value)
            if hints[name] is Tensor and value.ndim == 0:  # a number would be broadcast
                raise ValueError(f"{name} must be vectors (..., d); got a number.")
        dtype = functools.reduce(torch.promote_types, (value.dtype for value in tensors.values()))
        wide = torch.promote_types(dtype, torch.float32)
        return function(**values | {name: value.to(wide) for name, value in tensors.items()}).to(dtype)

    return wrapper  # type: ignore[return-value]


@_upcast
def project_to_sphere(x: Tensor) -> Tensor:
    """Return the directions x / |x| of vectors, (..., d). A zero vector has no direction and stays zero.

    Example:
        >>> project_to_sphere(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """
    largest = torch.linalg.vector_norm(x.detach(), torch.inf, -1, keepdim=True)  # squares may overflow or underflow
    return divide_by_norms(x / torch.threshold(largest, 0.0, 1.0), 1.0)[0]


def _gradient_of_quotient(
    x: Tensor, directions: Tensor, norms: Tensor, grad: Tensor | None, grad_norms: Tensor | None
) -> tuple[Tensor]:
    """With u = x / |x|: `du = (dx - <u, dx> u) / |x|` and `d|x| = <u, dx>`."""
    grad = torch.zeros_like(directions) if grad is None else grad
    along = (directions * grad).sum(-1, keepdim=True)
    grad_x = torch.addcmul(grad, directions, along, value=-1) / norms
    return (grad_x if grad_norms is None else torch.addcmul(grad_x, grad_norms, directions),)


@with_gradient(_gradient_of_quotient)
def divide_by_norms(x: Tensor, short: float, least: float = 1e-12) -> tuple[Tensor, Tensor]:
    """Return vectors (..., d) divided by their norms, and the norms, (..., 1); norms up to `least` become `short`."""
    norms = torch.threshold(torch.linalg.vector_norm(x, dim=-1, keepdim=True), least, short)
    return x / norms, norms


def check_directions(embeddings: Tensor, min_count: int = 1, what: str = "embeddings") -> Tensor:
    """Return the directions of embeddings (N, d), unit vectors in float64 on the CPU."""
    embeddings = check_embeddings(to_tensor(what, embeddings).cpu(), min_count, what).double()
    check_rows(embeddings.any(-1), "a zero vector has no direction", f"{what} are zero")
    return project_to_sphere(embeddings)


def mean_direction(mean: Tensor) -> Tensor:
    """Return the directions of means of points, (..., d). For a mean of zero, which has none, it is the first axis."""
    first = torch.eye(1, mean.shape[-1], dtype=mean.dtype, device=mean.device)[0]
    return project_to_sphere(torch.where((mean == 0).all(-1, keepdim=True), first, mean))


@_upcast
def project_to_tangent(point: Tensor, vector: Tensor) -> Tensor:
    """Project vectors (..., d) orthogonally onto the tangent spaces at points (..., d).

    Example:
        >>> project_to_tangent(torch.tensor([1.0, 0.0]), torch.tensor([0.3, 0.4]))
        tensor([0.0000, 0.4000])
    """
    return vector - (point * vector).sum(-1, keepdim=True) * point


@_upcast
def exp_map(point: Tensor, tangent: Tensor) -> Tensor:
    """Return the ends of the geodesics that start at points with tangents (..., d), whose norms are the lengths.

    Example:
        >>> exp_map(torch.tensor([1.0, 0.0]), torch.tensor([0.0, torch.pi / 6]))
        tensor([0.8660, 0.5000])
    """
    square = tangent.square().sum(-1, keepdim=True)
    small = square < 1e-2
    angle = torch.where(small, 1.0, square).sqrt()
    cosine = torch.where(small, _polynomial(square, _COSINE), angle.cos())
    sinc = torch.where(small, _polynomial(square, _SINC), angle.sin() / angle)
    return cosine * point + sinc * tangent


@_upcast
def log_map(point: Tensor, other: Tensor) -> Tensor:
    """Return the tangents at points that `exp_map` maps to other points, (..., d); the inverse of `exp_map`.

    Example:
        >>> log_map(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
        tensor([0.0000, 1.5708])
    """
    tangent, antipodal = _log_map(point, other)
    return torch.where(antipodal, math.pi * _any_tangent(point), tangent)


def _log_map(point: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tangents of `log_map`, 0 for antipodal points, and which points are antipodal."""
    cosine = (point * other).sum(-1, keepdim=True)
    # A difference from the nearer pole is exact, unlike other - cosine * point.
    chord = torch.addcmul(other, cosine.sign(), point, value=-1)
    tangent = torch.addcmul(chord, (point * chord).sum(-1, keepdim=True), point, value=-1)
    square = tangent.square().sum(-1, keepdim=True)  # of the sine of the distance
    behind = cosine < 0
    small, antipodal = (square < 1e-3) & ~behind, (square == 0) & behind
    sine = square.masked_fill(small | antipodal, 1.0).sqrt()
    scale = torch.where(small, _polynomial(square, _ARCSINE), torch.atan2(sine, cosine) / sine)
    return scale * tangent, antipodal


@_upcast
def geodesic_distance(point: Tensor, other: Tensor) -> Tensor:
    """Return the angles between points (..., d), in radians from 0 to pi: (...).

    Reference:
        Kahan, "How futile are mindless assessments of roundoff in floating-point computation?", 2006, section 12.

    Example:
        >>> geodesic_distance(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
        tensor(1.5708)
    """
    chords = (torch.linalg.vector_norm(x, dim=-1) for x in (point - other, point + other))
    return 2 * torch.atan2(*chords)


@_upcast
def slerp(point: Tensor, other: Tensor, share: Tensor | float) -> Tensor:
    """Return the point at a fraction of the way along the geodesic between two points, (..., d).

    Args:
        point: Start, (..., d).
        other: End, (..., d).
        share: 0 at the start and 1 at the end; a number, or a tensor (...).

    Example:
        >>> slerp(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 0.5)
        tensor([0.7071, 0.7071])
    """
    return exp_map(point, (share[..., None] if isinstance(share, Tensor) else share) * log_map(point, other))


@_upcast
def parallel_transport(point: Tensor, other: Tensor, tangent: Tensor) -> Tensor:
    """Transport tangents (..., d) at points to other points along the geodesics between them.

    Example:
        >>> parallel_transport(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.5]))
        tensor([-0.5000,  0.0000])
    """
    # The reflection that maps a point to the negative of the other one is exact also near the antipode, if the axis is
    # orthogonal to the difference of the points: rounding of their norms would turn a short axis.
    axis, difference = point + other, point - other
    gap, along = difference.square().sum(-1, keepdim=True), (axis * difference).sum(-1, keepdim=True)
    axis = axis - torch.where(gap > 2, along / gap.clamp_min(2), 0.0) * difference
    square = axis.square().sum(-1, keepdim=True)
    axis = torch.where(square == 0, _any_tangent(point), axis)
    return tangent - 2 * (axis * tangent).sum(-1, keepdim=True) / torch.where(square == 0, 1.0, square) * axis


@_upcast
def frechet_mean(points: Tensor) -> Tensor:
    """Return the point with the smallest sum of squared geodesic distances to given points.

    Riemannian gradient descent from the direction of the Euclidean mean; a step is the gradient, divided by the
    curvature along the step before. For spread points it may end in one of several local minima. Differentiable by the
    implicit function theorem. A warning reports a mean that is not unique, as for antipodal points, and steps that do
    not converge.

    Args:
        points: Points, (..., n, d) with n >= 1.

    Returns:
        Means, (..., d).

    Raises:
        TypeError: If the points do not have a floating-point dtype.
        ValueError: If there are no points, or a norm is not finite or 0.

    Reference:
        Barzilai and Borwein, "Two-point step size gradient methods", IMA Journal of Numerical Analysis 1988.

    Example:
        >>> frechet_mean(torch.eye(3))
        tensor([0.5774, 0.5774, 0.5774])
    """
    check_points(points)
    with torch.no_grad():
        resultant = points.mean(-2, keepdim=True)
        tolerance = 100 * torch.finfo(points.dtype).eps
        balanced = torch.linalg.vector_norm(resultant, dim=-1, keepdim=True) <= tolerance
        mean = project_to_sphere(torch.where(balanced, points[..., :1, :], resultant))
        descent = step = log_map(mean, points).mean(-2, keepdim=True)
        for _ in range(MAX_ITERATIONS):
            mean = mean + step  # a shorter step than that of `exp_map`
            mean = mean / torch.linalg.vector_norm(mean, dim=-1, keepdim=True)
            if not (torch.linalg.vector_norm(descent, dim=-1) > tolerance).any():
                break
            before, descent = descent, _log_map(mean, points)[0].mean(-2, keepdim=True)
            # No curvature exceeds 1, so that a unit step never increases the sum.
            factor = step.square().sum(-1, keepdim=True) / (step * (before - descent)).sum(-1, keepdim=True)
            step = factor.nan_to_num(1.0).clamp(1.0, LONGEST_STEP) * descent  # 1 also where a curvature is negative
        else:
            warnings.warn(f"the mean did not converge in {MAX_ITERATIONS} steps; the points are spread.", stacklevel=3)
        tangents = log_map(mean, points)
        curvature = _curvatures(tangents)[1].mean((-2, -1))  # a lower bound, which takes linear time
        if not (curvature > 1e-6).all():
            curvature = torch.linalg.eigvalsh(_hessian(mean, tangents))[..., 0]
        ambiguous = balanced[..., 0, 0] | (curvature <= 1e-6)
        if ambiguous.any():
            sets = f"{int(ambiguous.sum())} of {ambiguous.numel()} sets of points"
            warnings.warn(f"the mean of {sets} may not be unique, as for antipodal points.", stacklevel=3)
    if torch.is_grad_enabled() and points.requires_grad:
        # A Newton step from the solution does not change it, and has its derivatives.
        newton = torch.linalg.solve(_hessian(mean, tangents), log_map(mean, points).mean(-2)[..., None]).squeeze(-1)
        return exp_map(mean.squeeze(-2), newton)
    return mean.squeeze(-2)


def random_rotation(
    dim: int,
    batch_shape: tuple[int, ...] = (),
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw rotation matrices uniformly (Haar measure), batch_shape + (dim, dim), with determinant 1.

    Reference:
        Mezzadri, "How to generate random matrices from the classical compact groups", Notices of the AMS 2007.

    Example:
        >>> torch.linalg.det(random_rotation(3)).round()
        tensor(1.)
    """
    dtype = dtype or torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float32)
    q, r = torch.linalg.qr(torch.randn(*batch_shape, dim, dim, generator=generator, dtype=wide, device=device))
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(wide)
    q = q * signs[..., None, :]
    return torch.cat([q[..., :1] * torch.linalg.det(q).sign()[..., None, None], q[..., 1:]], dim=-1).to(dtype)


def _polynomial(x: Tensor, coefficients: list[float]) -> Tensor:
    *coefficients, before, last = coefficients if x.dtype == torch.float64 else coefficients[:5]
    value = x * last + before
    for coefficient in reversed(coefficients):
        value = value * x + coefficient
    return value


def _any_tangent(point: Tensor) -> Tensor:
    """Return unit tangents at points (..., d): the projections of the coordinate axes that are most orthogonal."""
    axis = torch.nn.functional.one_hot(point.abs().argmin(-1), point.shape[-1]).to(point.dtype)
    return project_to_sphere(project_to_tangent(point, axis))


def _curvatures(tangents: Tensor) -> tuple[Tensor, Tensor]:
    """Return distances, and the second derivatives a cot(a) of half their squares orthogonal to the geodesics."""
    angle = torch.linalg.vector_norm(tangents, dim=-1, keepdim=True)
    return angle, torch.where(angle < 1e-4, 1 - angle.square() / 3, angle / angle.clamp_min(1e-4).tan())


def _hessian(mean: Tensor, tangents: Tensor) -> Tensor:
    """Second derivative of half the mean squared distance, (..., d, d); 1 in the direction of the mean."""
    angle, across = _curvatures(tangents)
    directions = tangents / angle.clamp_min(torch.finfo(angle.dtype).tiny)
    least = across.mean(-2, keepdim=True)
    identity = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    along = ((1 - across) * directions).mT @ directions / tangents.shape[-2]
    return least * identity + along + (1 - least) * mean.mT @ mean
