"""Rounding of updates that are smaller than the spacing of low-precision values."""

from typing import Literal, get_args

import torch
from torch import Tensor

LowPrecision = Literal["nearest", "stochastic", "master"]
LOW_PRECISION: tuple[str, ...] = get_args(LowPrecision)


def is_low(dtype: torch.dtype) -> bool:
    """Return whether a dtype has fewer bits than float32."""
    return dtype.itemsize < 4


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in."""
    return torch.float32 if is_low(dtype) else dtype


def round_stochastically(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round float32 to bfloat16, up or down with probabilities that keep the mean.

    Rounding to nearest loses every step below half the spacing of bfloat16 (1/256 of the value); stochastic rounding
    keeps it on average. Infinities and NaN are kept.

    Args:
        values: float32, any shape.
        generator: On the device of `values`.

    Returns:
        bfloat16, the same shape.
    """
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    # bfloat16 is the upper half of float32: noise in the lower half carries with a probability proportional
    # to the remainder.
    rounded = (bits + noise).bitwise_and_(-(1 << 16)).view(torch.float32).view(values.shape)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
