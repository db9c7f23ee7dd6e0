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

    @staticmethod
    def forward(x: Tensor, scaling: Tensor, radius: Tensor, delta: float) -> Tensor:
        return _spherize_in_blocks(x, scaling, radius, _smallest_angle(x.shape[-1], delta))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, scaling, radius, delta = inputs
        ctx.save_for_backward(x, scaling, radius, output)
        ctx.low = _smallest_angle(x.shape[-1], delta)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        # In place where nobody will compile, differentiate or batch the gradient itself, which is nearly always.
        x, scaling, radius, output = ctx.saved_tensors
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or is_batched(grad):
            return *_gradient(grad, x, scaling, radius, output, ctx.low), None
        _, learns_scaling, learns_radius, _ = ctx.needs_input_grad
        return *_gradient_in_blocks(grad, x, scaling, radius, output, ctx.low, learns_scaling, learns_radius), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, scaling: Tensor, radius: Tensor, delta: float) -> tuple[Tensor, int]:
        if in_dims[1] is None and in_dims[2] is None:
            return _Spherize.apply(x.movedim(in_dims[0], 0), scaling, radius, delta), 0
        # A scaling or radius for each, as in an ensemble of models: those are few.
        columns = [
            [tensor] * info.batch_size if dim is None else tensor.unbind(dim)
            for tensor, dim in zip((x, scaling, radius), in_dims, strict=False)
        ]
        return torch.stack([_Spherize.apply(*each, delta) for each in zip(*columns, strict=True)]), 0


def _spherize_in_blocks(x: Tensor, scaling: Tensor, radius: Tensor, low: float) -> Tensor:
    """Points of `x`, block by block in the same working memory."""
    size, dtype = x.shape[-1], scaling.dtype
    result = x.new_empty(*x.shape[:-1], size + 1)
    memory: dict[str, Tensor] = {}
    for values, points in _row_blocks(x, result):
        cosine = _reuse(memory, "cosine", values, size, dtype)
        cosine.copy_(values).mul_(-scaling).sigmoid_().mul_(math.pi / 2 - low).sin_()
        # The squares of radius * (product of earlier sines). In float64 1 - cos^2 loses nothing that matters, unless
        # an angle comes near 0, as it can with few axes; then the sine itself is taken.
        squares = _reuse(memory, "squares", values, size + 1, _accumulator(x))
        squares[:, 0] = radius.square()
        if low > math.pi / 4:
            squares[:, 1:].copy_(cosine).square_().sub_(1).neg_()
        else:
            squares[:, 1:] = _sine(values.to(dtype) * scaling, low).square()
        squares.cumprod_(-1)
        product = points if points.dtype == dtype else _reuse(memory, "product", values, size + 1, dtype)
        product.copy_(squares).sqrt_()
        product[:, :-1].mul_(cosine)
        if product is not points:
            points.copy_(product)
    return result


