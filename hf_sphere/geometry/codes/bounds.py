"""Lower bounds on the largest cosine of a spherical code of K points: proved optima, and bounds for any K and d.

The general bounds are Levenshtein's universal bound on the size of a code, inverted, and the Delsarte linear
programming bound with verified certificates. A certificate is a polynomial f = 1 + sum_k c_k P_k with c_k >= 0, P_k the
Gegenbauer polynomials of R^d with P_k(1) = 1. Its sum over all pairs of K unit vectors is at least K^2. If f <= M at
all cosines between two points, then K <= f(1) + (K - 1) M. Hence if f is below M = (K - f(1)) / (K - 1) on [-1, s), the
largest cosine is at least s.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hf_sphere.geometry.checks import check_integer
from hf_sphere.geometry.codes.catalogue import CATALOGUE, COHN

DEGREE = 24  # degree of the polynomials; a higher degree would improve the bounds by less than 1e-4
_GRID = 200
_TRIALS = 18
_SLACK = 1e-7
_EVALUATION_ERROR = 1e-14

# Beyond these limits the linear program improves the bound by at most a few thousandths or is ill-conditioned.
_PROGRAM_DIM, _PROGRAM_DEGREE, _PROGRAM_POINTS = 64, 14, 100_000
# Levenshtein's polynomials of higher degree lose accuracy; they are needed only for more than 250,000 points.
_LARGEST_DEGREE = 1000
_ROUNDING = 1e-12

_SCHUETTE = (
    "Schütte and van der Waerden, Auf welcher Kugel haben 5, 6, 7, 8 oder 9 Punkte mit Mindestabstand Eins Platz?, 1951"
)
_DANZER = "Danzer, Finite point-sets on S^2 with minimum distance as large as possible, 1963 (printed 1986)"


def levenshtein_cosine(num_points: int, dim: int) -> float:
    """Lower bound on the largest cosine of K points in R^d, d >= 3, by Levenshtein's bound, accurate to about 1e-13.

    The bound L_m(d, s) on the size of a code with largest cosine s increases with s from D(d, m) to D(d, m + 1) on the
    m-th interval of s, where D is the Delsarte-Goethals-Seidel bound. K determines the interval, and a bracketing root
    finder determines the cosine s with L(d, s) = K.

    Reference:
        Levenshtein, "Universal bounds for codes and designs", Handbook of Coding Theory, 1998, equations 5.48 and 5.49.
    """
    from scipy.optimize import brentq

    degree = 1  # of the polynomial that proves the bound: D(d, m) < K <= D(d, m + 1)
    while design_size(degree + 1, dim) < num_points:
        degree += 1
    low, high = _interval_end(degree - 1, dim), _interval_end(degree, dim)
    log_size = math.log(num_points)

    def excess(cosine: float) -> float:
        return math.log(_size(cosine, degree, dim)) - log_size

    # Rounding may move K outside the interval of the computed sizes.
    if excess(low) >= 0:
        return low
    return high if excess(high) <= 0 else brentq(excess, low, high, xtol=1e-15, rtol=1e-15)


def design_size(strength: int, dim: int) -> int:
    """Lower bound D(d, t) on the size of a spherical t-design, t = `strength` (Delsarte, Goethals and Seidel, 1977)."""
    half, odd = divmod(strength, 2)
    if odd:
        return 2 * math.comb(dim + half - 1, half)
    return math.comb(dim + half - 1, half) + math.comb(dim + half - 2, half - 1)


def _size(cosine: float, degree: int, dim: int) -> float:
    """L_m(d, s)."""
    half, odd = divmod(degree, 2)
    if odd:
        half += 1  # m = 2k - 1
        previous, current = _gegenbauer_pair(cosine, half, dim)
        quotient = (previous - current) / ((1 - cosine) * current)
        return math.comb(half + dim - 3, half - 1) * ((2 * half + dim - 3) / (dim - 1) - quotient)
    current, following = _gegenbauer_pair(cosine, half + 1, dim)
    quotient = (1 + cosine) * (current - following) / ((1 - cosine) * (current + following))
    return math.comb(half + dim - 2, half) * ((2 * half + dim - 1) / (dim - 1) - quotient)


def _gegenbauer_pair(cosine: float, degree: int, dim: int) -> tuple[float, float]:
    """Gegenbauer polynomials P_{k-1} and P_k of R^d at s, with P(1) = 1, up to a common positive factor."""
    previous, current = 1.0, cosine
    for k in range(1, degree):
        previous, current = current, ((2 * k + dim - 2) * cosine * current - k * previous) / (k + dim - 2)
        # Rescaled, since they decay quickly in high dimensions and only their ratio is needed.
        scale = max(abs(previous), abs(current))
        previous, current = previous / scale, current / scale
    return previous, current


def _interval_end(degree: int, dim: int) -> float:
    """Upper end of the interval of s for L_m: the largest zero of an adjacent Jacobi polynomial."""
    from scipy.special import roots_jacobi

    half, odd = divmod(degree, 2)
    if degree == 0:
        return -1.0
    return float(roots_jacobi(half + odd, (dim - 1) / 2, (dim - 3) / 2 + (0 if odd else 1))[0][-1])


def delsarte_cosine(num_points: int, dim: int, start: float) -> float:
    """Lower bound on the largest cosine of K points in R^d, d >= 3, by linear programming.

    The bound N(s) on the size of a code with largest cosine s increases with s. The secant method solves N(s) = K from
    the left, and the best bound proved by any of its polynomials is returned: `start`, another proved lower bound, if
    the program does not improve it. For more than about 100,000 points the program is ill-conditioned.

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
        level = (num_points - self.at_one) / (num_points - 1) - _EVALUATION_ERROR * self.at_one
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


