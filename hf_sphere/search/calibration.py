"""Matches at a false-accept level: conformal p-values of similarities, by groups that are exchangeable."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.checks import to_tensor
from hf_sphere.search.margins import BLOCK, Groups, Nearest, Score, best_groups, group_scores
from hf_sphere.utils.checks import check_integer
from hf_sphere.utils.pages import Table

if TYPE_CHECKING:
    from pandas import DataFrame

CANDIDATES: dict[Score, int] = {"cosine": 20, "margin": 50}
"""Rows with the largest cosines, from which the rows of other groups are chosen, and groups are scored by margins."""

SCORED = 12
"""Groups that are scored by margins; rows of others have the score -inf."""

MOST_CANDIDATES = 1_600
"""Candidates of a query, at most, if those before are of too few groups."""

Rule = Literal["sharp", "strict"]


@dataclass(frozen=True, repr=False)
class Matches(Table):
    """The nearest rows of queries, nearest first.

    Attributes:
        rows: (Q, k) int64, rows of the space; -1 where an approximate search found none.
        scores: (Q, k) float64, larger for better matches: the cosine, the margin of the row's group, or for another
            distance its negative.
        p_values: (Q, k) float64, or None if the space has no calibration yet and no level was given.
        accepted: (Q, k) bool, whether the p-value is at most the level; None without a level.
        measure: What is compared: `cosine`, `margin`, or another distance.
        ids: The ids of the rows, Q lists of k; None where there is no row.
        queries: Of an `ImageIndex`, columns of the queries as in its `images`, and `embedding`, (Q, d).
    """

    rows: Tensor
    scores: Tensor
    p_values: Tensor | None = None
    accepted: Tensor | None = None
    measure: str = "cosine"
    ids: list[list[Any]] = field(default_factory=list)
    queries: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        number, count = self.rows.shape
        found = "" if self.accepted is None else f"; {int(self.accepted.any(1).sum()):,} queries have a match"
        return f"Matches({number:,} queries, {count} rows each, {self.measure}{found})"

    def to_pandas(self) -> "DataFrame":
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

    @property
    def distances(self) -> Tensor:
        """The distances, (Q, k) float64; infinite where there is no row.

        Raises:
            ValueError: If the score is a margin, which has no distance.
        """
        if self.measure == "margin":
            raise ValueError("margins have no distances; fit with score='cosine', or use scores.")
        return 1 - self.scores if self.measure == "cosine" else -self.scores


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


@dataclass(frozen=True)
class Best:
    """The number of the best row of each query and of its group, (Q,) int64, and the best score elsewhere, (Q,)."""

    ids: Tensor
    groups: Tensor
    elsewhere: Tensor


@dataclass(frozen=True)
class Calibration:
    r"""Best scores of queries whose group is not searched, and the p-values that follow from them.

    Let $s$ be the best score of a query $q$ of a new group, and $S_1, ..., S_C$ those of the calibration queries, each
    among the rows of other groups. Each of the $G$ groups has the weight 1, divided among its queries, so
    $Q(s) = \sum_i w_i [S_i \geq s]$ is the number of groups that match as well as $q$ does.

    `sharp`: $p = \max(1 / (G + 1), \sum_i w_i [Q_i \leq Q(s)] / G)$, where $Q_i$ is what $Q$ would be for the
    calibration query $i$ if its group were the new one: without this group, and with the next best match of the queries
    whose best match it is. The share of the queries that stand out as much as $q$ is counted, not the groups above it.

    `strict`: $p = (1 + Q(s)) / (G + 1)$. For separate calibration queries, whose groups are exchangeable with that of
    $q$, the probability that it is at most a level is at most this level (hierarchical conformal prediction: Lee,
    Barber and Willett, 2023). If the calibration queries are rows of the gallery, they are searched among one group
    fewer than $q$. Only the group of the best row of $q$ makes a difference, and the larger of two counts is taken for
    it:

    - With $q$ as one more row of the gallery, all scores would be exchangeable for one row per group, and so $p$
      uniform or larger. That changes $S_i$ to $\max(S_i, s(x_i, q))$, which is at least $s$ for the best row only. So
      that row is counted, if it is a calibration query.
    - $q$ and $x_i$ are compared in the same groups: those that are neither of the two. So $S_i$ is compared with the
      best score of $q$ in other groups than that of $x_i$ (the jackknife+ of Barber, Candes, Ramdas and Tibshirani,
      Annals of Statistics 2021). That matters for groups of almost equal rows.

    With one calibration query per group the strict rule is exact, and both rules are this one.
    """

    groups: Tensor  # (C,) int64, number of the group of each query
    ids: Tensor  # (C,) int64, the number of the row that is the query; -1 for separate queries
    scores: Tensor  # (C, 2) float64, its best score among other groups, and the best one without that group
    match_groups: Tensor  # (C, 2) int64, numbers of these groups; -1 for none
    matches: Tensor  # (C, 2) int64, numbers of the best rows of these groups; -1 for none
    next_id: int  # of the next new row when the scores were computed: rows from it on are not searched yet
    rule: Rule = "sharp"

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.members[0])

    @property
    def is_separate(self) -> bool:
        """Whether the queries are no rows of the gallery."""
        return bool((self.ids < 0).all())

    @property
    def is_sharp(self) -> bool:
        """Whether the p-values are those of the sharp rule."""
        return self.rule == "sharp" and self.num_groups < len(self.groups)

    @property
    def needs_best(self) -> bool:
        """Whether p-values depend on the best row of the query."""
        return not (self.is_sharp or self.is_separate)

    @property
    def smallest_p_value(self) -> float:
        """The lowest level that is not refused: the p-value of a query that matches better than all others do."""
        own = float(self._weights.amax()) if self.needs_best else 0.0
        return (1 + own) / (self.num_groups + 1)

    def check_level(self, level: float, smallest: float | None = None) -> None:
        """Raise an error if a level is not in (0, 1), or below the smallest p-value."""
        smallest = smallest or self.smallest_p_value
        if not isinstance(level, Real) or not 0 < level < 1:
            raise ValueError(f"false_accept must be between 0 and 1; got {level!r}.")
        if not accepts(torch.tensor(smallest, dtype=torch.float64), level):
            own = smallest * (self.num_groups + 1) - 1
            needed = int(np.ceil((1 + own) / level * (1 - 1e-12))) - 1
            found = f"{self.num_groups:,}, whose smallest p-value is {smallest:.3g}"
            raise ValueError(
                f"false_accept={level:g} needs {needed:,} calibration groups; there are {found}. Choose a higher "
                "level, or fit with more groups, or with separate calibration queries (calibration=, or hf-sphere "
                "index --calibration)."
            )

    def p_values(self, scores: Tensor, best: Best | None = None) -> Tensor:
        """Return the p-values of scores (Q, k) of queries, (Q, k) float64, of their best rows where these count."""
        counts = self._counts(scores)
        if self.is_sharp:
            ranks, shares = self._ranks
            # Sums of weights are equal up to rounding.
            share = shares[torch.searchsorted(ranks, counts + 1e-9, right=True)]
            return share.clamp(1 / (self.num_groups + 1), 1.0)
        if best is not None:
            counts = counts + self._counts_of_best(scores, best)
        return ((1 + counts) / (self.num_groups + 1)).clamp_max(1.0)

    def _counts(self, scores: Tensor) -> Tensor:
        """Return the number of groups whose queries have at least the scores."""
        order = self.scores[:, 0].argsort()
        below = F.pad(self._weights[order].cumsum(0), (1, 0))
        return self.num_groups - below[torch.searchsorted(self.scores[order, 0].contiguous(), scores.contiguous())]

    def _counts_of_best(self, scores: Tensor, best: Best) -> Tensor:
        """Return what the group of the best row counts more."""
        names, members = self.members
        at = torch.searchsorted(names, best.groups).clamp_max(len(names) - 1)
        queries = members[at].where((names[at] == best.groups)[:, None], -1)
        weights = self._weights[queries].masked_fill(queries < 0, 0.0)[..., None]
        own, lowest = self.scores[queries, 0][..., None], torch.minimum(scores, best.elsewhere[:, None])
        at_least = own >= scores[:, None]
        is_best = (self.ids[queries] == best.ids[:, None])[..., None]
        by_row, by_group = (weights * (at_least | is_best)).sum(1), (weights * (own >= lowest[:, None])).sum(1)
        return torch.maximum(by_row, by_group) - (weights * at_least).sum(1)

    @cached_property
    def _ranks(self) -> tuple[Tensor, Tensor]:
        """The Q_i of the sharp rule in increasing order, (C,), and the share of queries below each, (C + 1,)."""
        ranks = torch.empty(len(self.groups), dtype=torch.float64)
        for rows in torch.arange(len(ranks)).split(max(1, BLOCK // len(ranks))):
            own, scores = self.groups[rows, None], self.scores[rows, :1]
            others = self.scores[:, 1].where(self.match_groups[:, 0] == own, self.scores[:, 0])
            ranks[rows] = ((others >= scores) & (self.groups != own)).double() @ self._weights
        order = ranks.argsort()
        return ranks[order], F.pad(self._weights[order].cumsum(0), (1, 0)) / self.num_groups

    def threshold(self, level: float) -> float:
        """Return the smallest score that is accepted; for `strict` even if the whole group of the best row counts."""
        own = 1 if self.needs_best else 0
        self.check_level(level, (1 + own) / (self.num_groups + 1))
        scores = self.scores[:, 0].sort(descending=True).values
        p_values = self.p_values(scores[:, None])[:, 0] + own / (self.num_groups + 1)
        # Just above the best score that is rejected; all are accepted if none is.
        highest = scores[~accepts(p_values, level)][:1]
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
    """Rows that queries found, (Q, c) each, best first: scores, rows (-1 for none), their and their groups' numbers."""

    scores: Tensor
    rows: Tensor
    ids: Tensor
    groups: Tensor


