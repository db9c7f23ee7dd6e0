"""Hyperspherical and Cartesian coordinates, and the spherization map.

Every function maps along the last axis, with a gradient of linear complexity, that of the spherization in closed form.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.checks import check_floating, is_batched
from hf_sphere.utils.modules import is_exporting, widest_dtype


def spherize(x: Tensor, scaling: float | Tensor = 1.0, radius: float | Tensor = 1.0, delta: float = 1e-6) -> Tensor:
    r"""Map unconstrained values onto the non-negative orthant of a sphere.

    Each value is mapped to an angle, `theta_i = (pi/2 - phi) * sigmoid(scaling * x_i) + phi`, and the angles to a point
    of norm `radius`: `y_k = radius * cos(theta_k) * prod_{j<k} sin(theta_j)`, `y_{n+1} = radius * prod_j sin(theta_j)`.
    The smallest angle `phi = min(asin(delta^(1/n)), 0.99 * pi/2)` keeps the last coordinate above `radius * delta`, so
    that the product does not vanish in high dimensions.

    Computed in at least float32, with the products of sines accumulated in float64, and returned in the dtype of `x`.
    Twice differentiable with respect to `x`, `scaling` and `radius`.

    Args:
        x: Values, (..., n), of a floating-point dtype.
        scaling: Slope of the sigmoid; a number or a tensor with one element.
        radius: Norm of the result, positive; a number or a tensor with one element.
        delta: Lower bound of the product of all sines, in (0, 1).

    Returns:
        Points, (..., n + 1), of norm `radius` with non-negative coordinates.

    Raises:
        TypeError: If `x` does not have a floating-point dtype.
        ValueError: If `x` has no values in its last axis, `delta` is outside (0, 1), or a `radius` given as a number is
            not positive.

    Reference:
        Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022, equations 3 to 6.

    Example:
        >>> spherize(torch.randn(2, 63), radius=5.0).norm(dim=-1).round()
        tensor([5., 5.])
    """
    check_floating("x", x)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have the shape (..., n) with n >= 1; got {tuple(x.shape)}.")
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must lie between 0 and 1 (exclusive); got {delta}. The usual value is 1e-6.")
    if not isinstance(radius, Tensor) and not radius > 0.0:
        raise ValueError(f"radius must be positive; got {radius}.")
    low = min(math.asin(delta ** (1.0 / x.shape[-1])), 0.99 * math.pi / 2)
    slope, length = _scalar(scaling, x), _scalar(radius, x)
    if not is_exporting():
        return _Spherize.apply(x, slope, length, low)
    # ONNX has no cumulative product, so sums of logarithms in float64. As in `_spherize_in_blocks`: the logarithm of
    # sin^2 = 1 - cos^2 is accurate even where the sine is close to 1.
    logits = x.to(slope.dtype) * slope
    cosine = torch.sin(torch.sigmoid(-logits) * (math.pi / 2 - low)).to(widest_dtype(x))
    squares = 1 - cosine.square() if low > math.pi / 4 else _sine(logits, low).to(cosine.dtype).square()
    product = F.pad((0.5 * squares.log().cumsum(-1)).exp(), (1, 0), value=1.0)
    return (length.abs() * product * F.pad(cosine, (0, 1), value=1.0)).to(x.dtype)


def angles_to_cartesian(angles: Tensor, radius: float | Tensor = 1.0) -> Tensor:
    """Convert hyperspherical angles to Cartesian coordinates.

    `x_k = radius * cos(a_k) * prod_{j<k} sin(a_j)` for k = 1..n, and `x_{n+1} = radius * prod_j sin(a_j)`.

    Args:
        angles: Angles in radians, (..., n), any real values.
        radius: Norm of the result; a number, or a tensor (..., 1) that broadcasts with the leading axes.

    Returns:
        Points, (..., n + 1).

    Raises:
        TypeError: If `angles` does not have a floating-point dtype.

    Example:
        >>> angles_to_cartesian(torch.tensor([0.5, 1.0]), radius=2.0).norm().round()
        tensor(2.)
    """
    check_floating("angles", angles)
    wide = angles.to(widest_dtype(angles))
    product = F.pad(wide.sin().cumprod(-1), (1, 0), value=1.0)
    return (F.pad(wide.cos(), (0, 1), value=1.0) * product).to(angles.dtype) * radius


def cartesian_to_angles(points: Tensor) -> Tensor:
    """Convert Cartesian coordinates to hyperspherical angles, the inverse of `angles_to_cartesian` for any radius.

    Args:
        points: Points, (..., n + 1) with n >= 1, of any norm.

    Returns:
        Angles in radians, (..., n): the first n - 1 in [0, pi], the last in [-pi, pi]. An angle that is not determined,
        because all later coordinates are zero, is 0 or pi, depending on the sign of its coordinate, with zero gradient.

    Raises:
        TypeError: If `points` does not have a floating-point dtype.

    Example:
        >>> cartesian_to_angles(torch.tensor([1.0, 1.0, 0.0]))
        tensor([0.7854, 0.0000])
    """
    check_floating("points", points)
    wide = points.to(widest_dtype(points))
    squares = wide[..., 1:].square().flip(-1).cumsum(-1).flip(-1)  # of the norms of the later coordinates
    determined = squares > 0
    later = torch.where(determined, torch.where(determined, squares, 1.0).sqrt(), 0.0)
    # The last angle covers the full circle, so it has the sign of the last coordinate.
    sides = torch.cat([later[..., :-1], wide[..., -1:]], dim=-1), wide[..., :-1]
    return torch.atan2(*(torch.where(determined, side, side.detach()) for side in sides)).to(points.dtype)


class _Spherize(torch.autograd.Function):
    """Saves only its input and output for the backward pass."""

    @staticmethod
    def forward(x: Tensor, scaling: Tensor, radius: Tensor, low: float) -> Tensor:
        return _spherize_in_blocks(x, scaling, radius, low)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, scaling, radius, ctx.low = inputs
        ctx.save_for_backward(x, scaling, radius, output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        # The in-place version supports neither compilation nor double backward nor vmap, which are rarely used.
        x, scaling, radius, output = ctx.saved_tensors
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or is_batched(grad_output):
            return *_gradient(grad_output, x, scaling, radius, output, ctx.low), None
        return *_gradient_in_blocks(grad_output, x, scaling, radius, output, ctx.low, ctx.needs_input_grad), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, scaling: Tensor, radius: Tensor, low: float) -> tuple[Tensor, int]:
        if in_dims[1] is None and in_dims[2] is None:
            return _Spherize.apply(x.movedim(in_dims[0], 0), scaling, radius, low), 0
        # One scaling or radius per element, as in an ensemble of models. The batch is small, so a loop is sufficient.
        columns = [
            [tensor] * info.batch_size if dim is None else tensor.unbind(dim)
            for tensor, dim in zip((x, scaling, radius), in_dims, strict=False)
        ]
        return torch.stack([_Spherize.apply(*each, low) for each in zip(*columns, strict=True)]), 0


def _spherize_in_blocks(x: Tensor, scaling: Tensor, radius: Tensor, low: float) -> Tensor:
    """Compute the points block by block, reusing the same buffers."""
    size, dtype = x.shape[-1], scaling.dtype
    result = x.new_empty(*x.shape[:-1], size + 1)
    memory: dict[str, Tensor] = {}
    slope = -scaling
    for values, points in _row_blocks(x, result):
        cosine = _reuse(memory, "cosine", values, size, dtype)
        torch.mul(values.to(dtype), slope, out=cosine)
        cosine.sigmoid_().mul_(math.pi / 2 - low).sin_()
        # Squares of radius * (product of earlier sines). In float64 1 - cos^2 is accurate enough unless an angle is
        # close to 0, which is possible with few axes; then the sine is computed directly.
        squares = _reuse(memory, "squares", values, size + 1, widest_dtype(x))
        squares[:, 0] = radius
        if low > math.pi / 4:
            squares[:, 0].square_()
            negative = _reuse(memory, "negative", values, size, dtype)
            torch.addcmul(torch.zeros_like(scaling), cosine, cosine, value=-1, out=negative)
            squares[:, 1:].copy_(negative).add_(1.0)
        else:
            squares[:, 1:].copy_(_sine(values.to(dtype) * scaling, low))
            squares.square_()
        squares.cumprod_(-1)
        product = points if points.dtype == dtype else _reuse(memory, "product", values, size + 1, dtype)
        product.copy_(squares).sqrt_()
        product[:, :-1].mul_(cosine)
        if product is not points:
            points.copy_(product)
    return result


def _gradient(
    grad_output: Tensor, x: Tensor, scaling: Tensor, radius: Tensor, output: Tensor, low: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients: dL/dtheta_j = cot(theta_j) sum_{k>j} g_k y_k - tan(theta_j) g_j y_j, times the sigmoid's slope."""
    values = x.to(scaling.dtype)
    logits = values * scaling
    # Both have full relative accuracy, so neither quotient loses digits at either end.
    rising, falling = torch.sigmoid(logits), torch.sigmoid(-logits)
    cosine = torch.sin(falling * (math.pi / 2 - low)).clamp_min(torch.finfo(scaling.dtype).tiny)
    tangent = (torch.sqrt(1 - cosine * cosine) if low > math.pi / 4 else _sine(logits, low)) / cosine
    weighted = grad_output.to(scaling.dtype) * output.to(scaling.dtype)
    sums = weighted.cumsum(-1, dtype=widest_dtype(x))
    # The coordinates decrease by at most a factor delta, so a difference of sums is accurate enough.
    later = (sums[..., -1:] - sums[..., :-1]).to(scaling.dtype)
    grad_logits = (later / tangent - tangent * weighted[..., :-1]) * rising * falling * (math.pi / 2 - low)
    grad_radius = sums[..., -1].sum().to(radius.dtype) / radius
    return (grad_logits * scaling).to(x.dtype), (grad_logits * values).sum(), grad_radius


