"""The Delsarte linear programme: bounds on the largest cosine of a spherical code, each with a verified certificate.

A certificate is a polynomial f = 1 + sum_k c_k P_k with c_k >= 0, P_k the Gegenbauer polynomials of R^d with
P_k(1) = 1. Summed over all pairs of K unit vectors it is at least K^2; so if f <= M at every cosine between two points,
K <= f(1) + (K - 1) M. Where f stays below M = (K - f(1)) / (K - 1) on [-1, s), the largest cosine is at least s.
"""

import math
from typing import Any

import numpy as np

DEGREE = 24
"""Degree of the polynomials; more would improve the bounds it is used for by less than 1e-4."""

_GRID = 200
_TRIALS = 18
_SLACK = 1e-7
_ROUNDING = 1e-14


def delsarte_cosine(num_points: int, dim: int, start: float) -> float:
    """Smallest largest cosine of K points in R^d that the linear programme allows.

    The programme's bound N(s) on the size of a code grows with s; the secant method looks for N(s) = K from the left,
    and what each polynomial on the way proves, is kept.

    Args:
        num_points: Number K of points, up to about 100,000 (beyond, the programme is ill-conditioned).
        dim: Dimension d >= 3.
        start: A cosine already proved, such as Levenshtein's.

    Returns:
        A proved cosine, `start` if the programme finds no better one.

    Reference:
        Delsarte, Goethals and Seidel, "Spherical codes and designs", 1977, theorem 4.3.
    """
    # A little below K, so that there is room for what a polynomial exceeds 0 by between two nodes of the grid.
    target = num_points * (1 - _SLACK)
    proved, trial, nodes = start, start, np.empty(0)
    sizes: dict[float, float] = {}
    for _ in range(_TRIALS):
        coefficients = _best_coefficients(trial, dim, nodes)
        if coefficients is None:
            break
        polynomial = _Polynomial(coefficients, dim)
        sizes.pop(trial, None)  # the last two are those of the last trials
        sizes[trial] = polynomial.at_one
        # Its peaks between two nodes become nodes: what it exceeds 0 by shrinks quadratically.
        turns = polynomial.turning_points
        nodes = np.concatenate([nodes, turns[turns < trial]])
        certified = polynomial.proved_cosine(num_points, trial)
        proved = max(proved, certified)
        if polynomial.at_one <= target and certified < trial:
            continue
        if len(sizes) == 1 and polynomial.at_one > target:
            break
        following = _secant_step(sizes, target) if len(sizes) > 1 else proved
        following = min(max(following, proved), (1 + proved) / 2)
        if len(sizes) > 1 and following - proved < 1e-8:
            break
        # Where the search has settled but the polynomial still proves nothing, one for a little less will.
        trial = following if abs(following - trial) > 1e-8 else following - 1e-7
    return proved


def _secant_step(sizes: dict[float, float], target: float) -> float:
    """Where the line through the last two samples (s, N) meets the target."""
    (before, size_before), (last, size_last) = list(sizes.items())[-2:]
    if size_last == size_before:
        return last
    return last + (target - size_last) * (last - before) / (size_last - size_before)


def _best_coefficients(cosine: float, dim: int, extra: np.ndarray) -> np.ndarray | None:
    """Coefficients c_1, c_2, ... of the f <= 0 on a grid in [-1, s] with the smallest f(1); None without a solution."""
    from scipy.optimize import linprog

    nodes = (1 - np.cos(np.linspace(0, math.pi, _GRID))) / 2 * (cosine + 1) - 1
    values = gegenbauer(np.concatenate([nodes, extra]), dim)[1:]
    # A dict by name: scipy warns of options it does not know, and these two are HiGHS's own.
    options: Any = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    solution = linprog(
        np.ones(DEGREE), A_ub=values.T, b_ub=-np.ones(values.shape[1]), method="highs-ds", options=options
    )
    return None if solution.x is None else np.maximum(solution.x, 0.0)


class _Polynomial:
    """f = 1 + sum_k c_k P_k, with the points in [-1, 1] where it turns."""

    def __init__(self, coefficients: np.ndarray, dim: int) -> None:
        self.coefficients, self.dim = np.concatenate([[1.0], coefficients]), dim
        self.at_one = math.fsum(self.coefficients)
        # Chebyshev's basis keeps the roots of the derivative accurate; powers of t would not.
        chebyshev = np.polynomial.chebyshev
        nodes = chebyshev.chebpts1(DEGREE + 1)
        series = chebyshev.chebfit(nodes, self(nodes), DEGREE)
        roots = chebyshev.chebroots(chebyshev.chebder(series))
        # Where two turning points merge, rounding makes them a complex pair: their real part still is such a point.
        real = roots.real[np.abs(roots.imag) < 1e-2]
        self.turning_points = np.sort(real[np.abs(real) < 1])

    def __call__(self, t: np.ndarray) -> np.ndarray:
        return self.coefficients @ gegenbauer(np.asarray(t, dtype=float), self.dim)

    def proved_cosine(self, num_points: int, cosine: float) -> float:
        """Largest s such that f proves that K points have a largest cosine of at least s; -1 if it proves nothing.

        Between two turning points f is monotone, so its values there and at the ends decide where it first exceeds M.
        """
        from scipy.optimize import brentq

        # Every value of f is exact to a few units in the last place of f(1), its largest; M gives that away.
        level = (num_points - self.at_one) / (num_points - 1) - _ROUNDING * self.at_one
        places = np.unique(np.concatenate([[-1.0], self.turning_points, [cosine, 1.0]]))
        above = self(places) > level
        first = int(above.argmax())
        if first == 0:
            return -1.0 if above[0] else 1.0
        low, high = float(places[first - 1]), float(places[first])
        root = brentq(lambda t: float(self(np.array([t]))[0]) - level, low, high, xtol=1e-15)
        return max(low, root - 1e-14)


def gegenbauer(t: np.ndarray, dim: int) -> np.ndarray:
    """Gegenbauer polynomials of R^d with P_k(1) = 1 at the points t, (n,) -> (DEGREE + 1, n)."""
    values = [np.ones_like(t), t]
    for k in range(1, DEGREE):
        values.append(((2 * k + dim - 2) * t * values[-1] - k * values[-2]) / (k + dim - 2))
    return np.stack(values)
