"""Codes of sign vectors: Kerdock sets, which are mutually unbiased bases, and dual BCH codes."""

import numpy as np

from hf_sphere.geometry.codes.constructions.finite_fields import binary_field, power, trace


def kerdock_set(log_dim: int) -> np.ndarray:
    """The d / 2 + 1 mutually unbiased bases of R^d and their negatives, d = 2^m with m even: d^2 + 2 d points.

    The quadratic forms Q_a(x, e) = Q(a x) + e Tr(a x) on GF(2^(m-1)) x GF(2), Q(y) = sum_i Tr(y^(1 + 2^i)) for
    i = 1..(m - 2) / 2, differ pairwise by a form of full rank. Therefore the bases (-1)^(Q_a + linear), one per a, have
    the cosines +-1 / sqrt(d) with each other and with the standard basis.

    Args:
        log_dim: m, even, 2 to 8.

    Returns:
        Points, (d^2 + 2 d, d), int8, of different norms; the standard basis and its negatives come first.

    Reference:
        Kerdock, "A class of low-rate nonlinear binary codes", 1972; Calderbank, Cameron, Kantor and Seidel,
        "Z4-Kerdock codes, orthogonal spreads, and extremal Euclidean line-sets", 1997.
    """
    degree = log_dim - 1
    field, traces = binary_field(degree), trace(degree)
    quadratic = np.zeros(2**degree, dtype=np.int64)
    for i in range(1, (degree - 1) // 2 + 1):
        quadratic ^= traces[power(field, 1 + 2**i)]
    scaled = field.products  # a x
    forms = np.concatenate([quadratic[scaled], quadratic[scaled] ^ traces[scaled]], axis=1)  # e = 0, then e = 1
    linear = np.concatenate([_characters(degree)] * 2, axis=1)  # l(x), times (-1)^e or not
    linear = np.concatenate([linear, linear * np.repeat([1, -1], 2**degree)])
    return _signed_with_basis(_signs(forms)[:, None] * linear.astype(np.int8))


def dual_bch_code(log_dim: int) -> np.ndarray:
    """The vectors (-1)^Tr(a x + b x^3), x in GF(d), d = 2^m with m odd, the standard basis, and all their negatives.

    The vectors are the codewords of the dual of the extended double-error-correcting BCH code. The forms Tr(b x^3)
    differ by forms of rank m - 1, so no cosine exceeds sqrt(2 / d).

    Args:
        log_dim: m, odd, 3 to 9.

    Returns:
        Points, (2 d^2 + 2 d, d), int8, of different norms; the standard basis and its negatives come first.

    Reference:
        Gold, "Maximal recursive sequences with 3-valued recursive cross-correlation functions", 1968; MacWilliams and
        Sloane, "The theory of error-correcting codes", 1977, chapter 15.
    """
    field, traces = binary_field(log_dim), trace(log_dim)
    cubic = _signs(traces[field.products[:, power(field, 3)]])
    return _signed_with_basis(cubic[:, None] * _characters(log_dim))


def _characters(degree: int) -> np.ndarray:
    """(-1)^Tr(a x) for all a and x of GF(2^n): a Hadamard matrix."""
    return _signs(trace(degree)[binary_field(degree).products])


def _signs(bits: np.ndarray) -> np.ndarray:
    return (1 - 2 * bits).astype(np.int8)


def _signed_with_basis(words: np.ndarray) -> np.ndarray:
    """The standard basis and the sign vectors (..., d), each with its negatives; the norms differ."""
    dim = words.shape[-1]
    basis, words = np.eye(dim, dtype=np.int8), words.reshape(-1, dim)
    return np.concatenate([basis, -basis, words, -words])
