"""Whether vectors are of the model of a space, by the axes that they have in common."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere

FEWEST, ROWS, CLUSTERS = 64, 600, 8
"""Fewest vectors that are tested, most rows that show the axes of a space, and its clusters; half are left out."""

RELATED, RECOGNIZED = 3.0, 6.0
"""Standard deviations above the mean of random rotations from which on vectors are of the model of a space, and those
that half of its own clusters must have: between the two of vectors on other topics, and of foreign ones."""


class ModelCheck(NamedTuple):
    """Whether vectors look like those of another model than that of a space; `str` returns it in words."""

    p_value: float  # that randomly rotated vectors have as much in common with the space; 1 if that is not known
    is_foreign: bool
    text: str

    def __str__(self) -> str:
        return self.text


class Axes(NamedTuple):
    """The principal axes of the rows of a space, and their mean squares."""

    directions: Tensor  # (r, d) float64
    squares: Tensor  # (r,)
    num_rows: int  # of the space
    own: float  # relation of the median cluster of rows to the others

    @classmethod
    def of(cls, points: Tensor, num_rows: int = 0, own: float = 0.0) -> "Axes":
        """Return the axes of unit vectors (n, d), by the smaller one of their two matrices of inner products."""
        count, dim = points.shape
        squares, vectors = torch.linalg.eigh(points @ points.T if count < dim else points.T @ points)
        kept = squares > 1e-9 * squares[-1]
        vectors = vectors.T[kept]
        if count < dim:
            vectors = project_to_sphere(vectors @ points)
        return cls(vectors, squares[kept] / count, num_rows, own)

    def relation(self, points: Tensor) -> float:
        r"""Return what unit vectors (n, d) have in common with the axes, in standard deviations of random rotations.

        Let $S$ be the second moments of the vectors, $M$ those of the rows, and $W = -(M + I / d)^{-1}$, which is small
        where rows have little variance. For an $S$ in a uniformly random orientation, $\mathrm{tr}(W S)$ has the mean
        $\mathrm{tr}(W) / d$ and the variance $2 |W_0|^2 |S_0|^2 / ((d - 1) (d + 2))$, where $W_0$ and $S_0$ have the
        trace zero (Schur's lemma): exactly, and whatever topics the vectors repeat.
        """
        count, dim = points.shape
        weights, rest = -1 / (self.squares + 1 / dim), -float(dim)
        mean = (float(weights.sum()) + (dim - len(weights)) * rest) / dim
        size = float((weights - mean).square().sum()) + (dim - len(weights)) * (rest - mean) ** 2
        product = rest + float(((points @ self.directions.T).square() @ (weights - rest)).mean())
        spread = float((points @ points.T).square().sum()) / count**2 - 1 / dim
        return (product - mean) * ((dim - 1) * (dim + 2) / (2 * size * spread + 1e-300)) ** 0.5


def axes_of(space: Any) -> Axes:
    """Return the axes of a space, computed again if it has become twice or half as large."""
    known = space._axes
    if known is None or not known.num_rows / 2 <= len(space) <= known.num_rows * 2:
        generator = torch.Generator().manual_seed(0)
        rows = space._sample()
        rows = rows[torch.randperm(len(rows), generator=generator)[:ROWS]]
        points = project_to_sphere(space.vectors[rows].double())
        space._axes = known = Axes.of(points, len(space), _own_relation(points))
    return known


def _own_relation(points: Tensor) -> float:
    """Return the median relation of clusters to the other rows, as of new topics of the same model."""
    centers, found = points[:CLUSTERS], list[float]()
    for _ in range(5):
        labels = (points @ centers.T).argmax(1)
        centers = project_to_sphere(torch.zeros_like(centers).index_add(0, labels, points) + 1e-9 * centers)
    for label in range(len(centers) // 2):  # which takes time in many dimensions
        inside = labels == label
        if 1 < int(inside.sum()) < len(points) - 1:
            found.append(Axes.of(points[~inside]).relation(points[inside][:FEWEST]))
    return float(torch.tensor(found).median()) if found else 0.0


def check_model(space: Any, vectors: Tensor, model: str | None) -> ModelCheck:
    """Test vectors (n, d) that are comparable with those of a space; see `EmbeddingSpace.check_model`."""
    what, count = f"the {len(vectors):,} vectors", len(vectors)
    if model is not None and space.model is not None and model != space.model:
        hint = f"embed them with {space.model!r}, or see EmbeddingSpace.migrate"
        return ModelCheck(1.0, True, f"{what} are of the model {model!r}, and the space of {space.model!r}; {hint}.")
    if count < FEWEST or space.metric["distance"] != "cosine" or vectors.shape[1] < 2:
        return ModelCheck(1.0, False, f"{what} are not tested, which takes {FEWEST} and cosines.")
    axes = axes_of(space)
    if axes.own < RECOGNIZED:
        text = f"{what} are not tested: the directions of the space are about uniform, or its rows too few"
        return ModelCheck(1.0, False, f"{text} to show a model.")
    step = -(-count // ROWS)
    z = axes.relation(project_to_sphere(vectors[::step].double()))
    p_value = float(torch.special.erfc(torch.tensor(z / 2**0.5)) / 2)
    if z >= RELATED:
        return ModelCheck(p_value, False, f"{what} have axes in common with the space (p-value {p_value:.1g}).")
    text = f"{what} look like those of another model: they have no more in common with the space than random directions"
    hint = f"Embed them with its model{f' {space.model!r}' if space.model else ''}, or see EmbeddingSpace.migrate."
    return ModelCheck(p_value, True, f"{text} (p-value {p_value:.2g}). {hint}")
