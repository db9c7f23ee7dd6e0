"""Spherical codes: optimal ones in closed form, a catalogue of constructions, and the search for a code that fits."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.codes import constructions

_FEJES_TOTH = "Fejes Toth, 1943 (optimality, for 12 points)"
_ANDREEV = "Andreev, A spherical code, 1999 (optimality)"
_LEVENSHTEIN = "Levenshtein, Designs as maximum codes in polynomial metric spaces, 1992 (optimality)"
COHN = "Cohn, de Laat and Leijenhorst, Optimality of spherical codes via exact semidefinite programming bounds, 2024"
_KISSING = (
    "Levenshtein, On bounds for packings in n-dimensional Euclidean space, 1979; Odlyzko and Sloane, New bounds on the "
    "number of unit spheres that can touch a unit sphere in n dimensions, 1979 (optimality)"
)
_LAAT = "De Laat, Leijenhorst and de Muinck Keizer, Optimality and uniqueness of the D4 root system, 2024"
_BACHOC = "Bachoc and Vallentin, Optimality and uniqueness of the (4, 10, 1/6) spherical code, 2009"
_CAMERON = "Cameron, Goethals and Seidel, Strongly regular graphs having strongly regular subconstituents, 1978"
_GOLD = "Gold, Maximal recursive sequences with 3-valued recursive cross-correlation functions, 1968"


def simplex(num_points: int, dim: int) -> Tensor:
    """Vertices of a regular simplex, (K, d) in float64, for 2 <= K <= d + 1: all cosines are -1 / (K - 1), the optimum.

    Their sum is zero, and coordinates after the first K - 1 are zero.

    Raises:
        ValueError: If K is outside 2..d + 1.

    Reference:
        Rankin, "The closest packing of spherical caps in n dimensions", 1955.

    Example:
        >>> simplex(3, 2) @ simplex(3, 2)[0]
        tensor([ 1.0000, -0.5000, -0.5000], dtype=torch.float64)
    """
    from scipy.linalg import helmert

    if not 2 <= num_points <= dim + 1:
        raise ValueError(f"a simplex in dimension {dim} has 2 to {dim + 1} points; got {num_points}. See find_code.")
    points = torch.from_numpy(helmert(num_points).T) * math.sqrt(num_points / (num_points - 1))
    return F.pad(points, (0, dim - num_points + 1))


def cross_polytope(num_points: int, dim: int) -> Tensor:
    """First K vertices e_1, ..., e_d, -e_1, ..., -e_d of the cross-polytope, (K, d) in float64, for 2 <= K <= 2 d.

    All cosines are 0 or -1, which is optimal for K >= d + 2 (Rankin, 1955).

    Raises:
        ValueError: If K is outside 2..2 d.

    Example:
        >>> cross_polytope(3, 2).tolist()
        [[1.0, 0.0], [0.0, 1.0], [-1.0, -0.0]]
    """
    if not 2 <= num_points <= 2 * dim:
        raise ValueError(f"a cross-polytope in R^{dim} has 2 to {2 * dim} points; got {num_points}. See find_code.")
    identity = torch.eye(dim, dtype=torch.float64)
    return torch.cat([identity, -identity])[:num_points].clone()


def polygon(num_points: int) -> Tensor:
    """Vertices of the regular polygon, (K, 2) in float64, counterclockwise from (1, 0); optimal in dimension 2.

    Example:
        >>> polygon(4).round().abs().tolist()
        [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]
    """
    angle = torch.arange(num_points, dtype=torch.float64) * (2 * math.pi / num_points)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


@dataclass(frozen=True)
class SphericalCode:
    """An algebraic construction of K unit vectors in R^d with a known largest cosine.

    Attributes:
        name: Name of the code.
        dim: Dimension d.
        size: Number K of points.
        cosine: Exact largest cosine between two points.
        optimal: Whether the code is proved optimal: no K points in R^d have a smaller largest cosine.
        source: Reference for the construction or the proof of optimality.
        builder: Function that returns the points, of any norm, as an array (K, d).
    """

    name: str
    dim: int
    size: int
    cosine: float
    optimal: bool
    source: str
    builder: Callable[[], np.ndarray] = field(repr=False, compare=False)

    def build(self, index: Tensor | slice = slice(None)) -> Tensor:
        """Return the points of the code, unit vectors (K, d) in float64.

        The code is constructed once; every call returns a new copy.

        Args:
            index: Which points to return; all by default.
        """
        points = torch.from_numpy(_points(self)[index].astype(np.float64))
        return points.div_(points.norm(dim=-1, keepdim=True))


# The largest codes take more than 100 MB, so only a few are cached.
_points = lru_cache(maxsize=16)(lambda code: code.builder())


def find_code(num_points: int, dim: int) -> SphericalCode | None:
    """Find the code of the catalogue with the smallest largest cosine, at least K points and at most d dimensions.

    The largest cosine of a subset, padded with zeros to d dimensions, is at most that of the code. Ties are broken by
    the smallest dimension, then size. Returns None if there is none. For K <= 2 d prefer `simplex` and
    `cross_polytope`.

    Example:
        >>> find_code(24, 4).cosine
        0.5
    """
    fitting = [code for code in CATALOGUE if code.size >= num_points and code.dim <= dim]
    return min(fitting, key=lambda code: (code.cosine, code.dim, code.size), default=None)


def fit_code(code: SphericalCode, num_points: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """Take K points of a code and pad them with zeros to R^d.

    Args:
        code: A code with at least K points and at most d dimensions, for instance from `find_code`.
        num_points: Number K of points, at least 1.
        dim: Dimension d.
        generator: CPU generator that draws a random subset of the code; None takes the first K points.

    Returns:
        Unit vectors, (K, d), float64.

    Raises:
        ValueError: If the code has fewer points or more dimensions.

    Example:
        >>> fit_code(find_code(24, 4), 20, 8).shape
        torch.Size([20, 8])
    """
    if not 1 <= num_points <= code.size:
        raise ValueError(f"{code.name} has {code.size} points; got num_points={num_points}. Choose 1 to {code.size}.")
    if dim < code.dim:
        raise ValueError(f"{code.name} needs {code.dim} dimensions; got dim={dim}. Use find_code to choose another.")
    index = torch.arange(code.size) if generator is None else torch.randperm(code.size, generator=generator)
    return F.pad(code.build(index[:num_points]), (0, dim - code.dim))


def _family(code: SphericalCode, *inner: int | tuple[int, str]) -> Iterator[SphericalCode]:
    """A code and its iterated kissing configurations by their size, or by size and name if proved optimal."""
    yield code
    for times, item in enumerate(inner, start=1):
        size, name = item if isinstance(item, tuple) else (item, "")
        source = (_BACHOC if size == 10 else _LEVENSHTEIN) if name else f"Inside: {code.source}"
        builder = partial(constructions.kissing_configuration, code.builder, code.cosine, times)
        cosine, kissing = code.cosine / (1 + times * code.cosine), f"{code.name}, kissing configuration taken {times} x"
        yield SphericalCode(name or kissing, code.dim - times, size, cosine, bool(name), source, builder)


def _kerdock(log_dim: int, source: str = COHN, name: str = "") -> SphericalCode:
    dim, builder = 2**log_dim, partial(constructions.kerdock_set, log_dim)
    return SphericalCode(name or f"Kerdock set, d = {dim}", dim, dim**2 + 2 * dim, dim**-0.5, True, source, builder)


def _dual_bch(log_dim: int) -> SphericalCode:
    dim, builder = 2**log_dim, partial(constructions.dual_bch_code, log_dim)
    name, size = f"Dual BCH code, d = {dim}", 2 * dim**2 + 2 * dim
    return SphericalCode(name, dim, size, math.sqrt(2 / dim), False, _GOLD, builder)


def _quadric(q: int) -> SphericalCode:
    dim, size, source = q * (q**2 - q + 1), (q + 1) * (q**3 + 1), f"{_CAMERON}; {_LEVENSHTEIN}"
    builder = partial(constructions.elliptic_quadric_code, q)
    return SphericalCode(f"Elliptic quadric, q = {q}", dim, size, 1 / q**2, True, source, builder)


CATALOGUE: tuple[SphericalCode, ...] = (
    SphericalCode("Icosahedron", 3, 12, 1 / math.sqrt(5), True, _FEJES_TOTH, constructions.icosahedron),
    SphericalCode("600-cell", 4, 120, (1 + math.sqrt(5)) / 4, True, _ANDREEV, constructions.six_hundred_cell),
    *_family(
        SphericalCode("E8 roots", 8, 240, 1 / 2, True, _KISSING, constructions.e8_roots),
        *((56, "E7 minuscule weights"), (27, "Schläfli graph"), (16, "Clebsch graph"), (10, "Petersen graph")),
    ),
    *_family(
        SphericalCode(
            "Leech lattice, shortest vectors", 24, 196560, 1 / 2, True, _KISSING, constructions.leech_vectors
        ),
        (4600, "Leech lattice, kissing configuration"),
        (891, "Leech lattice, kissing configuration taken 2 x"),
        *(336, 170, 100, 66, 48, 46, 36, 30),
    ),
    *_family(
        SphericalCode(
            "Regular two-graph on 276 points", 23, 552, 1 / 5, True, _LEVENSHTEIN, constructions.two_graph_276
        ),
        *((275, "McLaughlin graph"), (162, "McLaughlin graph, second subconstituent")),
        *(105, 72, 51, 37),
    ),
    SphericalCode("Higman-Sims graph", 22, 100, 1 / 11, True, _LEVENSHTEIN, constructions.higman_sims_code),
    *_family(_quadric(3), 81, 60, 45),
    *_family(_quadric(4), 256, 204, 164, 136, 120, 98),
    *_family(_quadric(5), 625, 520, 435, 366, 313, 276, 255, 218),
    *_family(_quadric(7), 2401, 2100, 1841, 1618, 1431, 1280, 1165, 1086, 1043, 934, 849, 770, 703, 648, 605),
    _kerdock(2, _LAAT, "24-cell"),
    *_family(_kerdock(4), 128, 70, 42, 26),
    *_family(_kerdock(6), 2048, 1116, 660, 414),
    *_family(_kerdock(8), 32768, 17272, 9576, 5540, 3324, 2063, 1311, 849),
    _dual_bch(3),
    _dual_bch(5),
    *_family(_dual_bch(7), 8128, 2520, 918),
    _dual_bch(9),
)
"""All codes. The simplex (up to d + 1 points), the cross-polytope (up to 2 d points) and the polygon (dimension 2) are
optimal and not listed."""
