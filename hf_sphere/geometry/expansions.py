"""Polynomials for the errors of elementary bounds of the Bessel functions, fitted once per dimension.

With m = (d - 1) / 2 and s = sqrt(m^2 + kappa^2), the functions `kappa / (s + m)` and `s - m - m log((s + m) / 2m)`
agree with the mean resultant length and the log-partition function at 0 and, up to terms of order 1 / kappa^2 and a
constant, at infinity. They are too large by `m kappa h / s^3` and `q (s - m) / s`, where h is a smooth function of the
concentration, from (d - 1) / 4d at 0 to 1/2 at infinity, and q is the mean of h over m / s from its value to 1.

The differences of both from their value at 0, divided by (s - m) / s, are interpolated by polynomials in
`x = (c - s + m) / (c + s - m)` with c = d + 3, which maps all concentrations to the interval from -1 to 1. The
truncation error is below that of rounding. The exact values, with more than 20 digits, come from Debye's uniform
expansion at a large order and the backward recurrence of the ratios `r_n = I_{n+1} / I_n = kappa / (2 (n + 1) + kappa
r_{n+1})`.

Reference:
    NIST Digital Library of Mathematical Functions, 10.41.3 and 10.41.9 (expansion), 10.29.1 (recurrence).
"""

import decimal
import functools
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.polynomial.chebyshev import cheb2poly
from numpy.polynomial.polynomial import polyadd, polyder, polyint, polymul, polyval
from torch import Tensor

from hf_sphere.geometry.decorators import cache_constants, number

DIGITS, TERMS, LEAST_ORDER = 50, 16, 40
"""Digits of the computation, terms of Debye's expansion, and the smallest order at which it is used."""

NODES = 64
"""Interpolation nodes, a power of 2; more than the coefficients that remain in any dimension."""

HALVED = 4
"""Up to this dimension each half of the interval has its own polynomials, in 2 x - 1 and 2 x + 1."""

GROUPS = 4
"""Groups of coefficients that are evaluated together on devices other than the CPU; a power of 2."""


def evaluate(rise: Tensor, fraction: Tensor, dim: int, both: bool = False) -> tuple[Tensor, ...]:
    """Return (m h,), or (q, m h) if `both`, at s - m and (s - m) / s."""
    minus_one = number(-1.0, rise.dtype, rise.device)
    x = torch.addcdiv(minus_one, minus_one, rise + (dim + 3), value=-2 * (dim + 3))
    upper = None
    if dim <= HALVED:
        upper = x >= 0
        x = torch.add(2 * x + 1, upper, alpha=-2)
    first = 0 if both else 1
    if torch.compiler.is_compiling():  # the compiler fuses all operations, but requires numbers
        numbers = [part[first:] for part in _coefficients(dim, x.dtype)]
        rows = [[_horner(half, x).mul_(fraction).add_(c) for half in row] for c, row in zip(*numbers, strict=True)]
        return tuple(row[0] if upper is None else torch.where(upper, row[0], row[1]) for row in rows)
    on_cpu = x.device.type == "cpu"
    starts, *coefficients = _tensors(dim, first, 1 if on_cpu else GROUPS, x.dtype, x.device, x.ndim)
    if on_cpu:
        values = _horner(coefficients, x)[0].mul_(fraction).add_(starts)
    else:
        values = torch.addcmul(starts, _grouped(coefficients, x), fraction)
    return (values[0] if upper is None else torch.where(upper, values[0], values[1])).unbind()


def _horner(coefficients: Sequence[Any], x: Tensor) -> Tensor:
    """Evaluate a polynomial in place after the first step, since allocations take longer than the operations."""
    value = x * coefficients[-1]
    for c in coefficients[-2:0:-1]:
        value.add_(c).mul_(x)
    return value.add_(coefficients[0])


def _grouped(coefficients: Sequence[Tensor], x: Tensor) -> Tensor:
    """Evaluate a polynomial with few kernels: coefficients k, k + G, k + 2 G, ... together as a polynomial in x^G."""
    powers = [x]
    while 2 ** len(powers) <= GROUPS:
        powers.append(powers[-1].square())
    value, power = coefficients[-1], powers.pop()
    for c in coefficients[-2::-1]:
        value = torch.addcmul(c, value, power)
    for power in reversed(powers):
        low, high = value.chunk(2)
        value = torch.addcmul(low, high, power)
    return value[0]