class ProvedOptimum(NamedTuple):
    """No `num_points` points in R^`dim` have a largest cosine below `cosine` (rounded down if not in closed form)."""

    num_points: int
    dim: int
    cosine: float
    source: str


PROVED_OPTIMA = (
    ProvedOptimum(7, 3, 0.210138312730, _SCHUETTE),
    ProvedOptimum(8, 3, 0.261203874963, _SCHUETTE),
    ProvedOptimum(9, 3, 1 / 3, _SCHUETTE),
    ProvedOptimum(10, 3, 0.404394325216, _DANZER),
    ProvedOptimum(11, 3, 1 / math.sqrt(5), _DANZER),
    ProvedOptimum(13, 3, 0.542636486829, "Musin and Tarasov, The strong thirteen spheres problem, 2012"),
    ProvedOptimum(14, 3, 0.563950300360, "Musin and Tarasov, The Tammes problem for N = 14, 2015"),
    ProvedOptimum(24, 3, 0.723078468333, "Robinson, Arrangement of 24 points on a sphere, 1961"),
    ProvedOptimum(1024**2 + 2048, 1024, 1 / 32, COHN),
)
"""Optima increase with the number of points and decrease with the dimension, so each bounds many other cases."""


@lru_cache(maxsize=4096)
def separation_bound(num_points: int, dim: int) -> float:
    """Best known lower bound on the largest cosine between any K unit vectors in R^d.

    Tight for K <= 2 d (simplex and cross-polytope), for d <= 2, and wherever an optimal code is known. Otherwise it is
    the maximum of Levenshtein's bound, the Delsarte linear programming bound and the proved optima of fewer points or
    more dimensions. It increases with K and decreases with d, and rounding errors are below 1e-12.

    Args:
        num_points: Number K >= 2 of points.
        dim: Dimension d >= 1.

    Returns:
        A cosine in [-1, 1].

    Raises:
        ValueError: If K is below 2 or d below 1.

    Reference:
        Rankin, "The closest packing of spherical caps in n dimensions", 1955; Levenshtein, "Universal bounds for codes
        and designs", 1998; Delsarte, Goethals and Seidel, "Spherical codes and designs", 1977. Welch's bound
        applies to the largest absolute value of a cosine and is not a bound here.
    """
    num_points, dim = check_integer("num_points", num_points, 2), check_integer("dim", dim, 1)
    if num_points <= dim + 1:
        return -1.0 / (num_points - 1)
    if dim == 1:
        return 1.0  # the sphere has only two points
    if num_points <= 2 * dim:
        return 0.0
    if dim == 2:
        return math.cos(2 * math.pi / num_points)
    return max(_program_bound(num_points, dim), _proved_bound(num_points, dim))


def _program_bound(num_points: int, dim: int) -> float:
    """Levenshtein's bound, improved by the linear program where it is well-conditioned."""
    start = levenshtein_cosine(min(num_points, design_size(_LARGEST_DEGREE, dim)), dim) - _ROUNDING
    if dim > _PROGRAM_DIM:
        return start
    # The bound for the largest number of points that the program supports also holds for more points.
    return max(start, _delsarte_bound(min(num_points, _PROGRAM_POINTS, design_size(_PROGRAM_DEGREE, dim)), dim))


@lru_cache(maxsize=4096)
def _delsarte_bound(num_points: int, dim: int) -> float:
    return delsarte_cosine(num_points, dim, levenshtein_cosine(num_points, dim) - _ROUNDING)


def _proved_bound(num_points: int, dim: int) -> float:
    """Largest proved optimum of at most K points in at least d dimensions."""
    known = [(optimum.num_points, optimum.dim, optimum.cosine) for optimum in PROVED_OPTIMA]
    known += [(code.size, code.dim, code.cosine) for code in CATALOGUE if code.optimal]
    return max((cosine for size, width, cosine in known if size <= num_points and width >= dim), default=-1.0)
