"""Vectors with ids and groups, and their scores for queries."""

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.metrics.selective import area_under_risk_coverage
from hf_sphere.search.calibration import CANDIDATES, mix, name_keys, sample_rows
from hf_sphere.search.neighbor_search import NeighborSearch, SearchKind
from hf_sphere.search.vectors import check_names, check_vectors, positions

logger = logging.getLogger(__name__)

NEIGHBORS = 10
"""Number of neighbors of the mean."""

BLOCK = 1 << 25
"""Number of cosines in memory."""

LeftOut = tuple[Tensor, Tensor]
"""Keys of all rows, (N,), and of queries, (Q,), int64: rows with the key of a query are left out of its search."""


class GroupedVectors:
    """The rows of an `EmbeddingSpace`: vectors (N, d) float32, which the metric compares, and names of groups, (N,).

    The metric is a distance, as options of `NeighborSearch`. The other options are those of `EmbeddingSpace.fit`.
    """

    def __init__(
        self,
        vectors: Tensor,
        groups: Any = None,
        *,
        metric: dict[str, Any] | None = None,
        kind: SearchKind | None = None,
        rows_per_group: int = 8,
        calibration_rows: int = 5_000,
        seed: int = 0,
    ) -> None:
        self.vectors = vectors
        self.ids = torch.arange(len(vectors))
        self.next_id = len(vectors)
        self.metric = metric or {"distance": "cosine"}
        self.kind = kind
        self.score = "cosine"
        self._names: list[Any] | None = None if groups is None else []
        self._groups = self._number(groups, self.ids)
        self._options = (rows_per_group, calibration_rows, seed)
        self._search: NeighborSearch | None = None
        self._density: LocalDensity | None = None
        self._sampled: tuple[Tensor, Tensor, Tensor] | None = None  # groups, ids, and the sample of these

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def groups(self) -> list[Any] | None:
        """The name of the group of each row, or None."""
        return None if self._names is None else [self._names[number] for number in self._groups.tolist()]

    @property
    def neighbor_search(self) -> NeighborSearch:
        """The search, with its kind and recall; built when it is first used, and again if its recall falls."""
        if self._search is None:
            self._search = NeighborSearch(self.vectors, kind=self.kind, **self.metric)
        self._search.refresh()
        return self._search

    def _set(self, vectors: Tensor, ids: Tensor, groups: Tensor, old: Tensor | None = None) -> None:
        """Set all rows; `old` are those that they were, -1 for new vectors, by default those of their ids."""
        old, search = positions(ids, self.ids) if old is None else old, self._search
        self.vectors, self.ids, self._groups = vectors, ids, groups
        self._search = self._density = None
        if search is not None and search.update(vectors, old):
            self._search = search

    def _check(self, what: str, vectors: Any) -> Tensor:
        """Return vectors (n, d) to compare with those of the space, unit vectors if it compares cosines."""
        return check_vectors(what, vectors, self.vectors.shape[1], self.metric["distance"])

    def _number(self, groups: Any, ids: Tensor) -> Tensor:
        """Return a number for each group, (n,) int64; without groups, that of a row is its id."""
        if groups is None:
            return ids
        assert self._names is not None
        names = check_names("groups", groups, len(ids))
        numbers = {name: number for number, name in enumerate(self._names)}
        for name in names:
            numbers.setdefault(name, len(numbers))
        self._names = list(numbers)
        return torch.tensor([numbers[name] for name in names])

    def _keys(self) -> np.ndarray:
        """Return a pseudo-random number of the group of each row, (N,) uint64."""
        numbers = self._groups.numpy()
        keys = mix(numbers) if self._names is None else name_keys(self._names)[numbers]
        return mix(keys ^ mix(np.array([self._options[2]])))

    def _sample(self) -> Tensor:
        if self._sampled is None or self._sampled[0] is not self._groups or self._sampled[1] is not self.ids:
            rows = sample_rows(self._groups, self._keys(), self.ids, *self._options[:2])
            self._sampled = self._groups, self.ids, rows
        return self._sampled[2]

    def _nearest(self, queries: Tensor, k: int, left_out: LeftOut | None = None) -> tuple[Tensor, Tensor]:
        """Return the scores and rows of the best k, (Q, k) each."""
        count = k if self.score == "cosine" else min(max(k, CANDIDATES), len(self))
        if left_out is None:
            distances, rows = self.neighbor_search.search(queries, count)
        else:
            distances, rows = self.neighbor_search.search_others(queries, count, *left_out)
        scores = 1 - distances if self.metric["distance"] == "cosine" else -distances
        return self._correct(queries, scores, rows, k, left_out) if self.score == "density" else (scores, rows)

    def _correct(
        self, queries: Tensor, scores: Tensor, rows: Tensor, k: int, left_out: LeftOut | None
    ) -> tuple[Tensor, Tensor]:
        """Return the density-corrected scores and the rows of the best k, of cosines and rows (Q, c)."""
        scores = (2 * scores - self._densities(queries, rows, left_out)).masked_fill(rows < 0, -torch.inf)
        # Only the first candidates compete, so that the best row does not depend on k.
        blocks = (block.argsort(dim=1, descending=True, stable=True) for block in scores.split(CANDIDATES, 1))
        order = torch.cat([CANDIDATES * number + block for number, block in enumerate(blocks)], 1)[:, :k]
        return scores.gather(1, order), rows.gather(1, order)

    def _choose_score(self, has_separate: bool) -> bool:
        """Choose the score by a third of the groups: their rows are queries among all other rows, and should match.

        Return whether that was possible, so that these groups must not calibrate.
        """
        counts = self._groups.unique(return_inverse=True, return_counts=True)
        rows = self._sample()
        is_chooser = torch.from_numpy(self._keys()[rows.numpy()] % 3 == 0)
        can_calibrate = has_separate or not is_chooser.all()
        rows = rows[is_chooser & (counts[2][counts[1][rows]] > 1)]
        if not len(rows) or not can_calibrate or self.metric["distance"] != "cosine":
            return False
        areas = {}
        queries, left_out = self.vectors[rows], (self.ids, self.ids[rows])
        nearest = self._nearest(queries, min(CANDIDATES, len(self)), left_out)  # by cosines
        for score, best in (("density", self._correct(queries, *nearest, 1, left_out)), ("cosine", nearest)):
            correct = self._groups[best[1][:, 0]] == self._groups[rows]
            areas[score] = area_under_risk_coverage(best[0][:, 0], correct)
        self.score = min(areas, key=areas.__getitem__)
        logger.info("Areas under the risk-coverage curve: %s; the score is %s.", areas, self.score)
        return True

    def _densities(self, queries: Tensor, rows: Tensor, left_out: LeftOut | None) -> Tensor:
        """Return the sums of the densities at queries (Q, d) and at rows (Q, c), (Q, c)."""
        if self._density is None:
            self._density = LocalDensity(self.vectors, self._groups, self._sample(), self._options[0])
        of_rows = self._density.of_rows(rows.clamp_min(0), left_out)
        return self._density.of_queries(queries, left_out)[:, None] + of_rows

    def _search_elsewhere(
        self, queries: Tensor, groups: Tensor | None, among: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the best scores of queries and the ids of their rows, (Q,) each, of other groups if theirs are given.

        `among` are the only rows that are searched.
        """
        if not len(queries):
            return torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.long)
        if among is not None:
            part = GroupedVectors(self.vectors[among], metric=self.metric, kind="torch")
            part.ids, part._groups = self.ids[among], self._groups[among]
            return part._search_elsewhere(queries, groups)
        scores, rows = self._nearest(queries, 1, None if groups is None else (self._groups, groups))
        return scores[:, 0], self.ids[rows[:, 0]].where(rows[:, 0] >= 0, -1)


class LocalDensity:
    """Mean cosines to the nearest of some rows, the reference, which a density-corrected score subtracts.

    A calibration query must not count in the densities of the rows it is compared with, as a new query does not.
    So each row has more neighbors here than are averaged, by the largest number of reference rows with the same key.

    Only the directions of vectors (N, d) matter, as those of queries. The group of a row, (N,), is left out of its
    density. The reference are rows (R,).
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
