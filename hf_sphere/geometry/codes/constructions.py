"""Constructions of spherical codes: functions that return points of any norm as numpy arrays (K, d)."""

from collections.abc import Callable
from itertools import combinations, permutations, product

import numpy as np

_GOLDEN = (1 + np.sqrt(5)) / 2

# Irreducible polynomials over GF(2), by the order 2^n of their fields; bit i is the coefficient of x^i.
_IRREDUCIBLE = {2: 0b11, 4: 0b111, 8: 0b1011, 32: 0b100101, 128: 0b10000011, 512: 0b1000010001}


def icosahedron() -> np.ndarray:
    """The 12 vertices (0, +-1, +-golden) and their cyclic shifts."""
    rectangle = np.array([[0, a, b * _GOLDEN] for a, b in product([1, -1], repeat=2)])
    return np.concatenate([np.roll(rectangle, shift, axis=1) for shift in range(3)])


def six_hundred_cell() -> np.ndarray:
    """120 vertices: the 8 + 16 of the 24-cell and the 96 even permutations of (+-golden, +-1, +-1 / golden, 0) / 2."""
    identity = 2 * np.eye(4)
    halves = np.array(list(product([1.0, -1.0], repeat=4)))
    signed = np.array([[a * _GOLDEN, b, c / _GOLDEN, 0] for a, b, c in product([1, -1], repeat=3)])
    even = [order for order in permutations(range(4)) if np.linalg.det(np.eye(4)[list(order)]) > 0]
    return np.concatenate([identity, -identity, halves, *(signed[:, list(order)] for order in even)])


def e8_roots() -> np.ndarray:
    """The 240 minimal vectors of E8, times 2: 112 of shape (+-2^2, 0^6), 128 of shape (+-1^8) with even sign."""
    signs = np.array(list(product([1, -1], repeat=8)), dtype=np.int8)
    return np.concatenate([_pairs(8, 2), signs[signs.prod(-1) == 1]])


def golay_code() -> np.ndarray:
    """The codewords of the extended binary Golay code, (4096, 24) (MacWilliams and Sloane, 1977, chapter 16)."""
    non_residues = np.setdiff1d(np.arange(1, 23), np.arange(1, 23) ** 2 % 23)
    indicator = np.isin(np.arange(23), non_residues).astype(np.int64)
    shifts = np.stack([np.roll(indicator, shift) for shift in range(23)])
    # The indicator of the non-residues generates the cyclic code, which 12 of its shifts span.
    shifts = np.concatenate([shifts, shifts.sum(-1, keepdims=True) % 2], axis=1)[:12]
    choices = np.arange(4096)[:, None] >> np.arange(12) & 1
    return choices @ shifts % 2


def golay_octads() -> np.ndarray:
    """The 759 codewords of weight 8: the blocks of the Steiner system S(5, 8, 24)."""
    words = golay_code()
    return words[words.sum(-1) == 8]


def leech_vectors() -> np.ndarray:
    """The minimal vectors of the Leech lattice, times sqrt(8): (196560, 24) (Conway and Sloane, 1988, chapter 4).

    1,104 of shape (+-4^2, 0^22), 97,152 of shape (+-2^8, 0^16) on the octads with an even number of minus signs, and
    98,304 of shape (-+3, +-1^23) with the signs of the Golay codewords.
    """
    signs = np.array(list(product([2, -2], repeat=8)), dtype=np.int8)
    signs = signs[signs.prod(-1, dtype=np.int64) > 0]
    columns = np.nonzero(golay_octads())[1].reshape(-1, 8)
    on_octads = np.zeros((759, 128, 24), dtype=np.int8)
    np.put_along_axis(on_octads, columns[:, None], signs[None], axis=-1)
    odd = np.ones((24, 24), dtype=np.int8) - 4 * np.eye(24, dtype=np.int8)
    on_words = odd[:, None] * (1 - 2 * golay_code()).astype(np.int8)
    return np.concatenate([_pairs(24, 4), on_octads.reshape(-1, 24), on_words.reshape(-1, 24)])


def _pairs(dim: int, value: int) -> np.ndarray:
    """All vectors with two entries +-value and zeros otherwise."""
    axes, signs = value * np.eye(dim, dtype=np.int8), list(product([1, -1], repeat=2))
    return np.stack([a * axes[i] + b * axes[j] for i, j in combinations(range(dim), 2) for a, b in signs])


