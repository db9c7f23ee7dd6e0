"""Expansions of the modified Bessel functions, for large orders and for concentrations far above the dimension.

For large orders and any argument this is Debye's uniform expansion. Hankel's expansion of the mean resultant length in
powers of 1 / kappa, `A = 1 + sum_k b_k / kappa^k`, is for concentrations far above the dimension. In few dimensions the
recurrence from Debye's expansion loses digits of `1 - A` and A' there, while no term of Hankel's expansion cancels.

Reference:
    NIST Digital Library of Mathematical Functions, 10.41.3 and 10.41.9 (Debye), 10.40.1 (Hankel). The coefficients of
    Hankel's quotient follow from `A' = 1 - A^2 - (d - 1) A / kappa`.
"""

import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.polynomial.polynomial import polyadd, polyder, polydiv, polyint, polymul, polysub
from torch import Tensor

from hf_sphere.geometry.decorators import cache_constants

Coefficients = list[Any]
"""Coefficients in ascending order, as numbers or as 0-dim tensors."""

HANKEL_TERMS = 12


class Series(NamedTuple):
    """Debye's expansion of log I at a large order m, truncated to the precision of a dtype.

    With s = sqrt(m^2 + kappa^2) and p = m / s the log-partition function is
    `s - m - m log((m + s) / 2m) - log(s / m) / 2 + P(p) - P(1)`, where P is a polynomial. The other functions are its
    derivatives.

    Attributes:
        order: The order m of the expansion.
        steps: Number of recurrence steps from m down to the requested order.
        quotient: Coefficients of (P(p) - P(1)) / (p - 1).
        first: Coefficients of 1/2 + p P'(p).
        second: Coefficients of p (p P')'(p).
    """

    order: float
    steps: int
    quotient: Coefficients
    first: Coefficients
    second: Coefficients

    def partition_and_ratio(self, square: Tensor, inverse_root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Terms of the log-partition function `rise - decrease`, and A / kappa, at order m from kappa^2 and 1 / s.

        The rise is s - m. All are also accurate for tiny kappa. Uses few passes over memory, since losses spend most of
        their time here.
        """
        p = inverse_root * self.order
        inverse_sum = (square * inverse_root).add_(p, alpha=self.order).add_(self.order).reciprocal_()  # 1 / (s + m)
        rise = square * inverse_sum
        decrease = (rise * (0.5 / self.order)).log1p_().mul_(self.order)
        decrease.add_((rise * (1 / self.order)).log1p_(), alpha=0.5)
        decrease.add_(evaluate(self.quotient, p).mul_(rise).mul_(inverse_root))
        ratio = evaluate(self.first, p).mul_(inverse_root).mul_(inverse_root)
        return rise, decrease, inverse_sum.sub_(ratio)

    def complement(self, concentration: Tensor, root: Tensor) -> Tensor:
        """1 - A at order m, without cancellation."""
        p = self.order / root
        first = self.order * (1 + self.order / (root + concentration)) / (root + self.order)
        return first + concentration * evaluate(self.first, p) / root.square()

    def ratio(self, root: Tensor) -> Tensor:
        """A / kappa at order m."""
        return 1 / (root + self.order) - evaluate(self.first, self.order / root) / root.square()

    def derivative(self, root: Tensor) -> Tensor:
        """A' at order m, without cancellation."""
        p = self.order / root
        numerator = (1 - p.square()) * evaluate(self.second, p)
        numerator = numerator + evaluate(self.first, p) * (1 - 2 * p.square())
        return self.order / (root * (root + self.order)) + numerator / root.square()


def series_for(order: float, dtype: torch.dtype) -> Series:
    """Return the expansion from which the recurrence reaches `order`, with the precision of the dtype."""
    # Operations with 0-dim tensors are twice as fast as with Python numbers, but `torch.compile` requires numbers.
    return (_float_series if torch.compiler.is_compiling() else _tensor_series)(order, dtype)


@cache_constants
def _tensor_series(order: float, dtype: torch.dtype) -> Series:
    order, steps, *polynomials = _float_series(order, dtype)
    return Series(order, steps, *([torch.tensor(c, dtype=dtype, device="cpu") for c in p] for p in polynomials))


@cache_constants
def _float_series(order: float, dtype: torch.dtype) -> Series:
    terms, minimum = (10, 24) if dtype == torch.float64 else (5, 12)
    steps = max(0, math.ceil(minimum - order))
    order += steps
    # At large orders the last terms are below the rounding error; the first five polynomials are below 0.02.
    enough = (k for k in range(1, 4) if 0.02 / order ** (k + 1) < torch.finfo(dtype).eps)
    logs = _log_debye(next(enough, terms))
    total = functools.reduce(polyadd, [d / Fraction(order) ** k for k, d in enumerate(logs, 1)])  # P
    first, second = (total * np.arange(len(total)) ** power for power in (1, 2))  # p P' and p (p P')'
    quotient = polydiv(polysub(total, [total.sum()]), [Fraction(-1), Fraction(1)])[0]  # exact
    return Series(order, steps, *(list(map(float, p)) for p in (quotient, polyadd(first, [Fraction(1, 2)]), second)))


@functools.cache
def _log_debye(terms: int) -> list[np.ndarray]:
    """Exact D_1..D_n with `log(1 + sum_k U_k(p) / m^k) = sum_k D_k(p) / m^k`."""
    half, eighth = Fraction(1, 2), Fraction(1, 8)
    u, logs = [np.array([Fraction(1)])], [np.array([Fraction(0)])]
    for k in range(1, terms + 1):
        # DLMF 10.41.9: U_{k+1} = p^2 (1 - p^2) U_k' / 2 + (1/8) integral from 0 to p of (1 - 5 t^2) U_k(t)
        slope = polymul([0, 0, half, 0, -half], polyder(u[-1]))
        u.append(polyadd(slope, polyint(polymul([eighth, 0, -5 * eighth], u[-1]))))
        # From the derivative of the exponential with respect to 1 / m: k U_k = sum_j j D_j U_{k-j}
        products = [polymul(logs[j], u[k - j]) * Fraction(-j, k) for j in range(1, k)]
        logs.append(functools.reduce(polyadd, products, u[k]))
    return logs[1:]


def evaluate(coefficients: Coefficients, x: Tensor) -> Tensor:
    """Evaluate a polynomial by Horner's scheme, in place after the first step."""
    value = x * coefficients[-1]
    for c in reversed(coefficients[1:-1]):
        value.add_(c).mul_(x)
    return value.add_(coefficients[0])


def is_far(concentration: Tensor, dim: int) -> Tensor:
    """Return where the expansion has the precision of the dtype; checked up to d = 48."""
    return concentration > _far_start(dim, concentration.dtype)


def far_complement(concentration: Tensor, dim: int) -> Tensor:
    """1 - A, where `is_far`; elsewhere any finite number."""
    inverse = concentration.clamp_min(_far_start(dim, concentration.dtype)).reciprocal()
    return inverse * evaluate([-b for b in _hankel_coefficients(dim)], inverse)


def far_derivative(concentration: Tensor, dim: int) -> Tensor:
    """A', where `is_far`; elsewhere any finite number."""
    inverse = concentration.clamp_min(_far_start(dim, concentration.dtype)).reciprocal()
    return inverse * (inverse * evaluate([-k * b for k, b in enumerate(_hankel_coefficients(dim), 1)], inverse))


def _far_start(dim: int, dtype: torch.dtype) -> float:
    return (5 if dtype == torch.float64 else 1) * (11 + 1.2 * dim)


@cache_constants
def _hankel_coefficients(dim: int) -> list[float]:
    """b_1, b_2, ..."""
    b = [Fraction(1)]
    for k in range(1, HANKEL_TERMS + 1):
        b.append(-((dim - k) * b[-1] + sum(b[i] * b[k - i] for i in range(1, k))) / 2)
    return [float(x) for x in b[1:]]
