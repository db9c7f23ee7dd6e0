"""Search with decisions at a false-accept level, in rows of any engine."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_sphere.geometry.checks import to_tensor
from hf_sphere.search.matching import Best, Calibration, Matches, accepts
from hf_sphere.utils.checks import check_integer

CANDIDATES = 20
"""Rows with the largest cosines, from which the density-corrected score and the rows of other groups are chosen."""


class Candidates(NamedTuple):
    """Rows that queries found, (Q, c) each, best first: scores, rows (-1 for none), and their ids and group numbers."""

    scores: Tensor
    rows: Tensor
    ids: Tensor
    groups: Tensor


class CalibratedSearch(ABC):
    """Search for matches, with decisions by a `Calibration`.

    Attributes:
        score: `cosine`, or `density` for the density-corrected cosine.
        metric: Distance, as options of `NeighborSearch`.
    """

    score: str
    metric: dict[str, Any]
    _names: list[Any] | None  # of groups, by their numbers

    @property
    @abstractmethod
    def calibration(self) -> Calibration:
        """The calibration of the current rows."""

    @property
    def is_calibrated(self) -> bool:
        """Whether searches without a level have p-values; others calibrate first."""
        return True

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _check(self, what: str, vectors: Any) -> Tensor:
        """Return valid vectors (n, d) to compare with the rows; of one (d,) too."""

    @abstractmethod
    def _candidates(self, queries: Tensor, count: int) -> Candidates:
        """Return the rows with the best scores."""

    @abstractmethod
    def _search_elsewhere(self, queries: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best score of each query, and the id of its row, in other groups than those of number `groups`."""

    @property
    def _measure(self) -> str:
        return self.score if self.metric["distance"] == "cosine" else self.metric["distance"]

    def _names_of(self, found: Candidates) -> list[Any]:
        """Return the name of the group of the first row of each query."""
        if self._names is None:
            raise ValueError("the rows have no names; fit with groups=.")
        return [self._names[number] for number in found.groups[:, 0].tolist()]

    def _scores_without(self, queries: Tensor, found: Candidates, groups: Tensor) -> Tensor:
        """Return the scores of rows, (Q, c), as they are if one group (Q,) does not influence those of the others."""
        return found.scores

    @property
    def smallest_p_value(self) -> float:
        """The lowest level of false accepts for which the calibration has enough groups."""
        return self.calibration.smallest_p_value

    def search(self, queries: Any, k: int = 10, *, false_accept: float | None = None) -> Matches:
        """Find the rows with the largest scores.

        Args:
            queries: (Q, d), or (d,) for one.
            k: Number of rows, at most N.
            false_accept: Level: the probability that anything is accepted for a query whose group is not in the space.

        Raises:
            ValueError: If a query or k is invalid, or the calibration has too few groups for the level.
        """
        queries = self._check_search(queries, k, false_accept)
        if false_accept is None and not self.is_calibrated:
            found = self._candidates(queries, k)
            return Matches(found.rows, found.scores, measure=self._measure)
        return self._find_matches(queries, k, false_accept)[0]

    def judge(
        self,
        queries: Tensor,
        scores: Tensor,
        rows: Tensor,
        false_accept: float | None,
        candidates: Candidates | None = None,
    ) -> Matches:
        """Return rows and scores (Q, k) that another search found for queries (Q, d), with p-values at a level.

        The first `candidates` among all rows are searched if they are not given and make a difference.
        """
        queries, best = self._check("queries", queries), None
        if not self.calibration.is_separate:
            candidates = candidates or self._candidates(queries, min(CANDIDATES, len(self)))
            best = self._best_rows(queries, Candidates(*(column[:, :CANDIDATES] for column in candidates)))
        p_values = self.calibration.p_values(scores, best).masked_fill(rows < 0, 1.0).cummax(1).values
        accepted = None if false_accept is None else accepts(p_values, false_accept)
        return Matches(rows, scores, p_values, accepted, self._measure)

    def threshold(self, false_accept: float) -> float:
        """Return the cosine from which on a row is a match, to filter by where another program searches.

        It is a little too high: some rows that `search` accepts are below it, which knows the group of the best row. If
        rows of the space are the calibration queries, the level needs 2 / level - 1 groups.

        Raises:
            ValueError: If the score is not the cosine, or the calibration has too few groups for the level.
        """
        if self._measure != "cosine":
            raise ValueError(f"only cosines have a threshold, not the {self._measure} score; fit with score='cosine'.")
        return self.calibration.threshold(false_accept)

    def identify(self, queries: Any, false_accept: float) -> Any:
        """Return the name of the group that a query (d,) matches, or None; of several (Q, d), a list.

        Levels and errors are those of `search`, and groups without names are an error.
        """
        self.calibration.check_level(false_accept)  # also None
        queries = to_tensor("queries", queries)
        matches, found = self._find_matches(self._check_search(queries, 1, false_accept), 1, false_accept)
        assert matches.accepted is not None
        pairs = zip(self._names_of(found), matches.accepted[:, 0].tolist(), strict=True)
        names = [name if accepted else None for name, accepted in pairs]
        return names[0] if queries.ndim == 1 else names

    def _check_search(self, queries: Any, k: int, level: float | None) -> Tensor:
        if level is not None:
            self.calibration.check_level(level)
        queries = self._check("queries", queries)
        if check_integer("k", k, 1) > len(self):
            raise ValueError(f"k must be from 1 to the number of rows, {len(self):,}; got {k}.")
        return queries

    def _find_matches(self, queries: Tensor, k: int, level: float | None) -> tuple[Matches, Candidates]:
        found = self._candidates(queries, min(max(k, CANDIDATES), len(self)))
        return self.judge(queries, found.scores[:, :k], found.rows[:, :k], level, found), found

    def _best_rows(self, queries: Tensor, found: Candidates) -> Best:
        """Return the best row of each query and its best score in another group."""
        ids, groups = found.ids[:, 0], found.groups[:, 0].contiguous()
        return Best(ids, groups, self._best_elsewhere(queries, groups, found)[0])

    def _best_elsewhere(self, queries: Tensor, groups: Tensor, found: Candidates) -> tuple[Tensor, Tensor]:
        """Return the best score of each query, and the id of its row, in other groups than those of number `groups`.

        More candidates are searched for those queries whose candidates are all of that group.
        """
        is_other = (found.groups != groups[:, None]) & (found.rows >= 0)
        scores, at = self._scores_without(queries, found, groups).where(is_other, -torch.inf).max(1)
        ids = found.ids.gather(1, at[:, None])[:, 0].where(is_other.any(1), -1)
        lacking = ~is_other.any(1) & (found.rows[:, -1] >= 0)
        if lacking.any():
            queries, groups, count = queries[lacking], groups[lacking], 4 * found.rows.shape[1]
            if count <= 100 * CANDIDATES:  # much faster for few queries than a search without the group
                more = self._candidates(queries, min(count, len(self)))
                scores[lacking], ids[lacking] = self._best_elsewhere(queries, groups, more)
            else:
                scores[lacking], ids[lacking] = self._search_elsewhere(queries, groups)
        return scores, ids
