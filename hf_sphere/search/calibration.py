"""Matches at a false-accept level: conformal p-values of similarities, by groups that are exchangeable."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.checks import to_tensor
from hf_sphere.utils.checks import check_integer

CANDIDATES = 20
"""Rows with the largest cosines, from which the density-corrected score and the rows of other groups are chosen."""


@dataclass(frozen=True)
class Matches:
    """The nearest rows of queries, nearest first.

    Attributes:
        rows: (Q, k) int64, rows of the space; -1 where an approximate search found none.
        scores: (Q, k) float64, larger for better matches: the cosine, the density-corrected cosine, or for another
            distance its negative.
        p_values: (Q, k) float64, or None if the space has no calibration yet and no level was given.
        accepted: (Q, k) bool, whether the p-value is at most the level; None without a level.
        measure: What is compared: `cosine`, `density`, or another distance.
        queries: Of an `ImageIndex`, columns of the queries as in its `images`, and `embedding`, (Q, d).
    """

    rows: Tensor
    scores: Tensor
    p_values: Tensor | None = None
    accepted: Tensor | None = None
    measure: str = "cosine"
    queries: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def distances(self) -> Tensor:
        """The distances, (Q, k) float64; infinite where there is no row.

        Raises:
            ValueError: If the score is the density-corrected cosine, which has no distance.
        """
        if self.measure == "density":
            raise ValueError("density-corrected cosines have no distances; fit with score='cosine', or use scores.")
        return 1 - self.scores if self.measure == "cosine" else -self.scores


@dataclass(frozen=True)
class Best:
    """The best row of each query: its id and group, (Q,) int64, and the best score in other groups, (Q,) float64."""

    ids: Tensor
    groups: Tensor
    elsewhere: Tensor


@dataclass(frozen=True)
class Calibration:
    r"""Best scores of queries whose group is not searched, and the p-values that follow from them.

    Let $s$ be the best score of a query $q$ of a new group, and $S_1, ..., S_C$ those of the calibration queries, each
    among the rows of other groups. Each of the $G$ groups has the weight 1, divided among its queries. Then
    $p = (1 + \sum_i w_i [S_i \geq s]) / (G + 1)$.

    If the calibration queries are rows of the gallery, they are searched among one group fewer than $q$. Only the group
    of the best row of $q$ makes a difference, and the larger of two counts is taken for it:

    - With $q$ as one more row of the gallery, all scores would be exchangeable for one row per group, and so $p$
      uniform or larger. That changes $S_i$ to $\max(S_i, s(x_i, q))$, which is at least $s$ for the best row only. So
      that row is counted, if it is a calibration query.
    - $q$ and $x_i$ are compared in the same groups: those that are neither of the two. So $S_i$ is compared with the
      best score of $q$ in other groups than that of $x_i$ (the jackknife+ of Barber, Candes, Ramdas and Tibshirani,
      Annals of Statistics 2021). That matters for groups of almost equal rows.
    """

    groups: Tensor  # (C,) int64, number of the group of each query
    scores: Tensor  # (C,) float64, its best score among other groups
    matches: Tensor  # (C,) int64, id of the row with that score
    ids: Tensor  # (C,) int64, the id of the row that is the query; -1 for separate queries
    next_id: int  # of the next new row when the scores were computed: rows from it on are not searched yet
    is_chosen: bool = False  # the score, by a third of the groups, which do not calibrate

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.members[0])

    @property
    def is_separate(self) -> bool:
        """Whether the queries are no rows of the gallery."""
        return bool((self.ids < 0).all())

    @property
    def smallest_p_value(self) -> float:
        """The p-value of a query that matches better than all calibration queries do."""
        own = 0.0 if self.is_separate else float(self._weights.amax())
        return (1 + own) / (self.num_groups + 1)

    def check_level(self, level: float, smallest: float | None = None) -> None:
        """Raise an error if a level is not in (0, 1), or below the smallest p-value."""
        smallest = smallest or self.smallest_p_value
        if not isinstance(level, Real) or not 0 < level < 1:
            raise ValueError(f"false_accept must be between 0 and 1; got {level!r}.")
        if not accepts(torch.tensor(smallest, dtype=torch.float64), level):
            own = smallest * (self.num_groups + 1) - 1
            needed = int(np.ceil((1 + own) / level * (1 - 1e-12))) - 1
            found, more = f"{self.num_groups:,}, whose smallest p-value is {smallest:.3g}", "more groups"
            if self.is_chosen:
                found += ", since score='auto' spent a third of the groups on the choice"
                more = "score='cosine', which calibrates by all of them, and more groups if these are too few"
            raise ValueError(
                f"false_accept={level:g} needs {needed:,} calibration groups; there are {found}. Choose a higher "
                f"level, or fit with {more}, or with separate calibration queries (calibration=, or hf-sphere index "
                "--calibration)."
            )

    def p_values(self, scores: Tensor, best: Best | None) -> Tensor:
        """Return the p-values of scores (Q, k) of queries, (Q, k) float64; separate ones need no best row."""
        order = self.scores.argsort()
        below = F.pad(self._weights[order].cumsum(0), (1, 0))
        counts = self.num_groups - below[torch.searchsorted(self.scores[order], scores.contiguous())]
        if best is not None and not self.is_separate:
            names, members = self.members
            at = torch.searchsorted(names, best.groups).clamp_max(len(names) - 1)
            queries = members[at].where((names[at] == best.groups)[:, None], -1)  # of the group of the best row
            weights = self._weights[queries].masked_fill(queries < 0, 0.0)[..., None]
            own, lowest = self.scores[queries][..., None], torch.minimum(scores, best.elsewhere[:, None])
            at_least = own >= scores[:, None]
            is_best = (self.ids[queries] == best.ids[:, None])[..., None]
            by_row, by_group = (weights * (at_least | is_best)).sum(1), (weights * (own >= lowest[:, None])).sum(1)
            counts += torch.maximum(by_row, by_group) - (weights * at_least).sum(1)
        return ((1 + counts) / (self.num_groups + 1)).clamp_max(1.0)

    def threshold(self, level: float) -> float:
        """Return the smallest score that is accepted even if the whole group of the best row counts."""
        own = 0 if self.is_separate else 1
        self.check_level(level, (1 + own) / (self.num_groups + 1))
        order = self.scores.argsort(descending=True)
        rejected = ~accepts((1 + own + self._weights[order].cumsum(0)) / (self.num_groups + 1), level)
        # Just above the best score that is rejected; all are accepted if none is.
        highest = self.scores[order][rejected][:1]
        return float(np.nextafter(highest.numpy(), np.inf)[0]) if len(highest) else -np.inf

    @cached_property
    def _weights(self) -> Tensor:
        """Weight of each query, (C,) float64: those of a group sum up to 1."""
        _, group, counts = self.groups.unique(return_inverse=True, return_counts=True)
        return 1 / counts[group].double()

    @cached_property
    def members(self) -> tuple[Tensor, Tensor]:
        """The groups (G,), in increasing order, and the queries of each, (G, m), filled up with -1."""
        names, counts = self.groups.unique(return_counts=True)
        columns = torch.arange(int(counts.max()))
        at = (counts.cumsum(0) - counts)[:, None] + columns
        queries = self.groups.argsort(stable=True)[at.clamp_max(len(self.groups) - 1)]
        return names, queries.where(columns < counts[:, None], -1)


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
    _groups: Tensor  # number of the group of each row

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

    def _names_of(self, rows: Tensor) -> list[Any]:
        """Return the name of the group of each row (Q,)."""
        if self._names is None:
            raise ValueError("the rows have no names; fit with groups=.")
        return [self._names[number] for number in self._groups[rows].tolist()]

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
        found = self._candidates(queries, min(max(k, CANDIDATES), len(self)))
        return self.judge(queries, found.scores[:, :k], found.rows[:, :k], false_accept, found)

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
            found = Candidates(*(column[:, :CANDIDATES] for column in candidates))
            groups = found.groups[:, 0].contiguous()
            best = Best(found.ids[:, 0], groups, self._best_elsewhere(queries, groups, found)[0])
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
        found = self.search(queries, 1, false_accept=false_accept)
        assert found.accepted is not None
        pairs = zip(self._names_of(found.rows[:, 0]), found.accepted[:, 0].tolist(), strict=True)
        names = [name if accepted else None for name, accepted in pairs]
        return names[0] if queries.ndim == 1 else names

    def _check_search(self, queries: Any, k: int, level: float | None) -> Tensor:
        if level is not None:
            self.calibration.check_level(level)
        queries = self._check("queries", queries)
        if check_integer("k", k, 1) > len(self):
            raise ValueError(f"k must be from 1 to the number of rows, {len(self):,}; got {k}.")
        return queries

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


def accepts(p_values: Tensor, level: float) -> Tensor:
    """Whether p-values are at most a level, up to rounding."""
    return p_values <= level * (1 + 1e-12)


def sample_rows(groups: Tensor, keys: np.ndarray, ids: Tensor, per_group: int, most: int) -> Tensor:
    """Draw groups (N,), and rows of each, by their keys: those of groups that stay do not change when others are added.

    The keys, (N,) uint64, are pseudo-random and equal within a group. At least one group is drawn, and at most
    `per_group` rows of each and `most` in all. The rows are in increasing order, int64.
    """
    order = torch.from_numpy(np.lexsort((mix(ids.numpy()), groups.numpy(), keys)))
    _, counts = groups[order].unique_consecutive(return_counts=True)
    per_group = max(1, min(per_group, most // len(counts)))  # more groups rather than more rows of each
    rank = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    end = counts.clamp_max(per_group).cumsum(0).repeat_interleave(counts)  # of the rows of complete groups so far
    chosen = (rank < per_group) & (end <= max(most, int(end[0])))
    return order[chosen].sort().values


def independent_rows(groups: Tensor, most: int, seed: int) -> Tensor:
    """Draw one row per group (N,), of up to `most` groups: those of one group belong together."""
    salt = mix(np.array([seed]))
    ids = torch.from_numpy((mix(np.arange(len(groups))) ^ salt).view(np.int64))
    return sample_rows(groups, mix(mix(groups.numpy()) ^ salt), ids, 1, most)


def mix(values: np.ndarray) -> np.ndarray:
    """Return pseudo-random numbers, uint64, that follow from integers (the finalizer of SplitMix64)."""
    bits = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def name_keys(names: Sequence[str | int]) -> np.ndarray:
    """Return a pseudo-random number for each name, uint64."""
    digests = b"".join(hashlib.blake2b(repr(name).encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(digests, np.uint64)


def name_numbers(names: Sequence[str | int]) -> Tensor:
    """Return the number of each name as int64."""
    return torch.from_numpy(name_keys(names).view(np.int64).copy())
