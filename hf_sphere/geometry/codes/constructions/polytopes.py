"""Vertices of regular polytopes with coordinates from the golden ratio."""

from itertools import permutations, product

import numpy as np

_GOLDEN = (1 + np.sqrt(5)) / 2


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
