"""What no spherical code can better: lower bounds on the largest cosine between K points."""

import math
from functools import lru_cache

from hf_sphere.geometry.codes.catalogue import CATALOGUE
from hf_sphere.geometry.codes.delsarte import delsarte_cosine
from hf_sphere.geometry.codes.levenshtein import design_size, levenshtein_cosine
from hf_sphere.geometry.codes.proved import PROVED_OPTIMA

# Beyond these the linear programme gains at most some thousandths, or its numbers outgrow double precision.
_PROGRAMME_DIM, _PROGRAMME_DEGREE, _PROGRAMME_POINTS = 64, 14, 100_000
# Levenshtein's polynomials of a higher degree tell fewer digits, and only more than 250,000 points ask for one.
_LARGEST_DEGREE = 1000
_ROUNDING = 1e-12


@lru_cache(maxsize=4096)
def separation_bound(num_points: int, dim: int) -> float:
    """Lower bound on the largest cosine between any K points of R^d: the best that we can prove.

    Exact for K <= 2 d (simplex and cross-polytope), for d <= 2, and wherever an optimal code is known; otherwise the
    best of Levenshtein's bound, the Delsarte linear programme and the proved optima of fewer points or more dimensions.
    Never above the true optimum by more than 1e-12, rounding included; grows with K and falls with d.

    Args:
        num_points: Number K >= 2 of points.
        dim: Dimension d >= 1.

    Returns:
        A cosine in [-1, 1].

    Raises:
        ValueError: If K is below 2 or d below 1.

    Reference:
        Rankin, "The closest packing of spherical caps in n dimensions", 1955; Levenshtein, "Universal bounds for codes
        and designs", 1998; Delsarte, Goethals and Seidel, "Spherical codes and designs", 1977. Welch's bound is about
        the largest absolute value of a cosine, and is no bound here.
    """
    if num_points != int(num_points) or dim != int(dim) or num_points < 2 or dim < 1:
        raise ValueError(
            f"num_points must be an integer of at least 2 and dim of at least 1; got {num_points} and {dim}."
        )
    if num_points <= dim + 1:
        return -1.0 / (num_points - 1)
    if dim == 1:
        return 1.0  # the sphere has two points only
    if num_points <= 2 * dim:
        return 0.0
    if dim == 2:
        return math.cos(2 * math.pi / num_points)
    return max(_programme_bound(num_points, dim), _proved_bound(num_points, dim))


def _programme_bound(num_points: int, dim: int) -> float:
    """Levenshtein's bound, and the linear programme's where it is safe to solve."""
    start = levenshtein_cosine(min(num_points, design_size(_LARGEST_DEGREE, dim)), dim) - _ROUNDING
    if dim > _PROGRAMME_DIM:
        return start
    # More points than the programme is solved for have a larger bound: that of the last number stays true.
    return max(start, _delsarte_bound(min(num_points, _PROGRAMME_POINTS, design_size(_PROGRAMME_DEGREE, dim)), dim))


@lru_cache(maxsize=4096)
def _delsarte_bound(num_points: int, dim: int) -> float:
    return delsarte_cosine(num_points, dim, levenshtein_cosine(num_points, dim) - _ROUNDING)


def _proved_bound(num_points: int, dim: int) -> float:
    """Largest proved optimum of at most as many points in at least as many dimensions."""
    known = [(optimum.num_points, optimum.dim, optimum.cosine) for optimum in PROVED_OPTIMA]
    known += [(code.size, code.dim, code.cosine) for code in CATALOGUE if code.optimal]
    return max((cosine for size, width, cosine in known if size <= num_points and width >= dim), default=-1.0)
