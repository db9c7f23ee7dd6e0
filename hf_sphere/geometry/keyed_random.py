"""Random numbers that are functions of integer keys: the same in any batch, on any device and in compiled code.

The generator is SplitMix64: the number at place i of the stream of a key is a hash of `(key + i) * GAMMA`. Its
arithmetic is modulo 2^64, and so is that of int64 tensors.

Reference:
    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

import math

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64

BITS = {torch.float32: 24, torch.float64: 53}
"""Random bits of a uniform number: those of the significand."""


def keyed_integers(keys: Tensor | int, places: Tensor) -> Tensor:
    """Return the numbers at `places` of the streams of keys, for instance as keys of further streams.

    Args:
        keys: int64, of any shape.
        places: int64, of a shape that broadcasts with that of the keys.

    Returns:
        int64, uniform over all values.
    """
    bits = (keys + places) * GAMMA  # inductor computes `places * GAMMA` of an `arange` with unbounded integers
    # `>>` copies the sign bit, so the copies are masked. In place, this is a third faster.
    bits.bitwise_xor_((bits >> 30).bitwise_and_(2**34 - 1)).mul_(_FIRST)
    bits.bitwise_xor_((bits >> 27).bitwise_and_(2**37 - 1)).mul_(_SECOND)
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(2**33 - 1))


def keyed_uniforms(keys: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uniform numbers in [0, 1), float32 or float64; see `keyed_integers`."""
    bits = BITS[dtype]
    return keyed_integers(keys, places).bitwise_right_shift_(64 - bits).to(dtype).mul_(0.5**bits).add_(0.5)


def keyed_normals(keys: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the first `count` standard normal numbers of the streams of keys: (...) -> (..., count)."""
    pairs = (count + 1) // 2
    uniforms = keyed_uniforms(keys[..., None], torch.arange(2 * pairs, device=keys.device), dtype)
    # Box and Muller's method; 1 - u is never zero.
    radius = (1 - uniforms[..., :pairs]).log_().mul_(-2).sqrt_()
    angle = uniforms[..., pairs:].mul_(2 * math.pi)
    return torch.cat([angle.cos().mul_(radius), angle.sin().mul_(radius)], dim=-1)[..., :count]
