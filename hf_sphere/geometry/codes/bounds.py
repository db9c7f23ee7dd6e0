"""Largest cosine of K points, and lower bounds on it: proved optima, and a bound for any K and d."""

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from hf_sphere.geometry.checks import check_floating, check_rows
from hf_sphere.geometry.codes.catalogue import CATALOGUE, COHN
from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.utils.checks import check_integer

# Levenshtein's polynomials of higher degree lose accuracy; they are needed only for more than 250,000 points.
_LARGEST_DEGREE = 1000
_ROUNDING = 1e-12

_SCHUETTE = (
    "Schütte and van der Waerden, Auf welcher Kugel haben 5, 6, 7, 8 oder 9 Punkte mit Mindestabstand Eins Platz?, 1951"
)
_DANZER = "Danzer, Finite point-sets on S^2 with minimum distance as large as possible, 1963 (printed 1986)"


def levenshtein_cosine(num_points: int, dim: int) -> float:
    """Lower bound on the largest cosine of K points in R^d, d >= 3: the s with L(d, s) = K (Levenshtein, 1998, 5.48).

    L_m(d, s), a bound on the size of a code, increases with s from D(d, m) to D(d, m + 1) on the m-th interval of s.
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


PROVED_OPTIMA = (
    (7, 3, 0.210138312730, _SCHUETTE),
    (8, 3, 0.261203874963, _SCHUETTE),
    (9, 3, 1 / 3, _SCHUETTE),
    (10, 3, 0.404394325216, _DANZER),
    (11, 3, 1 / math.sqrt(5), _DANZER),
    (13, 3, 0.542636486829, "Musin and Tarasov, The strong thirteen spheres problem, 2012"),
    (14, 3, 0.563950300360, "Musin and Tarasov, The Tammes problem for N = 14, 2015"),
    (24, 3, 0.723078468333, "Robinson, Arrangement of 24 points on a sphere, 1961"),
    (1024**2 + 2048, 1024, 1 / 32, COHN),
)
"""Points, dimension, smallest possible largest cosine (rounded down if not in closed form) and source."""


@lru_cache(maxsize=4096)
def separation_bound(num_points: int, dim: int) -> float:
    """Best known lower bound on the largest cosine between any K unit vectors in R^d.

    Tight for K <= 2 d (simplex and cross-polytope), for d <= 2, and wherever an optimal code is known. Otherwise it is
    the maximum of Levenshtein's bound and the proved optima of fewer points or more dimensions. It increases with K and
    decreases with d, and rounding errors are below 1e-12.

    Args:
        num_points: Number K >= 2 of points.
        dim: Dimension d >= 1.

    Returns:
        A cosine in [-1, 1].

    Raises:
        ValueError: If K is below 2 or d below 1.

    Reference:
        Rankin, "The closest packing of spherical caps in n dimensions", 1955; Levenshtein, "Universal bounds for codes
        and designs", 1998. Welch's bound applies to the largest absolute value of a cosine and is not a bound here.
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
    universal = levenshtein_cosine(min(num_points, design_size(_LARGEST_DEGREE, dim)), dim) - _ROUNDING
    # Optima increase with the number of points and decrease with the dimension, so each bounds many other cases.
    optima = [*PROVED_OPTIMA, *((c.size, c.dim, c.cosine, c.source) for c in CATALOGUE if c.optimal)]
    return max([universal, *(cosine for size, width, cosine, _ in optima if size <= num_points and width >= dim)])


def separation(points: Tensor) -> Tensor:
    """Largest cosine between two different points; lower is better.

    Computed block by block in at least float32, without a K x K matrix. Differentiable: the gradient is for the
    closest pair, or one of them if several are equally close.

    Args:
        points: Non-zero points, (K, d) with K >= 2.

    Returns:
        A 0-dim tensor with the dtype of `points`, but at least float32.

    Raises:
        TypeError: If `points` does not have a floating-point dtype.
        ValueError: If the shape is not (K, d) with K >= 2 and d >= 1, or a point is zero or not finite.

    Example:
        >>> separation(torch.eye(3))
        tensor(0.)
    """
    check_floating("points", points)
    if points.ndim != 2 or points.shape[0] < 2 or points.shape[1] < 1:
        raise ValueError(f"points must have the shape (K, d) with K >= 2 and d >= 1; got {tuple(points.shape)}.")
    check_rows(points.isfinite().all(-1) & points.any(-1), "points must be finite and non-zero", "are not")
    unit = project_to_sphere(points.to(torch.promote_types(points.dtype, torch.float32)))
    # The search is done without gradients; the cosines of the pairs found are then recomputed.
    return (unit * unit[nearest_others(unit.detach())[1]]).sum(-1).clamp(-1.0, 1.0).max()


@torch.no_grad()
def nearest_others(unit: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and index of the nearest other vector for each unit vector, (K, d) -> (K,), (K,), block by block."""
    with torch.autocast(unit.device.type, enabled=False):
        blocks = [cosines.max(dim=1) for _, cosines in cosine_blocks(unit, 2**22)]
    values, index = map(torch.cat, zip(*blocks, strict=True))
    return values, index


def cosine_blocks(unit: Tensor, most: int) -> Iterator[tuple[int, Tensor]]:
    """Yield cosines of blocks of unit vectors to all, at most `most` at once, -inf to itself, with first indices."""
    rows = max(1, most // len(unit))
    for start in range(0, len(unit), rows):
        cosines = unit[start : start + rows] @ unit.T
        cosines[:, start : start + rows].fill_diagonal_(-math.inf)
        yield start, cosines
