"""Spectral embeddings of strongly regular graphs, projected onto the eigenspace of the smallest eigenvalue."""

import math
from itertools import product

import numpy as np

from hf_sphere.geometry.codes.constructions.finite_fields import FiniteField, binary_field, prime_field
from hf_sphere.geometry.codes.constructions.lattices import golay_octads


def spectral_code(adjacency: np.ndarray, eigenvalue: int) -> np.ndarray:
    """Spectral embedding of a strongly regular graph: one cosine for adjacent vertices and one for all other pairs.

    For a graph with v vertices and degree k, the projection onto the eigenspace of the eigenvalue t, scaled to 1 on the
    diagonal, has the entries t / k for adjacent and -(1 + t) / (v - k - 1) for other vertices.

    Args:
        adjacency: Adjacency matrix, (v, v), bool.
        eigenvalue: An eigenvalue other than the degree.

    Returns:
        Unit vectors, (v, multiplicity of the eigenvalue).

    Reference:
        Delsarte, Goethals and Seidel, "Spherical codes and designs", 1977, example 9.1.
    """
    from scipy.linalg.lapack import dpstrf

    degree, vertices = int(adjacency[0].sum()), len(adjacency)
    gram = np.where(adjacency, eigenvalue / degree, -(1 + eigenvalue) / (vertices - degree - 1))
    np.fill_diagonal(gram, 1.0)
    # Pivoted Cholesky factor of the Gram matrix, truncated at its rank.
    factor, order, rank, _ = dpstrf(gram, tol=1e-9, lower=1)
    points = np.empty((vertices, rank))
    points[order - 1] = np.tril(factor)[:, :rank]
    return points


def hoffman_singleton_code() -> np.ndarray:
    """50 points in dimension 21, from Robertson's five pentagons and five pentagrams."""
    h, i, j = np.meshgrid(np.arange(5), np.arange(5), np.arange(5), indexing="ij")
    adjacency = np.zeros((50, 50), dtype=bool)
    adjacency[5 * h + j, 5 * h + (j + 1) % 5] = True  # pentagon h
    adjacency[25 + 5 * i + j, 25 + 5 * i + (j + 2) % 5] = True  # pentagram i
    adjacency[5 * h + j, 25 + 5 * i + (h * i + j) % 5] = True
    return spectral_code(adjacency | adjacency.T, -3)


def gewirtz_code() -> np.ndarray:
    """56 points in dimension 20: the blocks of S(3, 6, 22) that avoid a point, adjacent if disjoint."""
    blocks = _hexads()
    return spectral_code(_disjoint(blocks[blocks[:, 0] == 0]), -4)


def m22_code() -> np.ndarray:
    """77 points in dimension 21: the blocks of S(3, 6, 22), adjacent if disjoint."""
    return spectral_code(_disjoint(_hexads()), -6)


def higman_sims_code() -> np.ndarray:
    """100 points in dimension 22: a vertex joined to the 22 points of S(3, 6, 22), which are joined to their blocks."""
    blocks = _hexads()
    adjacency = np.zeros((100, 100), dtype=bool)
    adjacency[0, 1:23] = True
    adjacency[1:23, 23:] = blocks.T == 1
    adjacency |= adjacency.T
    adjacency[23:, 23:] = _disjoint(blocks)
    return spectral_code(adjacency, -8)


def elliptic_quadric_code(order: int) -> np.ndarray:
    """(q + 1)(q^3 + 1) points in dimension q (q^2 - q + 1) with largest cosine 1 / q^2, for q = 2, 3, 4, 5 or 7.

    The singular points of an elliptic quadric in PG(5, q), adjacent if orthogonal: the collinearity graph of the
    generalized quadrangle GQ(q, q^2).

    Reference:
        Cameron, Goethals and Seidel, "Strongly regular graphs having strongly regular subconstituents", 1978.
    """
    field = binary_field(int(math.log2(order))) if order in (2, 4) else prime_field(order)
    sums, products = (table.astype(np.uint8) for table in field)
    # If t^2 + b t + c has no root, then x^2 + b x y + c y^2 is anisotropic.
    b, c = next(pair for pair in product(range(order), repeat=2) if not _has_root(field, *pair))
    vectors = np.array(list(product(range(order), repeat=6)), dtype=np.uint8)
    first = vectors[np.arange(len(vectors)), (vectors != 0).argmax(-1)]
    x = vectors[first == 1].T
    norm = sums[products[x[4], x[4]], products[x[4], products[b, x[5]]]]
    norm = sums[norm, products[c, products[x[5], x[5]]]]
    x = x[:, sums[sums[products[x[0], x[1]], products[x[2], x[3]]], norm] == 0]
    # The associated bilinear form B(x, y) = Q(x + y) - Q(x) - Q(y).
    last = sums[products[sums[1, 1], x[4]], products[b, x[5]]], sums[products[b, x[4]], products[sums[c, c], x[5]]]
    inner = np.zeros((x.shape[1], x.shape[1]), dtype=np.uint8)
    for left, right in zip((x[1], x[0], x[3], x[2], *last), x, strict=True):
        inner = sums[inner, products[left[:, None], right]]
    adjacency = inner == 0
    np.fill_diagonal(adjacency, False)
    return spectral_code(adjacency, -(order**2) - 1)


def _has_root(field: FiniteField, b: int, c: int) -> bool:
    t = np.arange(len(field.sums))
    return bool((field.sums[field.sums[field.products[t, t], field.products[b, t]], c] == 0).any())


def _hexads() -> np.ndarray:
    """The 77 blocks of the Steiner system S(3, 6, 22): the octads through two fixed points, without these points."""
    octads = golay_octads()
    return octads[(octads[:, 22] == 1) & (octads[:, 23] == 1)][:, :22]


def _disjoint(blocks: np.ndarray) -> np.ndarray:
    return blocks @ blocks.T == 0
