"""Local density of rows and queries: the mean cosine to their nearest neighbors of other groups."""

import torch
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere

NEIGHBORS = 10
"""Number of neighbors of the mean."""

BLOCK = 1 << 25
"""Number of cosines in memory."""

LeftOut = tuple[Tensor, Tensor]
"""Keys of all rows, (N,), and of queries, (Q,), int64: rows with the key of a query are left out of its search."""


class LocalDensity:
    """Mean cosines to the nearest of some rows, the reference, which a density-corrected score subtracts.

    A calibration query must not count in the densities of the rows it is compared with, as a new query does not.
    So each row has more neighbors here than are averaged.

    Args:
        vectors: (N, d), float32; only their directions matter, as those of queries.
        groups: (N,) int64; the group of a row is left out of its density.
        reference: (R,) rows.
        most_left_out: Largest number of reference rows with the same key.
    """

    def __init__(self, vectors: Tensor, groups: Tensor, reference: Tensor, most_left_out: int) -> None:
        self.reference = reference
        self.vectors = project_to_sphere(vectors[reference])
        own = groups[reference], groups
        self.cosines, self.nearest = self._nearest(vectors, NEIGHBORS + most_left_out, own)

    def of_queries(self, queries: Tensor, left_out: LeftOut | None) -> Tensor:
        """Return the densities at queries (Q, d), (Q,)."""
        keys = None if left_out is None else (left_out[0][self.reference], left_out[1])
        return _finite_mean(self._nearest(queries, NEIGHBORS, keys)[0])

    def of_rows(self, rows: Tensor, left_out: LeftOut | None) -> Tensor:
        """Return the densities at the rows (Q, c) that queries found, (Q, c)."""
        cosines = self.cosines[rows]
        if left_out is not None:
            keys = left_out[0][self.reference][self.nearest[rows]]
            cosines = cosines.masked_fill(keys == left_out[1][:, None, None], -torch.inf)
        return _finite_mean(cosines.topk(min(NEIGHBORS, cosines.shape[-1])).values)

    def _nearest(self, queries: Tensor, count: int, keys: LeftOut | None) -> tuple[Tensor, Tensor]:
        """Return the largest cosines (Q, count) of queries to the reference and their positions in it."""
        size, found = max(1, BLOCK // len(self.vectors)), []
        for start in range(0, len(queries), size):
            cosines = project_to_sphere(queries[start : start + size]) @ self.vectors.T
            if keys is not None:
                cosines.masked_fill_(keys[1][start : start + size, None] == keys[0], -torch.inf)
            found.append(cosines.topk(min(count, len(self.vectors))))
        return torch.cat([part.values for part in found]), torch.cat([part.indices for part in found])


def _finite_mean(cosines: Tensor) -> Tensor:
    finite = cosines.isfinite()
    return (cosines.where(finite, 0.0).sum(-1) / finite.sum(-1).clamp_min(1)).double()
