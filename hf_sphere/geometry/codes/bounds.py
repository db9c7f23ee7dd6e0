"""Lower bounds on the largest cosine of a spherical code of K points."""

import math
from functools import lru_cache
from typing import NamedTuple

from hf_sphere.geometry.checks import check_integer
from hf_sphere.geometry.codes.catalogue import CATALOGUE, COHN
from hf_sphere.geometry.codes.delsarte import delsarte_cosine
from hf_sphere.geometry.codes.levenshtein import design_size, levenshtein_cosine

# Beyond these limits the linear program improves the bound by at most a few thousandths or is ill-conditioned.
_PROGRAM_DIM, _PROGRAM_DEGREE, _PROGRAM_POINTS = 64, 14, 100_000
# Levenshtein's polynomials of higher degree lose accuracy; they are needed only for more than 250,000 points.
_LARGEST_DEGREE = 1000
_ROUNDING = 1e-12


class ProvedOptimum(NamedTuple):
    """No `num_points` points in R^`dim` have a largest cosine below `cosine` (rounded down if not in closed form)."""

    num_points: int
    dim: int
    cosine: float
    source: str


_SCHUETTE = (
    "Schütte and van der Waerden, Auf welcher Kugel haben 5, 6, 7, 8 oder 9 Punkte mit Mindestabstand Eins Platz?, 1951"
)
_DANZER = "Danzer, Finite point-sets on S^2 with minimum distance as large as possible, 1963 (printed 1986)"

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
