"""Matches at a false-accept level, for all that is searched."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter, methodcaller
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_sphere.geometry.checks import check_embeddings, to_tensor
from hf_sphere.search.calibration import ROUNDING, Calibration, Candidates, Nearest, Score, best_groups
from hf_sphere.search.vectors import unit_vectors
from hf_sphere.utils.checks import check_choice, check_integer
from hf_sphere.utils.pages import DataFrame, Table

CANDIDATES: dict[Score, int] = {"cosine": 20, "margin": 50}
"""Rows with the largest cosines, from which the rows of other groups are chosen, and groups are scored by margins."""

SCORED = 12
"""Groups that are scored by margins; rows of others have the score -inf."""

FEWEST = 64
"""Fewest vectors whose model is tested."""

MOST_CANDIDATES = 1_600
"""Candidates of a query, at most, if those before are of too few groups."""


@dataclass(frozen=True, repr=False)
class Matches(Table):
    """The nearest rows of queries, nearest first.

    Attributes:
        rows: (Q, k) int64, rows of the space; -1 where an approximate search found none.
        scores: (Q, k) float64, larger for better matches: the cosine, the margin of the row's group, or for another
            distance its negative.
        distances: (Q, k) float64, of the rows themselves; infinite where there is no row.
        p_values: (Q, k) float64, or None if the space has no calibration yet and no level was given.
        accepted: (Q, k) bool, whether the p-value is at most the level; None without a level.
        measure: What is compared: `cosine`, `margin`, or another distance.
        ids: The ids of the rows, Q lists of k; None where there is no row.
        queries: Of an `ImageIndex`, columns of the queries as in its `images`, and `embedding`, (Q, d).
    """

    rows: Tensor
    scores: Tensor
    distances: Tensor
    p_values: Tensor | None = None
    accepted: Tensor | None = None
    measure: str = "cosine"
    ids: list[list[Any]] = field(default_factory=list)
    queries: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        number, count = self.rows.shape
        found = "" if self.accepted is None else f"; {int(self.accepted.any(1).sum()):,} queries have a match"
        return f"Matches({number:,} queries, {count} row{'s' * (count != 1)} each, {self.measure}{found})"

    def to_pandas(self) -> DataFrame:
        """Return a row per query and neighbor: query, rank, row, score, and p_value and accepted if there are any."""
        import pandas as pd

        number, count = self.rows.shape
        queries = self.queries.get("file", range(number))
        columns = {"query": [query for query in queries for _ in range(count)], "rank": [*range(1, count + 1)] * number}
        columns |= {"id": [each for ids in self.ids for each in ids]} if self.ids else {}
        names = ("rows", "scores", "p_values", "accepted")
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        columns |= {name.removesuffix("s"): value.flatten().tolist() for name, value in values.items()}
        return pd.DataFrame(columns)


class ExpectedFound(NamedTuple):
    """What a level finds: see `EmbeddingSpace.expected_found`; `str` returns it in words."""

    level: float
    share: float  # of queries of groups in the space, that are accepted with their group
    low: float  # of the 95 % interval over groups
    high: float

    def __str__(self) -> str:
        share, low, high = (f"{100 * value:.0f}" for value in self[1:])
        text = f"finds about {share} of 100 queries of known groups ({low} to {high})"
        text += f"; of 100 others, {100 * self.level:g} pass"
        if self.level >= 0.1 and self.share < 0.1:
            text += "; these embeddings do not separate the groups: use a reranker, or fine-tune the model"
        return text


class CalibratedSearch(ABC):
    """Search for matches, with decisions by a `Calibration`.

    Attributes:
        metric: Distance, as options of `NeighborSearch`.
        score: `cosine` or `margin`, see `EmbeddingSpace.fit`.
    """

    metric: dict[str, Any]
    score: Score = "cosine"
    _calibration: Calibration | None = None
    _nearest: Nearest | None = None
    _dim: int
    _names: list[Any] | None = []  # of groups, by their numbers; None if each row is one
    _groups: Tensor  # number of the group of each row

    @property
    def calibration(self) -> Calibration:
        """The calibration of the current rows."""
        assert self._calibration is not None
        return self._calibration

    @property
    def is_calibrated(self) -> bool:
        """Whether searches without a level have p-values; others calibrate first."""
        return self._calibration is not None

    @abstractmethod
    def __len__(self) -> int: ...

    def _check(self, what: str, vectors: Any, ids: Sequence[Any] | None = None) -> Tensor:
        """Return valid vectors (n, d) to compare with the rows, unit vectors if these are; of one (d,) too."""
        vectors = to_tensor(what, vectors)
        vectors = vectors[None] if vectors.ndim == 1 else vectors
        if vectors.ndim == 2 and vectors.shape[1] != self._dim:
            raise ValueError(f"{what} must have {self._dim} dimensions, as the space; got {vectors.shape[1]}.")
        if self.metric["distance"] == "cosine":
            return unit_vectors(what, vectors, ids)
        return check_embeddings(vectors, 1, what).cpu().float()

    def _check_removal(self, what: str, names: set[Any], removed: Sequence[Any], hint: str = "") -> None:
        """Raise an error if a name is not that of a row to remove, by the names of these rows, or if no row remains."""
        if missing := names.difference(removed):
            raise ValueError(f"there is no {what} {next(iter(missing))!r} in the space.{hint}")
        if len(removed) == len(self):
            raise ValueError("no row would remain.")

    def _warn_of_foreign(self, queries: Tensor) -> None:  # noqa: B027
        """Warn if queries, of which there are enough to show it, are of another model."""

    @abstractmethod
    def _candidates(self, queries: Tensor, count: int, left_out: Tensor | None = None, among: Any = None) -> Candidates:
        """Return the rows with the largest similarities; of other groups than those of number `left_out`, if given.

        `among` are the only rows that are searched: their numbers, or a condition of LanceDB.
        """

    @abstractmethod
    def _ids_of(self, rows: Tensor) -> list[list[Any]]:
        """Return the ids of rows (Q, k), None where there is none."""

    def _names_of(self, rows: Tensor) -> list[Any]:
        """Return the name of the group of each row (Q,), of rows that have some."""
        names: Any = self._names
        return [names[number] for number in self._groups[rows].tolist()]

    def _offsets(self, rows: Tensor, left_out: Tensor | None = None) -> Tensor:
        """Return what margins of rows (Q, c) are above, as if groups of numbers `left_out`, (Q,), were new."""
        assert self._nearest is not None
        return self._nearest.offsets(rows, left_out)

    @property
    def smallest_p_value(self) -> float:
        """The lowest level of false accepts for which the calibration has enough groups."""
        return self.calibration.smallest_p_value

    def search(self, queries: Any, k: int = 10, *, false_accept: float | None = None) -> Matches:
        """Find the rows with the largest scores.

        By margins, the 12 best groups are scored, and rows of other groups have the score -inf. The rows of a group
        have its score, and are in the order of their similarity.

        Args:
            queries: (Q, d), or (d,) for one.
            k: Number of rows, at most N.
            false_accept: Level: the probability that anything is accepted for a query whose group is not in the space.

        Raises:
            ValueError: If a query or k is invalid, or the calibration has too few groups for the level.
        """
        return self._search_rows(queries, k, false_accept)

    def _search_rows(self, queries: Any, k: int, level: float | None, among: Any = None) -> Matches:
        if level is not None:
            self.calibration.check_level(level)
        queries = self._check("queries", queries)
        check_integer("k", k, 1, len(self))
        if len(queries) >= FEWEST:
            self._warn_of_foreign(queries)
        return self._judge(queries, k, level, level is not None or self.is_calibrated, among)

    def _judge(
        self,
        queries: Tensor,
        k: int,
        level: float | None,
        has_p_values: bool,
        among: Any = None,
        found: Candidates | None = None,
    ) -> Matches:
        """Return the best k rows of queries (Q, d), among the candidates that they found if these are known.

        If only a part of the rows is searched, the best groups are searched for among all where that matters. Without
        p-values, they are the nearest rows.
        """
        best, is_margin = None, has_p_values and self.score == "margin"
        needs_groups = is_margin or (has_p_values and self.calibration.needs_best)
        # Without groups, the best two rows are the best two groups.
        most = min(len(self), 2 if self._names is None and not is_margin else CANDIDATES[self.score])
        if found is None:
            count = max(k, most) if is_margin or (needs_groups and among is None) else k
            found = self._candidates(queries, count, among=among)
        if needs_groups:
            of_all = found if among is None else self._candidates(queries, most)
            best = self._find_groups(queries, Candidates(*map(itemgetter(np.s_[:, :most]), of_all)))
        measure = "margin" if is_margin else self.metric["distance"]
        scores, rows = found.scores, found.rows
        distances = 1 - scores if self.metric["distance"] == "cosine" else -scores
        if best is not None and is_margin:  # rows have the scores of their groups
            is_same = found.groups[:, :, None] == best.groups[:, None]
            scores = best.scores[:, None].where(is_same, -torch.inf).amax(2).masked_fill(rows < 0, -torch.inf)
            order = scores.argsort(dim=1, descending=True, stable=True)
            scores, rows, distances = map(methodcaller("gather", 1, order), (scores, rows, distances))
        scores, rows, distances = scores[:, :k], rows[:, :k], distances[:, :k]
        p_values = accepted = None
        if has_p_values:
            p_values = self.calibration.p_values(scores, best).masked_fill(rows < 0, 1.0).cummax(1).values
            accepted = None if level is None else p_values <= level * ROUNDING
        return Matches(rows, scores, distances, p_values, accepted, measure, self._ids_of(rows))

    def threshold(self, false_accept: float) -> float:
        """Return the cosine from which on a row is a match, to filter by where another program searches.

        By the sharp rule, and with separate calibration, it accepts what `search` does. By the other rules with rows
        that calibrate it is a little too high, since `search` knows the group of the best row, and needs more groups:
        2 / level - 1 by the strict one.

        Raises:
            ValueError: If the score is not the cosine, or the calibration has too few groups for the level.
        """
        check_choice("distance", self.metric["distance"], ["cosine"])
        check_choice("score", self.score, ["cosine"])
        return self.calibration.threshold(false_accept)

    def identify(self, queries: Any, false_accept: float) -> Any:
        """Return the name of the group that a query (d,) matches, or None; of several (Q, d), a list.

        Levels and errors are those of `search`, and groups without names are an error.
        """
        self.calibration.check_level(false_accept)  # also None
        queries = to_tensor("queries", queries)
        found = self.search(queries, 1, false_accept=false_accept)
        assert found.accepted is not None
        pairs = zip(self._names_of(found.rows[:, 0]), found.accepted[:, 0].tolist(), strict=True)
        names = [name if accepted else None for name, accepted in pairs]
        return names[0] if queries.ndim == 1 else names

    def _find(self, queries: Tensor, left_out: Tensor | None) -> Candidates:
        """Return the best two groups of queries, without the groups of number `left_out`."""
        count = min(len(self), CANDIDATES[self.score])
        found = self._find_groups(queries, self._candidates(queries, count, left_out), left_out)
        return Candidates(*(column[:, :2] for column in found))

    def _follow(
        self, old: Calibration, at: Tensor, queries: Tensor, left_out: Any, present: Tensor, added: Candidates | None
    ) -> Candidates:
        """Return the best two groups of queries, by what is known of those `at` places, and by rows that were added."""
        known = at.clamp_min(0)
        found = Candidates(old.scores[known], old.match_groups[known], old.matches[known], old.matches[known])
        is_fresh = (at < 0) | ~torch.isin(found.ids, present).all(1)  # new, or a best row is no longer present
        if added is not None:
            both = Candidates(*(torch.cat(pair, 1) for pair in zip(found, added, strict=True)))
            found = best_groups(sort_candidates(both), 2)
            # The next group may be beyond these candidates.
            is_of_one = (added.groups == added.groups[:, :1]).all(1) & (added.rows[:, -1] >= 0)
            is_fresh |= is_of_one & (added.rows.shape[1] == CANDIDATES[self.score])
        if is_fresh.any():
            fresh = self._find(queries[is_fresh], None if left_out is None else left_out[is_fresh])
            for column, values in zip(found, fresh, strict=True):
                column[is_fresh] = values
        return found

    def _find_groups(self, queries: Tensor, found: Candidates, left_out: Tensor | None = None) -> Candidates:
        """Return the best groups among candidates; more are searched for queries whose candidates are of one group."""
        rows, is_margin = found, self.score == "margin"
        if is_margin:
            rows = sort_candidates(found, found.scores - self._offsets(found.rows, left_out))
        top = best_groups(rows, SCORED if is_margin else 2, is_margin)
        lacking, count = (top.rows[:, 1] < 0) & (found.rows[:, -1] >= 0), 4 * found.rows.shape[1]
        if not lacking.any() or found.rows.shape[1] == len(self):
            return top
        without = None if left_out is None else left_out[lacking]
        if count <= MOST_CANDIDATES:
            more = self._candidates(queries[lacking], min(count, len(self)), without)
            for column, wider in zip(top, self._find_groups(queries[lacking], more, without), strict=True):
                column[lacking] = wider
        elif left_out is None:
            other = self._candidates(queries[lacking], 1, top.groups[lacking, 0])
            scores = other.scores - (self._offsets(other.rows) if is_margin else 0.0)
            for column, of_other in zip(top, (scores, *other[1:]), strict=True):
                column[lacking, 1] = of_other[:, 0]
        return top


def sort_candidates(found: Candidates, scores: Tensor | None = None, count: int | None = None) -> Candidates:
    """Return the best candidates by other scores (Q, c); equal ones stay in their order."""
    scores = found.scores if scores is None else scores
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
    return Candidates(*map(methodcaller("gather", 1, order), (scores, *found[1:])))
