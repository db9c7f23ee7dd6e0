"""Embeddings on a lattice, such as binary codes and quantized values, whose inner products have no rounding error.

Many neighbors of such embeddings are at equal distances, and rounding errors would break the ties.
"""

import math

import torch
from torch import Tensor

STEP = 2.0**-23  # smallest step of a lattice, relative to the largest value


def power_of_two(largest: Tensor) -> Tensor:
    """Return factors that scale values of these largest magnitudes to about 1 without rounding."""
    number = torch.finfo(largest.dtype)
    return torch.exp2(-torch.frexp(largest.clamp(number.tiny, number.max / 4)).exponent.to(largest.dtype))


def signs_of_codes(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Replace values (N, e) by their signs, if along the axes all are zero or of the same magnitude.

    Normalized binary codes are on no lattice with a power of two as its step.
    """
    magnitudes = values.abs()
    is_code = ((values == 0) | (magnitudes == magnitudes.amax(axes, keepdim=True))).all(axes, keepdim=True)
    return torch.where(is_code, values.sign(), values)


def largest_norm(values: Tensor, axes: tuple[int, ...]) -> float:
    """Return the largest squared norm of rows (N, e), in units of the squared step of their lattice.

    Args:
        values: Values of magnitude at most 4.
        axes: Along these axes values share a step, a power of two.

    Returns:
        An integer, which bounds the multiples that occur in inner products; infinite if the values are on no lattice.
    """
    multiples = values / STEP
    if not (multiples == multiples.round()).all():
        return math.inf
    integers = multiples.long()
    lowest_bits = integers & -integers
    steps = torch.where(lowest_bits > 0, lowest_bits, int(1 / STEP)).amin(axes, keepdim=True)
    return float((integers // steps).double().square().sum(1).max())