def _gradient_in_blocks(
    grad_output: Tensor, x: Tensor, scaling: Tensor, radius: Tensor, output: Tensor, low: float, needs: tuple[bool, ...]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Like `_gradient`, but block by block in the same buffers; of scaling and radius only if `needs[1:3]`."""
    size, dtype = x.shape[-1], scaling.dtype
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    grad_scaling, grad_radius = (torch.zeros_like(scaling) if needed else None for needed in needs[1:3])
    memory: dict[str, Tensor] = {}
    factor, slope = math.pi / 2 - low, -scaling
    smallest = torch.full_like(scaling, torch.finfo(dtype).tiny)  # keeps the cosine, a divisor, positive
    for values, points, grad_points, grad_values in _row_blocks(x, output, grad_output, result):
        names = ("falling", "cosine", "tangent")
        falling, cosine, tangent = (_reuse(memory, name, values, size, dtype) for name in names)
        values = values.to(dtype)
        torch.mul(values, slope, out=falling).sigmoid_()
        torch.add(smallest, falling, alpha=factor, out=cosine).sin_()
        if low > math.pi / 4:
            torch.addcmul(torch.ones_like(scaling), cosine, cosine, value=-1, out=tangent).sqrt_()
        else:
            tangent.copy_(_sine(values * scaling, low))
        tangent.div_(cosine)
        weighted = _reuse(memory, "weighted", values, size + 1, dtype)
        torch.mul(grad_points.to(dtype), points.to(dtype), out=weighted)
        # Minus the sum of all comes first, so that each sum is minus that of the later ones.
        sums = _reuse(memory, "sums", values, size + 1, widest_dtype(x))
        sums[:, 0], sums[:, 1:] = weighted[:, -1], weighted[:, :-1]
        total = sums.sum(-1)
        if grad_radius is not None:
            grad_radius += (total.sum() / radius).to(dtype)
        sums[:, 0] = -total
        grad_logits = cosine.copy_(sums.cumsum_(-1)[:, 1:]).div_(tangent)
        grad_logits.addcmul_(tangent, weighted[:, :-1]).mul_(-factor)
        torch.ops.aten.sigmoid_backward.grad_input(grad_logits, falling, grad_input=grad_logits)
        if grad_scaling is not None:
            grad_scaling += torch.mul(grad_logits, values, out=tangent).sum()
        torch.mul(grad_logits, scaling, out=grad_values)
    return result, grad_scaling, grad_radius


def _scalar(value: float | Tensor, x: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    if isinstance(value, Tensor):
        return value.reshape(()).to(dtype)
    return torch.full((), value, dtype=dtype, device=x.device)


def _row_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flatten the leading axes and yield views of matching blocks of rows, which fit in the cache of a CPU."""
    tables = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    rows, columns = tables[0].shape
    if torch.compiler.is_compiling():  # a compiler fuses the operations
        yield tuple(tables)
        return
    step = max(1, (2**17 if tensors[0].device.type == "cpu" else 2**24) // columns)
    for first in range(0, rows, step):
        yield tuple(table[first : first + step] for table in tables)


def _reuse(memory: dict[str, Tensor], name: str, block: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return a named buffer for a block, as allocating takes longer than the arithmetic; the first is the largest."""
    if name not in memory:
        memory[name] = torch.empty((len(block), columns), dtype=dtype, device=block.device)
    return memory[name][: len(block)]


def _sine(logits: Tensor, low: float) -> Tensor:
    """Sine of the angle of a logit, also accurate near 0."""
    return torch.sin(torch.sigmoid(logits) * (math.pi / 2 - low) + low)
