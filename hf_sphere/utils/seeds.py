"""Hashes of integers by SplitMix64, for derived seeds and keyed random numbers.

Reference:
    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Bits = TypeVar("Bits", int, "Tensor")

GAMMA = 0x9E3779B97F4A7C15 - 2**64


def splitmix(bits: Bits) -> Bits:
    """Hash the lowest 64 bits of an integer, or each element of an int64 tensor, in place, to as many random bits.

    Products are modulo 2^64, like those of int64; higher bits of a Python integer are to be ignored, before and after.
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)):
        shifted = bits >> shift
        shifted &= 2 ** (64 - shift) - 1  # `>>` copies the sign bit of a tensor, keeps the higher bits of an integer
        bits ^= shifted
        if factor != 1:
            bits *= factor
    return bits


def mix_seed(*numbers: int) -> int:
    """Hash integers to a 63-bit seed; combinations that occur in practice do not collide."""
    state = 0
    for number in numbers:
        state = splitmix(state + number + GAMMA) % 2**64
    return state >> 1
