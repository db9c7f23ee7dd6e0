"""Smaller codes inside larger ones: the points at one cosine to a pole, seen from the pole."""

from collections.abc import Callable

import numpy as np

from hf_sphere.geometry.codes.constructions.lattices import leech_vectors


def layer(points: np.ndarray, pole: np.ndarray, cosine: float) -> np.ndarray:
    """Points at that cosine to the pole, projected along it: (K, d) -> (L, d - 1), of one norm.

    Two of them at the cosine t have the cosine (t - c^2) / (1 - c^2) after the projection.
    """
    pole = pole / np.linalg.norm(pole)
    chosen = points[np.abs(points @ pole / np.linalg.norm(points, axis=-1) - cosine) < 1e-9].astype(np.float64)
    chosen /= np.linalg.norm(chosen, axis=-1, keepdims=True)
    # A reflection takes the pole to the first axis, up to its sign; the other coordinates are what is left.
    mirror = pole.copy()
    mirror[0] += np.copysign(1.0, pole[0])
    chosen -= np.outer(chosen @ mirror, mirror * (2 / (mirror @ mirror)))
    return chosen[:, 1:]


def kissing_configuration(builder: Callable[[], np.ndarray], cosine: float, times: int = 1) -> np.ndarray:
    """The points nearest to the last one, projected, and that again: each time s becomes s / (1 + s).

    Args:
        builder: Makes the code to start from, (K, d).
        cosine: Its largest cosine s.
        times: How often.

    Returns:
        Directions of shape (L, d - times), of largest cosine s / (1 + times s).
    """
    points = builder()
    for step in range(times):
        points = layer(points, points[-1].astype(np.float64), cosine / (1 + step * cosine))
    return points


def two_graph_276() -> np.ndarray:
    """552 directions in dimension 23 at cosine 1/5: 276 equiangular lines, both ways.

    The shortest vectors v of the Leech lattice for which w - v is one too, w = (5, 1^23) / sqrt(8) of norm sqrt(6).

    Reference:
        Lemmens and Seidel, "Equiangular lines", 1973.
    """
    return layer(leech_vectors(), np.array([5.0] + [1.0] * 23), 24 / np.sqrt(32 * 48))