def _gradient(
    grad: Tensor, x: Tensor, scaling: Tensor, radius: Tensor, output: Tensor, low: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with respect to x, scaling and radius by the closed form.

    dL/dtheta_j = cot(theta_j) * sum_{k>j} g_k y_k - tan(theta_j) * g_j y_j, times the slope of the sigmoid.
    """
    values = x.to(scaling.dtype)
    logits = values * scaling
    # Each is accurate relative to its own size, so that neither quotient loses digits at either end.
    rising, falling = torch.sigmoid(logits), torch.sigmoid(-logits)
    cosine = torch.sin(falling * (math.pi / 2 - low)).clamp_min(torch.finfo(scaling.dtype).tiny)
    tangent = (torch.sqrt(1 - cosine * cosine) if low > math.pi / 4 else _sine(logits, low)) / cosine
    weighted = grad.to(scaling.dtype) * output.to(scaling.dtype)
    sums = weighted.cumsum(-1, dtype=_accumulator(x))
    # The points fall off by no more than a factor delta, so that a difference of sums is exact enough.
    later = (sums[..., -1:] - sums[..., :-1]).to(scaling.dtype)
    grad_logits = (later / tangent - tangent * weighted[..., :-1]) * rising * falling * (math.pi / 2 - low)
    grad_radius = sums[..., -1].sum().to(radius.dtype) / radius
    return (grad_logits * scaling).to(x.dtype), (grad_logits * values).sum(), grad_radius


def _gradient_in_blocks(
    grad: Tensor,
    x: Tensor,
    scaling: Tensor,
    radius: Tensor,
    output: Tensor,
    low: float,
    learns_scaling: bool,
    learns_radius: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The steps of `_gradient`, block by block in the same working memory."""
    size, dtype = x.shape[-1], scaling.dtype
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    grad_scaling, grad_radius = torch.zeros_like(scaling), torch.zeros_like(radius)
    memory: dict[str, Tensor] = {}
    for values, points, grad_points, grad_values in _row_blocks(x, output, grad, result):
        slope, cosine, tangent = (_reuse(memory, name, values, size, dtype) for name in ("slope", "cosine", "tangent"))
        slope.copy_(values).mul_(scaling)
        torch.neg(slope, out=cosine)
        if low <= math.pi / 4:
            tangent.copy_(_sine(slope, low))
        slope.sigmoid_().mul_(cosine.sigmoid_())
        cosine.mul_(math.pi / 2 - low).sin_().clamp_min_(torch.finfo(dtype).tiny)
        if low > math.pi / 4:
            torch.mul(cosine, cosine, out=tangent)
            tangent.sub_(1).neg_().sqrt_()
        tangent.div_(cosine)
        weighted = _reuse(memory, "weighted", values, size + 1, dtype)
        weighted.copy_(grad_points).mul_(points)
        sums = _reuse(memory, "sums", values, size + 1, _accumulator(x))
        sums.copy_(weighted).cumsum_(-1)
        if learns_radius:
            grad_radius += (sums[:, -1].sum() / radius).to(dtype)
        sums[:, :-1].sub_(sums[:, -1:]).neg_()
        grad_logits = cosine.copy_(sums[:, :-1]).div_(tangent)
        grad_logits.sub_(tangent.mul_(weighted[:, :-1])).mul_(slope).mul_(math.pi / 2 - low)
        if learns_scaling:
            grad_scaling += torch.mul(grad_logits, values, out=tangent).sum()
        grad_values.copy_(grad_logits.mul_(scaling))
    return result, grad_scaling, grad_radius


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


def is_batched(tensor: Tensor) -> bool:
    """Whether vmap, or a batched call of autograd, hides an axis of the tensor; there is no public way to ask."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def _scalar(value: float | Tensor, x: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"scaling and radius must be numbers or tensors of one element; got {tuple(value.shape)}.")
        return value.reshape(()).to(dtype)
    return torch.full((), value, dtype=dtype, device=x.device)


def _row_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flatten the leading axes and yield views of matching blocks of rows.

    On the CPU a block's working memory stays in cache; on other devices blocks only bound it. A compiler fuses the
    whole and gets it in one piece.
    """
    tables = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    rows, columns = tables[0].shape
    if torch.compiler.is_compiling():
        yield tuple(tables)
        return
    step = max(1, (2**18 if tensors[0].device.type == "cpu" else 2**24) // columns)
    for first in range(0, rows, step):
        yield tuple(table[first : first + step] for table in tables)


def _reuse(memory: dict[str, Tensor], name: str, block: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Working memory for a block; the first block is the largest, and later ones take a part of its memory.

    Asking the system for fresh memory at every step would take longer than the arithmetic.
    """
    rows = block.shape[0]
    if name not in memory:
        memory[name] = torch.empty((rows, columns), dtype=dtype, device=block.device)
    return memory[name] if memory[name].shape[0] == rows else memory[name][:rows]


def _sine(logits: Tensor, low: float) -> Tensor:
    """Sine of the angle that a logit stands for, accurate also near 0."""
    return torch.sin(torch.sigmoid(logits) * (math.pi / 2 - low) + low)


def _check_points(x: Tensor, least: int) -> None:
    if not x.is_floating_point():
        raise TypeError(f"expected a tensor of a floating dtype; got {x.dtype}. Convert it with .float().")
    if x.ndim == 0 or x.shape[-1] < least:
        raise ValueError(f"the last axis must have at least {least} element(s); got shape {tuple(x.shape)}.")
