"""Minimal vectors of the E8 and Leech lattices, and the binary Golay code, from which the latter is constructed."""

from functools import lru_cache
from itertools import combinations, product

import numpy as np


def e8_roots() -> np.ndarray:
    """The 240 minimal vectors of E8, times 2: 112 of shape (+-2^2, 0^6), 128 of shape (+-1^8) with even sign."""
    signs = np.array(list(product([1, -1], repeat=8)), dtype=np.int8)
    return np.concatenate([_pairs(8, 2), signs[signs.prod(-1) == 1]])


@lru_cache(maxsize=1)
def golay_code() -> np.ndarray:
    """The 4,096 codewords of the extended binary Golay code, (4096, 24), of 0 and 1.

    The quadratic residue code of length 23, extended by a parity bit (MacWilliams and Sloane, 1977, chapter 16).
    """
    non_residues = np.setdiff1d(np.arange(1, 23), np.arange(1, 23) ** 2 % 23)
    indicator = np.isin(np.arange(23), non_residues).astype(np.int64)
    shifts = np.stack([np.roll(indicator, shift) for shift in range(23)])
    # The indicator of the non-residues generates the cyclic code, which 12 of its shifts span.
    shifts = np.concatenate([shifts, shifts.sum(-1, keepdims=True) % 2], axis=1)[:12]
    choices = np.arange(4096)[:, None] >> np.arange(12) & 1
    return choices @ shifts % 2


@lru_cache(maxsize=1)
def golay_octads() -> np.ndarray:
    """The 759 codewords of weight 8: the blocks of the Steiner system S(5, 8, 24)."""
    words = golay_code()
    return words[words.sum(-1) == 8]


def leech_vectors() -> np.ndarray:
    """The 196,560 minimal vectors of the Leech lattice, times sqrt(8): (196560, 24), int8, of squared norm 32.

    1,104 of shape (+-4^2, 0^22), 97,152 of shape (+-2^8, 0^16) on the octads with an even number of minus signs, and
    98,304 of shape (-+3, +-1^23) with the signs of the Golay codewords.

    Reference:
        Leech, "Notes on sphere packings", 1967; Conway and Sloane, "Sphere packings, lattices and groups", chapter 4.
    """
    signs = np.array(list(product([2, -2], repeat=8)), dtype=np.int8)
    signs = signs[signs.prod(-1, dtype=np.int64) > 0]
    places = np.nonzero(golay_octads())[1].reshape(-1, 8)
    on_octads = np.zeros((759, 128, 24), dtype=np.int8)
    np.put_along_axis(on_octads, places[:, None], signs[None], axis=-1)
    odd = np.ones((24, 24), dtype=np.int8) - 4 * np.eye(24, dtype=np.int8)
    on_words = odd[:, None] * (1 - 2 * golay_code()).astype(np.int8)
    return np.concatenate([_pairs(24, 4), on_octads.reshape(-1, 24), on_words.reshape(-1, 24)])


def _pairs(dim: int, value: int) -> np.ndarray:
    """All vectors with two entries +-value and zeros otherwise."""
    rows = []
    for (i, j), (a, b) in product(combinations(range(dim), 2), product([value, -value], repeat=2)):
        row = np.zeros(dim, dtype=np.int8)
        row[i], row[j] = a, b
        rows.append(row)
    return np.stack(rows)