class CalibratedSearch(ABC):
    """Search for matches, with decisions by a `Calibration`.

    Attributes:
        metric: Distance, as options of `NeighborSearch`.
        score: `cosine` or `margin`, see `EmbeddingSpace.fit`.
    """

    metric: dict[str, Any]
    score: Score = "cosine"
    _nearest: Nearest | None = None
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
    def _candidates(self, queries: Tensor, count: int, left_out: Tensor | None = None) -> Candidates:
        """Return the rows with the largest similarities; of other groups than those of number `left_out`, if given."""

    @property
    def _num_candidates(self) -> int:
        return min(len(self), CANDIDATES[self.score])

    @property
    def _measure(self) -> str:
        return self.score if self.metric["distance"] == "cosine" else self.metric["distance"]

    def _names_of(self, rows: Tensor) -> list[Any]:
        """Return the name of the group of each row (Q,)."""
        if self._names is None:
            raise ValueError("the rows have no names; fit with groups=.")
        return [self._names[number] for number in self._groups[rows].tolist()]

    @abstractmethod
    def _ids_of(self, rows: Tensor) -> list[list[Any]]:
        """Return the ids of rows (Q, k), None where there is none."""

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
        queries = self._check_search(queries, k, false_accept)
        count = max(k, self._num_candidates) if self._needs_groups(false_accept) else k
        found = self._candidates(queries, count)
        return self._judge(queries, found, k, false_accept, found)

    def _needs_groups(self, false_accept: float | None) -> bool:
        """Whether scores or p-values depend on the best groups of a query."""
        has_p_values = false_accept is not None or self.is_calibrated
        return self.score == "margin" or (has_p_values and self.calibration.needs_best)

    def _judge(
        self, queries: Tensor, found: Candidates, k: int, false_accept: float | None, all_rows: Candidates | None = None
    ) -> Matches:
        """Return the best k of rows that queries (Q, d) found, also of a part of the rows, with p-values at a level.

        The first candidates among all rows are searched if they are not given and make a difference.
        """
        best = None
        if self._needs_groups(false_accept):
            count = self._num_candidates
            first = Candidates(*(column[:, :count] for column in all_rows or self._candidates(queries, count)))
            groups = self._find_groups(queries, first)
            if self.score == "margin":
                found = _by_groups(found, groups)
            best = Best(groups.ids[:, 0], groups.groups[:, 0].contiguous(), groups.scores[:, 1])
        found = Candidates(*(column[:, :k] for column in found))
        ids = self._ids_of(found.rows)
        if false_accept is None and not self.is_calibrated:
            return Matches(found.rows, found.scores, measure=self._measure, ids=ids)
        p_values = self.calibration.p_values(found.scores, best).masked_fill(found.rows < 0, 1.0).cummax(1).values
        accepted = None if false_accept is None else accepts(p_values, false_accept)
        return Matches(found.rows, found.scores, p_values, accepted, self._measure, ids)

    def threshold(self, false_accept: float) -> float:
        """Return the cosine from which on a row is a match, to filter by where another program searches.

        By the sharp rule, and with separate calibration, it accepts what `search` does. By the strict rule with rows
        that calibrate it is a little too high, since `search` knows the group of the best row, and needs 2 / level - 1
        groups.

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

    def _find(self, queries: Tensor, left_out: Tensor | None) -> Groups:
        """Return the best two groups of queries, without the groups of number `left_out`."""
        found = self._find_groups(queries, self._candidates(queries, self._num_candidates, left_out), left_out)
        return Groups(*(column[:, :2] for column in found))

    def _near(self) -> Nearest:
        """Return the other groups that rows are nearest to."""
        assert self._nearest is not None
        return self._nearest

    def _find_groups(self, queries: Tensor, found: Candidates, left_out: Tensor | None = None) -> Groups:
        """Return the best groups among candidates; more are searched for queries whose candidates are of one group."""
        rows = found
        if self.score == "margin":
            scores = found.scores - self._near().offsets(found.rows, left_out)
            order = scores.argsort(dim=1, descending=True, stable=True)
            rows = Candidates(*(column.gather(1, order) for column in (scores, *found[1:])))
        scores, is_first = group_scores(rows.scores, rows.groups, self.score == "cosine")
        top = best_groups(scores, is_first, rows.groups, rows.ids, 2 if self.score == "cosine" else SCORED)
        lacking, count = (top.groups[:, 1] < 0) & (found.rows[:, -1] >= 0), 4 * found.rows.shape[1]
        if not lacking.any() or found.rows.shape[1] == len(self):
            return top
        without = None if left_out is None else left_out[lacking]
        if count <= MOST_CANDIDATES:
            more = self._candidates(queries[lacking], min(count, len(self)), without)
            for column, wider in zip(top, self._find_groups(queries[lacking], more, without), strict=True):
                column[lacking] = wider
        elif left_out is None:
            other = self._candidates(queries[lacking], 1, top.groups[lacking, 0])
            scores = other.scores - (self._near().offsets(other.rows) if self.score == "margin" else 0.0)
            for column, of_other in zip(top, (scores, other.groups, other.ids), strict=True):
                column[lacking, 1] = of_other[:, 0]
        return top


def _by_groups(found: Candidates, groups: Groups) -> Candidates:
    """Return rows with the scores of their groups, in the order of these."""
    is_same = found.groups[:, :, None] == groups.groups[:, None]
    scores = groups.scores[:, None].where(is_same, -torch.inf).amax(2).masked_fill(found.rows < 0, -torch.inf)
    order = scores.argsort(dim=1, descending=True, stable=True)
    return Candidates(*(column.gather(1, order) for column in (scores, *found[1:])))


def merge_groups(known: Groups, found: Candidates) -> Groups:
    """Return the best two groups of two known ones and of candidates, by their best rows."""
    pairs = zip(known, (found.scores, found.groups, found.ids), strict=True)
    columns = [torch.cat(pair, 1) for pair in pairs]
    order = columns[0].argsort(dim=1, descending=True, stable=True)
    scores, groups, ids = (column.gather(1, order) for column in columns)
    return best_groups(*group_scores(scores, groups, True), groups, ids, 2)


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
