"""Codes derived from larger ones: the points at a given cosine to a pole, projected along the pole."""

from collections.abc import Callable

import numpy as np

from hf_sphere.geometry.codes.constructions.lattices import leech_vectors


def layer(points: np.ndarray, pole: np.ndarray, cosine: float) -> np.ndarray:
    """Points at cosine c to the pole, projected orthogonally to it: (K, d) -> (L, d - 1), all of the same norm.

    Points with the cosine t have the cosine (t - c^2) / (1 - c^2) after the projection.
    """
    pole = pole / np.linalg.norm(pole)
    chosen = points[np.abs(points @ pole / np.linalg.norm(points, axis=-1) - cosine) < 1e-9].astype(np.float64)
    chosen /= np.linalg.norm(chosen, axis=-1, keepdims=True)
    # A Householder reflection maps the pole to the first axis, up to sign; the other coordinates are the projection.
    mirror = pole.copy()
    mirror[0] += np.copysign(1.0, pole[0])
    chosen -= np.outer(chosen @ mirror, mirror * (2 / (mirror @ mirror)))
    return chosen[:, 1:]


def kissing_configuration(builder: Callable[[], np.ndarray], cosine: float, times: int = 1) -> np.ndarray:
    """Kissing configuration of a code, iterated: the nearest neighbors of the last point, projected along it.

    Args:
        builder: Function that returns the code, (K, d).
        cosine: Largest cosine s of the code.
        times: Number of iterations; each maps s to s / (1 + s).

    Returns:
        Points, (L, d - times), with the largest cosine s / (1 + times s).
    """
    points = builder()
    for step in range(times):
        points = layer(points, points[-1].astype(np.float64), cosine / (1 + step * cosine))
    return points


def two_graph_276() -> np.ndarray:
    """552 points in dimension 23 with largest cosine 1/5: both directions of 276 equiangular lines.

    They are the minimal vectors v of the Leech lattice for which w - v is also minimal, where w = (5, 1^23) / sqrt(8)
    has the norm sqrt(6).

    Reference:
        Lemmens and Seidel, "Equiangular lines", 1973.
    """
    return layer(leech_vectors(), np.array([5.0] + [1.0] * 23), 24 / np.sqrt(32 * 48))