def layer(points: np.ndarray, pole: np.ndarray, cosine: float) -> np.ndarray:
    """Points at cosine c to the pole, projected: (K, d) -> (L, d - 1); cosines t become (t - c^2) / (1 - c^2)."""
    pole = pole / np.linalg.norm(pole)
    section = points[np.abs(points @ pole / np.linalg.norm(points, axis=-1) - cosine) < 1e-9].astype(np.float64)
    section /= np.linalg.norm(section, axis=-1, keepdims=True)
    # A Householder reflection maps the pole to the first axis, up to sign; the other coordinates are the projection.
    mirror = pole.copy()
    mirror[0] += np.copysign(1.0, pole[0])
    section -= np.outer(section @ mirror, mirror * (2 / (mirror @ mirror)))
    return section[:, 1:]


def kissing_configuration(builder: Callable[[], np.ndarray], cosine: float, times: int = 1) -> np.ndarray:
    """Kissing configuration of a code, iterated: the nearest neighbors of the last point, projected along it."""
    points = builder()
    for step in range(times):
        points = layer(points, points[-1].astype(np.float64), cosine / (1 + step * cosine))
    return points


def two_graph_276() -> np.ndarray:
    """552 points in dimension 23: both directions of 276 equiangular lines (Lemmens and Seidel, 1973).

    They are the minimal vectors v of the Leech lattice for which (5, 1^23) / sqrt(8) - v is also minimal.
    """
    return layer(leech_vectors(), np.array([5.0] + [1.0] * 23), 24 / np.sqrt(32 * 48))


def finite_field(order: int) -> tuple[np.ndarray, np.ndarray]:
    """Tables of a + b and a b in GF(p) or GF(2^n); bit i of an element of the latter is its coefficient of x^i."""
    numbers = np.arange(order)
    if order not in _IRREDUCIBLE:
        return np.add.outer(numbers, numbers) % order, np.multiply.outer(numbers, numbers) % order
    products = np.zeros((order, order), dtype=np.int64)
    shifted = numbers.copy()  # the elements times x^i
    for i in range(order.bit_length() - 1):
        products ^= np.where(numbers >> i & 1, shifted[:, None], 0)
        shifted = shifted << 1
        shifted = np.where(shifted & order, shifted ^ _IRREDUCIBLE[order], shifted)
    return np.bitwise_xor.outer(numbers, numbers), products


def trace(products: np.ndarray) -> np.ndarray:
    """Absolute trace x + x^2 + x^4 + ... of every element of GF(2^n), 0 or 1."""
    conjugate, total = np.arange(len(products)), np.zeros(len(products), dtype=np.int64)
    for _ in range(len(products).bit_length() - 1):
        total ^= conjugate
        conjugate = products[conjugate, conjugate]
    return total


