"""The spherization map and its gradient as Triton kernels, each of which reads its inputs and writes its outputs once.

A program computes one row, block by block: forward with a running product of squared sines, backward, from the last
block to the first, with a running sum of what later coordinates contribute. The formulas are those of `coordinates`.
"""

# mypy: disable-error-code="no-untyped-def"
import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _angle(x, scaling, low, span, is_short: tl.constexpr):
    """Sigmoids of both signs, cosine and squared sine of the angles of a block."""
    logits = x * scaling
    rising, falling = 1 / (1 + tl.exp(-logits)), 1 / (1 + tl.exp(logits))
    cosine = tl.sin(falling * span)
    if is_short:  # angles may be close to 0, where 1 - cos^2 cancels
        sine = tl.sin(rising * span + low).to(tl.float64)
        square = sine * sine
    else:
        square = 1 - cosine.to(tl.float64) * cosine.to(tl.float64)
    return rising, falling, cosine, square


@triton.jit
def _forward(x_ptr, y_ptr, scaling_ptr, radius_ptr, n, low, span, block_size: tl.constexpr, is_short: tl.constexpr):
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, block_size)
    scaling, radius = tl.load(scaling_ptr), tl.load(radius_ptr)
    product = tl.full((), 1.0, tl.float64)
    for start in range(0, n, block_size):
        at = start + lane
        x = tl.load(x_ptr + row * n + at, at < n, other=0.0).to(tl.float32)
        _, _, cosine, square = _angle(x, scaling, low, span, is_short)
        square = tl.where(at < n, square, 1.0)
        products = tl.cumprod(square, 0) * product
        product = tl.sum(tl.where(lane == block_size - 1, products, 0.0), 0)
        before = tl.sqrt((products / square).to(tl.float32))  # of earlier sines; those of angles are not 0
        tl.store(y_ptr + row * (n + 1) + at, radius * before * cosine, at < n)
    tl.store(y_ptr + row * (n + 1) + n, radius * tl.sqrt(product.to(tl.float32)))


@triton.jit
def _backward(
    g_ptr, x_ptr, y_ptr, scaling_ptr, grad_ptr, slopes_ptr, sums_ptr, n, low, span,
    block_size: tl.constexpr, is_short: tl.constexpr,
):  # fmt: skip
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, block_size)
    g_ptr, y_ptr, scaling = g_ptr + row * (n + 1), y_ptr + row * (n + 1), tl.load(scaling_ptr)
    total = tl.load(g_ptr + n).to(tl.float64) * tl.load(y_ptr + n).to(tl.float64)
    slope = tl.full((), 0.0, tl.float32)
    blocks = tl.cdiv(n, block_size)
    for index in range(blocks):
        at = (blocks - 1 - index) * block_size + lane
        x = tl.load(x_ptr + row * n + at, at < n, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + at, at < n, other=0.0).to(tl.float32)
        weighted = g * tl.load(y_ptr + at, at < n, other=0.0).to(tl.float32)
        rising, falling, cosine, square = _angle(x, scaling, low, span, is_short)
        tangent = tl.sqrt(square.to(tl.float32)) / (cosine + 1.17549435e-38)
        wide = weighted.to(tl.float64)
        later = total + tl.cumsum(wide, 0, reverse=True) - wide
        total += tl.sum(wide, 0)
        grad_logits = (later.to(tl.float32) / tangent - tangent * weighted) * rising * falling * span
        slope += tl.sum(tl.where(at < n, grad_logits * x, 0.0), 0)
        tl.store(grad_ptr + row * n + at, (grad_logits * scaling).to(grad_ptr.dtype.element_ty), at < n)
    tl.store(slopes_ptr + row, slope)
    tl.store(sums_ptr + row, total.to(tl.float32))


def _options(n: int, low: float) -> dict[str, float]:
    block = min(triton.next_power_of_2(n), 4096)
    short = low <= math.pi / 4
    return {
        "low": low,
        "span": math.pi / 2 - low,
        "block_size": block,
        "is_short": short,
        "num_warps": max(1, block // 256),
    }


def spherize_by_kernel(x: Tensor, scaling: Tensor, radius: Tensor, low: float) -> Tensor:
    """Compute the points (..., n + 1) of values (..., n) in a dtype of at most 32 bits; see `spherize`."""
    n, rows = x.shape[-1], x.contiguous()
    result = x.new_empty(*x.shape[:-1], n + 1)
    if count := x.numel() // n:
        _forward[(count,)](rows, result, scaling, radius, n, **_options(n, low))
    return result


def gradient_by_kernel(
    grad_output: Tensor, x: Tensor, scaling: Tensor, radius: Tensor, output: Tensor, low: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients with respect to x, scaling and radius; see `spherize`."""
    n, count = x.shape[-1], x.numel() // x.shape[-1]
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    slopes, sums = torch.empty((2, count), dtype=torch.float32, device=x.device)
    if count:
        tensors = (tensor.contiguous() for tensor in (grad_output, x, output))
        _backward[(count,)](*tensors, scaling, result, slopes, sums, n, **_options(n, low))
    return result, slopes.sum(), sums.sum() / radius
