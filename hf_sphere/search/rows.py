"""Vectors with ids and groups, and their scores for queries."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sphere.search.calibration import Candidates, mix, name_keys, sample_rows
from hf_sphere.search.neighbor_search import NeighborSearch, SearchKind
from hf_sphere.search.vectors import check_names, check_vectors, positions


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
        self._names: list[Any] | None = None if groups is None else []
        self._groups = self._number(groups, self.ids)
        self._options = (rows_per_group, calibration_rows, seed)
        self._search: NeighborSearch | None = None
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
        self._search = None
        if search is not None and search.update(self.vectors, old):
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

    def _candidates(
        self, queries: Tensor, count: int, left_out: Tensor | None = None, among: Tensor | None = None
    ) -> Candidates:
        """Return the rows with the largest similarities; of other groups than those of number `left_out`, if given.

        `among` are the only rows that are searched.
        """
        search, groups = self.neighbor_search, self._groups
        if among is not None:
            search, groups = NeighborSearch(self.vectors[among], kind="torch", **self.metric), groups[among]
        if left_out is None:
            distances, rows = search.search(queries, count)
        else:
            distances, rows = search.search_others(queries, count, groups, left_out)
        exists = rows >= 0
        scores = (1 - distances if self.metric["distance"] == "cosine" else -distances).where(exists, -torch.inf)
        rows = rows if among is None else among[rows].where(exists, -1)
        return Candidates(scores, rows, self.ids[rows].where(exists, -1), self._groups[rows].where(exists, -1))