@cache_constants
def _tensors(
    dim: int, first: int, groups: int, dtype: torch.dtype, device: torch.device, ndim: int
) -> tuple[Tensor, ...]:
    """Values at a concentration of 0, (rows, 1, ..., 1), and coefficients, each (groups, halves, rows, 1, ..., 1)."""
    starts, table = (torch.tensor(part[first:], dtype=dtype, device="cpu") for part in _coefficients(dim, dtype))
    table = F.pad(table, (0, -table.shape[-1] % groups)).unflatten(-1, (-1, groups)).permute(2, 3, 1, 0)
    index = (..., *[None] * ndim)
    return starts[index].to(device), *table[index].contiguous().to(device).unbind()


@cache_constants
def _coefficients(dim: int, dtype: torch.dtype) -> tuple[list[float], list[list[list[float]]]]:
    """Values of q and m h at a concentration of 0, and the coefficients in each half in ascending order."""
    scale = np.abs(_chebyshev_coefficients(dim).astype(float))
    needed = (scale > torch.finfo(dtype).eps / 20).any(axis=(0, 1)).nonzero()[0].max() + 1  # without rounding errors
    half = (dim - 1) / 2
    with decimal.localcontext(prec=DIGITS):
        table = _chebyshev_coefficients(dim) * np.array([[[1]], [[Decimal(half)]]])
        rows = [[list(map(float, cheb2poly(h))) for h in row] for row in table[..., :needed]]
    return [half / (2 * dim), half**2 / (2 * dim)], rows


@functools.cache
def _chebyshev_coefficients(dim: int) -> np.ndarray:
    """Interpolate q and h by Chebyshev polynomials: (2, 1 or 2, NODES)."""
    with decimal.localcontext(prec=DIGITS):
        # Cosines of all multiples of pi / (2 NODES), by halving an angle and the recurrence of multiples.
        cosine = Decimal(0)
        for _ in range(NODES.bit_length() - 1):
            cosine = ((1 + cosine) / 2).sqrt()
        cosines = [Decimal(1), cosine]
        while len(cosines) < 4 * NODES:
            cosines.append(2 * cosine * cosines[-1] - cosines[-2])
        angles = np.outer(np.arange(NODES), 2 * np.arange(NODES) + 1) % (4 * NODES)
        basis = np.array(cosines, dtype=object)[angles]
        nodes = basis[1]
        halves = [(nodes + 1) / 2, (nodes - 1) / 2] if dim <= HALVED else [nodes]
        rise = [(dim + 3) * (1 - x) / (1 + x) for x in halves]
        values = np.array([_exact_values(dim, r) for r in rise]).swapaxes(0, 1)  # (2, halves, NODES)
        coefficients = values @ basis.T * 2 / NODES
        coefficients[..., 0] /= 2
        return coefficients


def _exact_values(dim: int, rise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute q and h at values (Decimal) of s - m."""
    m = Decimal(dim - 1) / 2
    s, square = rise + m, rise * (rise + 2 * m)
    steps = max(0, LEAST_ORDER - dim // 2)
    order = Decimal(dim) / 2 - 1 + steps
    root = np.sqrt(square + order**2)
    p = order / root
    logs = [np.array([Decimal(c.numerator) / c.denominator for c in d]) for d in _log_debye(TERMS)]
    total = functools.reduce(polyadd, [d / order**k for k, d in enumerate(logs, 1)])
    # The log-partition function at the large order is s - m - log(growth) + correction, and A / kappa is the ratio.
    ratio = 1 / (root + order) - (Decimal("0.5") + polyval(p, total * np.arange(len(total)))) / root**2
    correction = root - order + polyval(p, total) - total.sum()
    log_growth = order * _log((root + order) / (2 * order)) + _log(root / order) / 2
    product = 1
    for _ in range(steps):
        factor = square * ratio
        product = product * (1 + factor / (2 * order))
        ratio = 1 / (2 * order + factor)
        order -= 1
    log_partition = correction - log_growth + _log(product + 0 * s)
    bound = rise - m * _log((s + m) / (2 * m))
    q, h = (bound - log_partition) * s / rise, (1 / (s + m) - ratio) * s**3 / m
    return (q - m / (2 * dim)) * s / rise, (h - m / (2 * dim)) * s / rise


_log = np.frompyfunc(Decimal.ln, 1, 1)


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
