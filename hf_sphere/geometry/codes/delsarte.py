"""The Delsarte linear programming bound on the largest cosine of a spherical code, with verified certificates.

A certificate is a polynomial f = 1 + sum_k c_k P_k with c_k >= 0, P_k the Gegenbauer polynomials of R^d with
P_k(1) = 1. Its sum over all pairs of K unit vectors is at least K^2. If f <= M at all cosines between two points, then
K <= f(1) + (K - 1) M. Hence if f is below M = (K - f(1)) / (K - 1) on [-1, s), the largest cosine is at least s.
"""

import math
from typing import Any

import numpy as np

DEGREE = 24  # degree of the polynomials; a higher degree would improve the bounds by less than 1e-4
_GRID = 200
_TRIALS = 18
_SLACK = 1e-7
_ROUNDING = 1e-14


def delsarte_cosine(num_points: int, dim: int, start: float) -> float:
    """Lower bound on the largest cosine of K points in R^d by linear programming.

    The bound N(s) on the size of a code with largest cosine s increases with s. The secant method solves N(s) = K from
    the left, and the best bound proved by any of its polynomials is returned.

    Args:
        num_points: Number K of points, up to about 100,000; for more, the program is ill-conditioned.
        dim: Dimension d >= 3.
        start: A proved lower bound, such as Levenshtein's.

    Returns:
        A proved lower bound; `start` if the program does not improve it.

    Reference:
        Delsarte, Goethals and Seidel, "Spherical codes and designs", 1977, theorem 4.3.
    """
    # Slightly below K, because polynomials may slightly exceed 0 between the nodes of the grid.
    target = num_points * (1 - _SLACK)
    proved, trial, nodes = start, start, np.empty(0)
    sizes: dict[float, float] = {}
    for _ in range(_TRIALS):
        coefficients = _best_coefficients(trial, dim, nodes)
        if coefficients is None:
            break
        polynomial = _Polynomial(coefficients, dim)
        sizes.pop(trial, None)  # keeps the entries in the order of the trials
        sizes[trial] = polynomial.at_one
        # Its maxima between the nodes are added as nodes, so that the excess over 0 shrinks quadratically.
        extrema = polynomial.extrema
        nodes = np.concatenate([nodes, extrema[extrema < trial]])
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
        # If the iteration has converged without a proof, a slightly smaller cosine gives one.
        trial = following if abs(following - trial) > 1e-8 else following - 1e-7
    return proved


def _secant_step(sizes: dict[float, float], target: float) -> float:
    """Next iterate of the secant method, from the last two pairs (s, N)."""
    (before, size_before), (last, size_last) = list(sizes.items())[-2:]
    if size_last == size_before:
        return last
    return last + (target - size_last) * (last - before) / (size_last - size_before)


def _best_coefficients(cosine: float, dim: int, extra: np.ndarray) -> np.ndarray | None:
    """Coefficients c_1, c_2, ... that minimize f(1) subject to f <= 0 on a grid in [-1, s]; None without a solution."""
    from scipy.optimize import linprog

    nodes = (1 - np.cos(np.linspace(0, math.pi, _GRID))) / 2 * (cosine + 1) - 1
    values = gegenbauer(np.concatenate([nodes, extra]), dim)[1:]
    # Typed as Any, because these options of HiGHS are missing from the type stubs of scipy.
    options: Any = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    solution = linprog(
        np.ones(DEGREE), A_ub=values.T, b_ub=-np.ones(values.shape[1]), method="highs-ds", options=options
    )
    return None if solution.x is None else np.maximum(solution.x, 0.0)


class _Polynomial:
    """f = 1 + sum_k c_k P_k, with its local extrema in [-1, 1]."""

    def __init__(self, coefficients: np.ndarray, dim: int) -> None:
        self.coefficients, self.dim = np.concatenate([[1.0], coefficients]), dim
        self.at_one = math.fsum(self.coefficients)
        # In the Chebyshev basis the roots of the derivative are accurate; in the monomial basis they are not.
        chebyshev = np.polynomial.chebyshev
        nodes = chebyshev.chebpts1(DEGREE + 1)
        series = chebyshev.chebfit(nodes, self(nodes), DEGREE)
        roots = chebyshev.chebroots(chebyshev.chebder(series))
        # Rounding turns a double root into a complex pair, whose real part is still an extremum.
        real = roots.real[np.abs(roots.imag) < 1e-2]
        self.extrema = np.sort(real[np.abs(real) < 1])

    def __call__(self, t: np.ndarray) -> np.ndarray:
        return self.coefficients @ gegenbauer(np.asarray(t, dtype=float), self.dim)

    def proved_cosine(self, num_points: int, cosine: float) -> float:
        """Largest s for which f proves that K points have a largest cosine of at least s; -1 without a proof.

        Between two extrema f is monotone, so its values there and at the ends locate where it first exceeds M.
        """
        from scipy.optimize import brentq

        # Values of f are accurate to a few ulps of its maximum f(1), by which M is reduced.
        level = (num_points - self.at_one) / (num_points - 1) - _ROUNDING * self.at_one
        places = np.unique(np.concatenate([[-1.0], self.extrema, [cosine, 1.0]]))
        above = self(places) > level
        first = int(above.argmax())
        if first == 0:
            return -1.0 if above[0] else 1.0
        low, high = float(places[first - 1]), float(places[first])
        root = brentq(lambda t: float(self(np.array([t]))[0]) - level, low, high, xtol=1e-15)
        return max(low, root - 1e-14)


def gegenbauer(t: np.ndarray, dim: int) -> np.ndarray:
    """Evaluate the Gegenbauer polynomials of R^d with P_k(1) = 1: (n,) -> (DEGREE + 1, n)."""
    values = [np.ones_like(t), t]
    for k in range(1, DEGREE):
        values.append(((2 * k + dim - 2) * t * values[-1] - k * values[-2]) / (k + dim - 2))
    return np.stack(values)
