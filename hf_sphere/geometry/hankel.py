"""Hankel's expansion of the mean resultant length in powers of 1 / kappa, for concentrations far above the dimension.

`A = 1 + sum_k b_k / kappa^k`. In few dimensions the recurrence from Debye's expansion loses digits of `1 - A` and A'
there, while no term of this expansion cancels.

Reference:
    NIST Digital Library of Mathematical Functions, 10.40.1. The coefficients of the quotient follow from
    `A' = 1 - A^2 - (d - 1) A / kappa`.
"""

from fractions import Fraction

import torch
from torch import Tensor

from hf_sphere.geometry.constants import cache_constants
from hf_sphere.geometry.debye import evaluate

TERMS = 12


def is_far(concentration: Tensor, dim: int) -> Tensor:
    """Return where the expansion has the precision of the dtype; checked up to d = 48."""
    return concentration > _start(dim, concentration.dtype)


def complement(concentration: Tensor, dim: int) -> Tensor:
    """1 - A, where `is_far`; elsewhere any finite number."""
    inverse = concentration.clamp_min(_start(dim, concentration.dtype)).reciprocal()
    return inverse * evaluate([-b for b in _coefficients(dim)], inverse)


def derivative(concentration: Tensor, dim: int) -> Tensor:
    """A', where `is_far`; elsewhere any finite number."""
    inverse = concentration.clamp_min(_start(dim, concentration.dtype)).reciprocal()
    return inverse * (inverse * evaluate([-k * b for k, b in enumerate(_coefficients(dim), 1)], inverse))


def _start(dim: int, dtype: torch.dtype) -> float:
    return (5 if dtype == torch.float64 else 1) * (11 + 1.2 * dim)


@cache_constants
def _coefficients(dim: int) -> list[float]:
    """b_1, b_2, ..."""
    b = [Fraction(1)]
    for k in range(1, TERMS + 1):
        b.append(-((dim - k) * b[-1] + sum(b[i] * b[k - i] for i in range(1, k))) / 2)
    return [float(x) for x in b[1:]]
