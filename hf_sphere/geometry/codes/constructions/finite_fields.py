"""Arithmetic of small finite fields, as addition and multiplication tables."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

# Irreducible polynomials over GF(2), by degree; bit i is the coefficient of x^i.
_IRREDUCIBLE = {1: 0b11, 2: 0b111, 3: 0b1011, 5: 0b100101, 7: 0b10000011, 9: 0b1000010001}


class FiniteField(NamedTuple):
    """A field with the elements 0..q - 1, where `sums[a, b]` is a + b and `products[a, b]` is a b."""

    sums: np.ndarray
    products: np.ndarray


@lru_cache(maxsize=8)
def prime_field(order: int) -> FiniteField:
    """GF(p) for a prime p."""
    numbers = np.arange(order)
    return FiniteField(np.add.outer(numbers, numbers) % order, np.multiply.outer(numbers, numbers) % order)


@lru_cache(maxsize=8)
def binary_field(degree: int) -> FiniteField:
    """GF(2^n) for n = 1, 2, 3, 5, 7 or 9; bit i of an element is its coefficient of x^i."""
    numbers = np.arange(2**degree)
    products = np.zeros((2**degree, 2**degree), dtype=np.int64)
    shifted = numbers.copy()  # the elements times x^i
    for i in range(degree):
        products ^= np.where(numbers >> i & 1, shifted[:, None], 0)
        shifted = shifted << 1
        shifted = np.where(shifted >> degree & 1, shifted ^ _IRREDUCIBLE[degree], shifted)
    return FiniteField(np.bitwise_xor.outer(numbers, numbers), products)


def power(field: FiniteField, exponent: int) -> np.ndarray:
    """Every element raised to a power, exponent >= 1."""
    numbers = np.arange(len(field.products))
    result = numbers
    for _ in range(exponent - 1):
        result = field.products[result, numbers]
    return result


def trace(degree: int) -> np.ndarray:
    """Absolute trace x + x^2 + x^4 + ... of every element of GF(2^n), 0 or 1."""
    products = binary_field(degree).products
    conjugate = np.arange(2**degree)
    total = np.zeros_like(conjugate)
    for _ in range(degree):
        total ^= conjugate
        conjugate = products[conjugate, conjugate]
    return total
