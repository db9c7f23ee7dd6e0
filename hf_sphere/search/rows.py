"""Vectors with ids and groups, and their scores for queries."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sphere.search.foreign import Axes
from hf_sphere.search.matching import Candidates
from hf_sphere.search.neighbor_search import NeighborSearch, SearchKind
from hf_sphere.search.sampling import mix, name_keys, sample_rows
from hf_sphere.search.vectors import check_ids, check_names, check_vectors, positions


class GroupedVectors:
    """The rows of an `EmbeddingSpace`: vectors (N, d) float32, which the metric compares, ids and groups, (N,).

    The metric is a distance, as options of `NeighborSearch`. Rows have numbers that are never used again, by which
    calibration and files name them; without ids these are the ids. The other options are those of `EmbeddingSpace.fit`.
    """

    def __init__(
        self,
        vectors: Tensor,
        groups: Any = None,
        *,
        ids: Any = None,
        numbers: Tensor | None = None,
        metric: dict[str, Any] | None = None,
        kind: SearchKind | None = None,
        rows_per_group: int = 8,
        calibration_rows: int = 5_000,
        seed: int = 0,
    ) -> None:
        self.vectors = vectors
        self._numbers = torch.arange(len(vectors)) if numbers is None else numbers
        self._next = int(self._numbers.max()) + 1 if len(vectors) else 0
        self._ids: list[Any] | None = None if ids is None else check_ids(ids, len(vectors))
        self.metric = metric or {"distance": "cosine"}
        self.kind = kind
        self._names: list[Any] | None = None if groups is None else []
        self._groups = self._number(groups, self._numbers)
        self._options = (rows_per_group, calibration_rows, seed)
        self._search: NeighborSearch | None = None
        self._axes: Axes | None = None
        self._sampled: tuple[Tensor, Tensor, Tensor] | None = None  # groups, numbers, and the sample of these

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def ids(self) -> list[Any]:
        """The id of each row: that which was given, or a number that it keeps when others are added or removed."""
        return self._numbers.tolist() if self._ids is None else [*self._ids]

    def _ids_of(self, rows: Tensor) -> list[list[Any]]:
        """Return the ids of rows (Q, k), None where there is none."""
        ids = (
            self._numbers.numpy().data if self._ids is None else self._ids
        )  # items of the first are integers of Python
        return [[None if row < 0 else ids[row] for row in some] for some in rows.tolist()]

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

    def _set(
        self, vectors: Tensor, numbers: Tensor, groups: Tensor, ids: list[Any] | None, old: Tensor | None = None
    ) -> None:
        """Set all rows; `old` are those that they were, -1 for new vectors, by default those of their numbers."""
        old, search = positions(numbers, self._numbers) if old is None else old, self._search
        self.vectors, self._numbers, self._ids, self._groups = vectors, numbers, ids, groups
        self._search = None
        if search is not None and search.update(self.vectors, old):
            self._search = search

    def _check(self, what: str, vectors: Any, ids: Sequence[Any] | None = None) -> Tensor:
        """Return vectors (n, d) to compare with those of the space, unit vectors if it compares cosines."""
        return check_vectors(what, vectors, self.vectors.shape[1], self.metric["distance"], ids)

    def _number(self, groups: Any, rows: Tensor) -> Tensor:
        """Return a number for each group, (n,) int64; without groups, that of the row."""
        if groups is None:
            return rows
        assert self._names is not None
        names = check_names("groups", groups, len(rows))
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
        if self._sampled is None or self._sampled[0] is not self._groups or self._sampled[1] is not self._numbers:
            rows = sample_rows(self._groups, self._keys(), self._numbers, *self._options[:2])
            self._sampled = self._groups, self._numbers, rows
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
        return Candidates(scores, rows, self._numbers[rows].where(exists, -1), self._groups[rows].where(exists, -1))