def kerdock_set(log_dim: int) -> np.ndarray:
    """The d / 2 + 1 mutually unbiased bases of R^d and their negatives, d = 2^m with m = 2, 4, 6, 8: d^2 + 2 d points.

    The quadratic forms Q_a(x, e) = Q(a x) + e Tr(a x) on GF(2^(m-1)) x GF(2), Q(y) = sum_i Tr(y^(1 + 2^i)) for i =
    1..(m - 2) / 2, differ pairwise by a form of full rank. Therefore the bases (-1)^(Q_a + linear), one per a, have the
    cosines +-1 / sqrt(d) with each other and with the standard basis, which comes first (Kerdock, 1972; Calderbank,
    Cameron, Kantor and Seidel, 1997).
    """
    _, products = finite_field(2 ** (log_dim - 1))
    traces, numbers = trace(products), np.arange(len(products))
    quadratic, conjugate = np.zeros_like(traces), numbers
    for _ in range(1, log_dim // 2):
        conjugate = products[conjugate, conjugate]
        quadratic ^= traces[products[numbers, conjugate]]
    forms = np.concatenate([quadratic[products], quadratic[products] ^ traces[products]], axis=1)  # e = 0, then e = 1
    linear = np.concatenate([_signs(traces[products])] * 2, axis=1)  # l(x), times (-1)^e or not
    linear = np.concatenate([linear, linear * np.repeat([1, -1], len(products))])
    return _signed_with_basis(_signs(forms)[:, None] * linear.astype(np.int8))


def dual_bch_code(log_dim: int) -> np.ndarray:
    """The vectors (-1)^Tr(a x + b x^3), x in GF(d), d = 2^m with m odd, the standard basis, and all their negatives.

    The forms Tr(b x^3) differ by forms of rank m - 1, so no cosine of the 2 d^2 + 2 d points exceeds sqrt(2 / d) (Gold,
    1968; MacWilliams and Sloane, 1977, chapter 15). The standard basis comes first.
    """
    _, products = finite_field(2**log_dim)
    traces, numbers = trace(products), np.arange(len(products))
    cubic = _signs(traces[products[:, products[numbers, products.diagonal()]]])
    return _signed_with_basis(cubic[:, None] * _signs(traces[products]))


def _signs(bits: np.ndarray) -> np.ndarray:
    return (1 - 2 * bits).astype(np.int8)


def _signed_with_basis(words: np.ndarray) -> np.ndarray:
    """The standard basis and the sign vectors (..., d), each with its negatives; the norms differ."""
    dim = words.shape[-1]
    basis, words = np.eye(dim, dtype=np.int8), words.reshape(-1, dim)
    return np.concatenate([basis, -basis, words, -words])


def spectral_code(adjacency: np.ndarray, eigenvalue: int) -> np.ndarray:
    """Spectral embedding of a strongly regular graph with v vertices of degree k: (v, multiplicity of the eigenvalue).

    The projection onto the eigenspace of t, scaled to 1 on the diagonal, has the entries t / k for adjacent and
    -(1 + t) / (v - k - 1) for other vertices (Delsarte, Goethals and Seidel, 1977, example 9.1).
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


def higman_sims_code() -> np.ndarray:
    """100 points in dimension 22: a vertex joined to the 22 points of S(3, 6, 22), which are joined to their blocks."""
    octads = golay_octads()
    blocks = octads[(octads[:, 22] == 1) & (octads[:, 23] == 1)][:, :22]  # the 77 through two points
    adjacency = np.zeros((100, 100), dtype=bool)
    adjacency[0, 1:23] = True
    adjacency[1:23, 23:] = blocks.T == 1
    adjacency |= adjacency.T
    adjacency[23:, 23:] = blocks @ blocks.T == 0  # disjoint blocks
    return spectral_code(adjacency, -8)


def elliptic_quadric_code(order: int) -> np.ndarray:
    """(q + 1)(q^3 + 1) points in dimension q (q^2 - q + 1) with largest cosine 1 / q^2 (Cameron et al., 1978).

    The singular points of an elliptic quadric in PG(5, q), adjacent if orthogonal: the graph of GQ(q, q^2).
    """
    sums, products = (table.astype(np.uint8) for table in finite_field(order))
    # If t^2 + b t + c has no root t, then x^2 + b x y + c y^2 is anisotropic.
    squares = products.diagonal()
    b, c = next((b, c) for b, c in product(range(order), repeat=2) if sums[sums[squares, products[b]], c].all())
    vectors = np.array(list(product(range(order), repeat=6)), dtype=np.uint8)
    first = vectors[np.arange(len(vectors)), (vectors != 0).argmax(-1)]
    x = vectors[first == 1].T
    norm = sums[squares[x[4]], products[x[4], products[b, x[5]]]]
    norm = sums[norm, products[c, squares[x[5]]]]
    x = x[:, sums[sums[products[x[0], x[1]], products[x[2], x[3]]], norm] == 0]
    # The associated bilinear form B(x, y) = Q(x + y) - Q(x) - Q(y).
    last = sums[products[sums[1, 1], x[4]], products[b, x[5]]], sums[products[b, x[4]], products[sums[c, c], x[5]]]
    inner = np.zeros((x.shape[1], x.shape[1]), dtype=np.uint8)
    for left, right in zip((x[1], x[0], x[3], x[2], *last), x, strict=True):
        inner = sums[inner, products[left[:, None], right]]
    adjacency = inner == 0
    np.fill_diagonal(adjacency, False)
    return spectral_code(adjacency, -(order**2) - 1)
