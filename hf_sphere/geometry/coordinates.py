"""Angles and Cartesian coordinates on the hypersphere, and the spherization map.

Every function is a map along the last axis with a closed-form gradient, linear in the number of coordinates.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def spherize(x: Tensor, scaling: float | Tensor = 1.0, radius: float | Tensor = 1.0, delta: float = 1e-6) -> Tensor:
    r"""Map unconstrained values onto the non-negative orthant of a sphere.

    Each value becomes an angle, `theta_i = (pi/2 - phi) * sigmoid(scaling * x_i) + phi`, and the angles become a point
    of norm `radius`: `y_k = radius * cos(theta_k) * prod_{j<k} sin(theta_j)`, `y_{n+1} = radius * prod_j sin(theta_j)`.
    The smallest angle `phi = min(asin(delta^(1/n)), 0.99 * pi/2)` keeps the last coordinate above `radius * delta`, so
    that no product vanishes however many axes there are.

    Computed in float32 or better, with the log-sines summed in float64, and returned in the dtype of `x`. Twice
    differentiable with respect to `x`, `scaling` and `radius`.

    Args:
        x: Values of shape (..., n), of a floating dtype.
        scaling: Slope of the sigmoid; a number or a tensor with one element.
        radius: Norm of the result, positive; a number or a tensor with one element.
        delta: Lower bound of the product of all sines, in (0, 1).

    Returns:
        Points of shape (..., n + 1), all coordinates non-negative, of norm `radius`.

    Raises:
        TypeError: If `x` is not of a floating dtype.
        ValueError: If `x` has no axis or an empty last one, `delta` is outside (0, 1), or a `radius` given as a number
            is not positive.

    Reference:
        Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022, equations 3 to 6.
    """
    _check_points(x, least=1)
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must lie between 0 and 1, both excluded; got {delta}. The usual value is 1e-6.")
    if not isinstance(radius, Tensor) and not radius > 0.0:
        raise ValueError(f"radius must be positive; got {radius}.")
    return _Spherize.apply(x, _scalar(scaling, x), _scalar(radius, x), delta)


def angles_to_cartesian(angles: Tensor, radius: float | Tensor = 1.0) -> Tensor:
    """Turn hyperspherical angles into points.

    `x_k = radius * cos(a_k) * prod_{j<k} sin(a_j)` for k = 1..n, and `x_{n+1} = radius * prod_j sin(a_j)`.

    Args:
        angles: Angles in radians, of shape (..., n), any real values.
        radius: Norm of the result; a number, or a tensor that broadcasts against the leading axes with a last axis of
            length 1.

    Returns:
        Points of shape (..., n + 1).

    Raises:
        TypeError: If `angles` is not of a floating dtype.
        ValueError: If `angles` has no axis or an empty last one.
    """
    _check_points(angles, least=1)
    return _AnglesToCartesian.apply(angles) * radius


def cartesian_to_angles(points: Tensor) -> Tensor:
    """Turn points into hyperspherical angles, the inverse of `angles_to_cartesian` whatever the radius.

    Args:
        points: Points of shape (..., n + 1) with n >= 1, of any norm.

    Returns:
        Angles in radians of shape (..., n): the first n - 1 in [0, pi], the last in [-pi, pi]. Where an angle is not
        determined (all later coordinates are zero) it is 0 or pi by the sign of its coordinate, with gradient zero.

    Raises:
        TypeError: If `points` is not of a floating dtype.
        ValueError: If the last axis of `points` is shorter than 2.
    """
    _check_points(points, least=2)
    return _CartesianToAngles.apply(points)


class _Spherize(torch.autograd.Function):
    """Keeps its input and its output for the backward pass and nothing else."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scaling: Tensor, radius: Tensor, delta: float) -> Tensor:
        size = x.shape[-1]
        low = _smallest_angle(size, delta)
        blocks = []
        for (block,) in _row_blocks(x):
            logits = scaling * block.to(scaling.dtype)
            cosine = torch.sin((math.pi / 2 - low) * torch.sigmoid(-logits))
            if low > math.pi / 4:
                log_sine_squared = torch.log1p(-cosine.square())
            else:
                # With few axes an angle may come near 0, where 1 - cos^2 would cancel; the sine itself does not.
                log_sine_squared = 2 * torch.log(torch.sin(low + (math.pi / 2 - low) * torch.sigmoid(logits)))
            log_product = F.pad(log_sine_squared.cumsum(-1, dtype=_accumulator(x)), (1, 0)).mul(0.5)
            points = F.pad(cosine, (0, 1), value=1.0) * log_product.to(cosine.dtype).exp() * radius
            blocks.append(points.to(x.dtype))
        return _join(blocks).reshape(*x.shape[:-1], size + 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, scaling, radius, delta = inputs
        ctx.save_for_backward(x, scaling, radius, output)
        ctx.delta = delta

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, scaling, radius, output = ctx.saved_tensors
        low = _smallest_angle(x.shape[-1], ctx.delta)
        span = math.pi / 2 - low
        grads, grad_scaling, grad_radius = [], torch.zeros_like(scaling), torch.zeros_like(radius)
        for values, points, grad_points in _row_blocks(x, output, grad):
            values = values.to(scaling.dtype)
            logits = scaling * values
            rising, falling = torch.sigmoid(logits), torch.sigmoid(-logits)
            # Both are accurate relative to their own size, so neither ratio loses digits at either end.
            cosine = torch.sin(span * falling).clamp_min(torch.finfo(scaling.dtype).tiny)
            sine = torch.sin(low + span * rising)
            weighted = grad_points.to(scaling.dtype) * points.to(scaling.dtype)
            later = _sum_of_later(weighted, _accumulator(x))
            grad_angles = cosine / sine * later - sine / cosine * weighted[..., :-1]
            grad_logits = grad_angles * (rising * falling * span)
            grads.append((scaling * grad_logits).to(x.dtype))
            if ctx.needs_input_grad[1]:
                grad_scaling = grad_scaling + (grad_logits * values).sum()
            if ctx.needs_input_grad[2]:
                grad_radius = grad_radius + weighted.sum() / radius
        return _join(grads).reshape(x.shape), grad_scaling, grad_radius, None


class _AnglesToCartesian(torch.autograd.Function):
    """Points of norm 1; keeps only its input for the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(angles: Tensor) -> Tensor:
        cosine, _, product = _angle_terms(angles)
        return (F.pad(cosine, (0, 1), value=1.0) * product).to(angles.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (angles,) = ctx.saved_tensors
        cosine, sine, product = _angle_terms(angles)
        grad = grad.to(product.dtype)
        later = _sum_of_later(F.pad(cosine, (0, 1), value=1.0) * product * grad, product.dtype)
        return (cosine / sine * later - sine * product[..., :-1] * grad[..., :-1]).to(angles.dtype)


class _CartesianToAngles(torch.autograd.Function):
    """Keeps only its input for the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(points: Tensor) -> Tensor:
        wide = points.to(_accumulator(points))
        rest = _sum_of_later(wide.square(), wide.dtype).sqrt()
        # The last angle keeps the sign of the last coordinate: it runs over the whole circle.
        opposite = torch.cat([rest[..., :-1], wide[..., -1:]], dim=-1)
        return torch.atan2(opposite, wide[..., :-1]).to(points.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (points,) = ctx.saved_tensors
        wide = points.to(_accumulator(points))
        head, rest_squared = wide[..., :-1], _sum_of_later(wide.square(), _accumulator(points))
        determined = rest_squared > 0
        rest = torch.where(determined, rest_squared, 1.0).sqrt()
        pull = torch.where(determined, grad.to(wide.dtype) / (head.square() + rest.square()), 0.0)
        # The last angle is atan2 of a signed coordinate: its two partial derivatives follow from the same expressions.
        sign = torch.cat([torch.ones_like(rest[..., :-1]), wide[..., -1:].sign()], dim=-1)
        pull = pull * sign
        earlier = F.pad((pull * head / rest).cumsum(-1), (1, 0))
        return (wide * earlier - F.pad(pull * rest, (0, 1))).to(points.dtype)


def _angle_terms(angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cosines (..., n), sines (..., n) and the products of earlier sines (..., n + 1), in the accumulation dtype.

    A sine of exactly zero is replaced by 1e-100: too small to show in a product, large enough to divide out again,
    which makes the closed-form gradient exact there too.
    """
    wide = angles.to(_accumulator(angles))
    sine = torch.sin(wide)
    if wide.dtype == torch.float64:
        sine = torch.where(sine.abs() < 1e-100, 1e-100, sine)
    return torch.cos(wide), sine, F.pad(sine.cumprod(-1), (1, 0), value=1.0)


def _smallest_angle(size: int, delta: float) -> float:
    return min(math.asin(delta ** (1.0 / size)), 0.99 * math.pi / 2)


def _sum_of_later(terms: Tensor, accumulator: torch.dtype) -> Tensor:
    """For each axis but the last the sum of all later terms: (..., n + 1) -> (..., n)."""
    return terms[..., 1:].flip(-1).cumsum(-1, dtype=accumulator).flip(-1).to(terms.dtype)


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64  # Metal has no float64


def _scalar(value: float | Tensor, x: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"scaling and radius must be numbers or tensors of one element; got {tuple(value.shape)}.")
        return value.reshape(()).to(dtype)
    return torch.full((), value, dtype=dtype, device=x.device)


def _row_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flatten the leading axes and yield matching blocks of rows.

    On the CPU a block's intermediate results stay in cache; on other devices blocks only bound the memory. A compiler
    fuses the whole and gets it in one piece.
    """
    rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    if torch.compiler.is_compiling():
        yield tuple(rows)
        return
    elements = 2**16 if rows[0].device.type == "cpu" else 2**24
    yield from zip(*(r.split(max(1, elements // rows[0].shape[-1])) for r in rows), strict=True)


def _join(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _check_points(x: Tensor, least: int) -> None:
    if not x.is_floating_point():
        raise TypeError(f"expected a tensor of a floating dtype; got {x.dtype}. Convert it with .float().")
    if x.ndim == 0 or x.shape[-1] < least:
        raise ValueError(f"the last axis must have at least {least} element(s); got shape {tuple(x.shape)}.")
