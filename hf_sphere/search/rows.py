"""Vectors with ids and groups: their search, and its calibration."""

import logging
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hf_sphere.geometry.checks import shorten
from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.search.calibration import RULES, Calibration, Candidates, Nearest, Rule, Score, mean_interval
from hf_sphere.search.matching import CANDIDATES, CalibratedSearch, ExpectedFound
from hf_sphere.search.neighbor_search import NeighborSearch, SearchKind
from hf_sphere.search.vectors import Room, check_ids, check_names, mix, name_keys, name_numbers, positions, sample_rows
from hf_sphere.utils.checks import check_choice
from hf_sphere.utils.shared_rows import Rows

logger = logging.getLogger(__name__)


class GroupedVectors(CalibratedSearch):
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
        score: Literal["auto"] | Score = "auto",
        kind: SearchKind | None = None,
        rows_per_group: int = 8,
        calibration_rows: int = 5_000,
        seed: int = 0,
    ) -> None:
        if vectors.ndim != 2 or vectors.dtype != torch.float32:
            got = f"{vectors.dtype} {tuple(vectors.shape)}"
            raise ValueError(f"vectors must be float32 (N, d); got {got}. Use fit, and vectors[None] for one vector.")
        self.vectors, self._dim = vectors, vectors.shape[1]
        self._room = Room(vectors, len(vectors))
        self._numbers = torch.arange(len(vectors)) if numbers is None else numbers
        self._next = int(self._numbers.max()) + 1 if len(vectors) else 0
        self._ids: list[Any] | None = None if ids is None else check_ids(ids, len(vectors))
        self.metric = metric or {"distance": "cosine"}
        self.kind = kind
        self._names: list[Any] | None = None if groups is None else []
        self._groups = self._number(groups, self._numbers)
        self._choose_score(score)
        self._options = {"rows_per_group": rows_per_group, "calibration_rows": calibration_rows, "seed": seed}
        self._search: NeighborSearch | None = None
        self._sampled: Tensor | None = None
        self._queries: tuple[Tensor, Tensor] | None = None  # separate ones that calibrate, and their groups
        self._is_current = False
        self.rule: Rule = "bounded"
        self.skipped: list[Any] = []
        self.model: str | None = None
        self._loaded: tuple[Path, str | None] | None = None  # folder and version of the last load or save

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def ids(self) -> list[Any]:
        """The id of each row: that which was given, or a number that it keeps when others are added or removed."""
        return self._numbers.tolist() if self._ids is None else [*self._ids]

    def _ids_of(self, rows: Tensor) -> list[list[Any]]:
        """Return the ids of rows (Q, k), None where there is none."""
        ids = self._numbers[rows].numpy()
        if self._ids is not None:
            ids = np.fromiter(map(self._ids.__getitem__, rows.flatten().tolist()), object).reshape(rows.shape)
        return np.where(rows.numpy() < 0, np.array(None), ids).tolist()

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

    def _set(self, kept: Tensor, vectors: Tensor, numbers: Tensor, groups: Tensor, ids: list[Any] | None) -> None:
        """Keep some rows and append vectors with their numbers, (m,); groups and ids are those of all rows then."""
        if self._queries is not None and len(vectors) and (shared := self._shared(self._queries[0], vectors)):
            logger.warning("%s; calibrate again without them.", shared)
        if not torch.equal(groups[: len(kept)], self._groups[kept]):
            self._calibration = None
        is_whole = len(kept) == len(self)
        if not is_whole:
            self.vectors, self._numbers = self.vectors[kept], self._numbers[kept]
            self._room = Room(self.vectors, len(kept))
        if len(numbers):
            self.vectors, self._room = self._room.append(self.vectors, vectors)
            self._numbers = torch.cat([self._numbers, numbers])
            self._next = max(self._next, int(numbers.max()) + 1)
        if self._search is not None and (not is_whole or (len(numbers) and not self._search.extend(self.vectors))):
            self._search = None
        self._groups, self._ids, self._is_current, self._nearest, self._sampled = groups, ids, False, None, None
        if self._queries is None and len(self._groups.unique()) < 2:
            self._calibration = None  # so that a search without a level needs none

    def _number(self, groups: Any, rows: Tensor) -> Tensor:
        """Return a number for each group, (n,) int64; without groups, that of the row."""
        if groups is None:
            return rows
        names = check_names("groups", groups, len(rows))
        numbers = {name: number for number, name in enumerate(self._names or ())}
        for name in names:
            numbers.setdefault(name, len(numbers))
        self._names = list(numbers)
        return torch.tensor([numbers[name] for name in names])

    def _sample(self) -> Tensor:
        """Return the rows that calibrate and are compared, drawn by groups."""
        if self._sampled is None:
            numbers, options = self._groups.numpy(), self._options
            keys = mix(numbers) if self._names is None else name_keys(self._names)[numbers]
            keys = mix(keys ^ mix(np.array([options["seed"]])))
            limits = options["rows_per_group"], options["calibration_rows"]
            self._sampled = sample_rows(self._groups, keys, self._numbers, *limits)
        return self._sampled

    def _candidates(
        self, queries: Tensor, count: int, left_out: Tensor | None = None, among: Tensor | None = None
    ) -> Candidates:
        search, groups = self.neighbor_search, self._groups
        if among is not None:
            search, groups = NeighborSearch(self.vectors[among], kind="torch", **self.metric), groups[among]
        if left_out is None:
            distances, rows = search.find(queries, count)
        else:
            distances, rows = search.search_others(queries, count, groups, left_out)
        exists = rows >= 0
        scores = (1 - distances if self.metric["distance"] == "cosine" else -distances).where(exists, -torch.inf)
        rows = rows if among is None else among[rows].where(exists, -1)
        return Candidates(scores, self._groups[rows].where(exists, -1), self._numbers[rows].where(exists, -1), rows)

    def calibrate(
        self,
        queries: Any = None,
        groups: Any = None,
        *,
        score: Literal["auto"] | Score = "auto",
        rule: Rule = "bounded",
    ) -> None:
        """Calibrate the p-values again, by `calibration`, `calibration_groups`, `score` and `rule` of `fit`.

        Raises:
            ValueError: If there is only one group, a query is a row, or an argument is invalid.
            TypeError: If queries are no dense numbers.
        """
        check_choice("rule", rule, RULES)
        self._choose_score(score)
        separate = None
        if queries is not None:
            queries = self._check("calibration", queries)
            numbers = torch.arange(len(queries))
            if groups is not None:  # by which a group is also recognized that is added later
                numbers = name_numbers(check_names("calibration_groups", groups, len(queries)))
                self.check_groups(self.groups, numbers)
            if shared := self._shared(queries, self.vectors):
                hint = "leave them out, or let rows calibrate, each searched without its group (calibration=None)"
                raise ValueError(f"{shared}; {hint}.")
            separate = queries, numbers
        elif groups is not None:
            raise ValueError("calibration_groups are the groups of calibration, which is missing.")
        self._queries, self._calibration, self._nearest = separate, None, None
        self.rule = rule
        self._calibration, self._is_current = self._updated(), True

    def _shared(self, queries: Tensor, vectors: Tensor) -> str:
        """Return in words which separate calibration queries equal vectors of rows but for rounding, or no text."""
        project = project_to_sphere if self.metric["distance"] == "cosine" else Tensor.float
        rows = torch.cat([Rows.of(project(block)).digests for block in vectors.split(8192)])
        shared = torch.isin(Rows.of(project(queries)).digests, rows).nonzero()[:, 0].tolist()
        text = f"{len(shared):,} of {len(queries):,} calibration queries are rows of the space: {shorten(shared)}"
        return f"{text}. As perfect matches they raise the threshold" if shared else ""

    def _choose_score(self, score: Literal["auto"] | Score) -> None:
        check_choice("score", score, ("auto", "cosine", "margin"))
        is_cosine = self.metric["distance"] == "cosine"
        if score == "margin":
            check_choice("the distance of margins", self.metric["distance"], ["cosine"])
        self.score = ("margin" if is_cosine and self._names is not None else "cosine") if score == "auto" else score

    def check_groups(self, groups: Any, calibration: Tensor | None = None) -> None:
        """Raise an error if groups of rows, names or None, are also those of separate calibration queries."""
        if calibration is None and self._queries is not None:
            calibration = self._queries[1]
        if groups is None or calibration is None:
            return
        names = [*dict.fromkeys(groups)]
        if len(shared := torch.isin(name_numbers(names), calibration).nonzero()):
            which = f"groups of the space are groups of calibration queries, such as {names[shared[0]]!r}"
            hint = "these must have no match in the space: leave them out, or rename one of both"
            raise ValueError(f"{len(shared):,} {which}; {hint}.")

    @property
    def calibration(self) -> Calibration:
        """The calibration of the current rows; computed when it is first used, or after rows were changed.

        Raises:
            ValueError: If there are no two groups, or only those that chose the score.
        """
        if self._calibration is None or not self._is_current:
            self._calibration, self._is_current = self._updated(), True
        return self._calibration

    def expected_found(self, level: float) -> ExpectedFound:
        """Return the share of queries of known groups that a level accepts with the right group, before any query.

        It is measured on the rows that calibrate, each searched without itself, and on a sample of all rows if separate
        queries do; the mean over groups of two rows or more, with a 95 % interval over groups. Queries that differ from
        the rows, such as questions, find another share.

        Raises:
            ValueError: If the calibration has too few groups for the level, or there are no two groups of two rows.
        """
        self.calibration.check_level(level)
        rows = self._sample()
        group, sizes = self._groups.unique(return_inverse=True, return_counts=True)[1:]
        rows = rows[sizes[group[rows]] > 1]
        own, counts = self._groups[rows].unique(return_inverse=True, return_counts=True)[1:]
        if len(counts) < 2:
            raise ValueError(
                f"what a level finds is known from at least two groups of two rows; there are {len(counts)}. "
                "Give groups of several rows (groups=, --group_column)."
            )
        count = min(CANDIDATES[self.score] + 1, len(self))
        found = self._candidates(self.vectors[rows], count)
        is_other = (found.rows != rows[:, None]).int()
        order = is_other.argsort(dim=1, descending=True, stable=True)[:, : count - 1]  # the row itself is the last one
        found = Candidates(*(column.gather(1, order) for column in found))
        best = self._judge(self.vectors[rows], 1, level, True, found=found)
        assert best.accepted is not None
        hits = best.accepted[:, 0] & (self._groups[best.rows[:, 0]] == self._groups[rows])
        shares = torch.zeros(len(counts)).double().index_add(0, own, hits.double()) / counts
        low, mean, high = mean_interval(shares)
        return ExpectedFound(level, mean, low, high)

    def _offsets(self, rows: Tensor, left_out: Tensor | None = None) -> Tensor:
        if self._nearest is None:
            sample = self._sample()
            self._nearest = Nearest.of(self.vectors, self._groups, self.vectors[sample], self._groups[sample])
        return self._nearest.offsets(rows, left_out)

    def _calibrating(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the queries that calibrate, their groups and numbers, and the groups that are left out, if any."""
        if self._queries is not None:
            return *self._queries, torch.full((len(self._queries[1]),), -1), None
        if len(self._groups.unique()) < 2:
            hint = "Give groups=, or calibration queries without a match (calibration=)"
            raise ValueError(f"the vectors are of one group, so no query without a match is known. {hint}.")
        rows = self._sample()
        return self.vectors[rows], self._groups[rows], self._numbers[rows], self._groups[rows]

    def _updated(self) -> Calibration:
        """Return the calibration of the current rows; scores that cannot have changed are kept."""
        old, (queries, groups, ids, left_out) = self._calibration, self._calibrating()
        if old is None or self.score == "margin":
            found = self._find(queries, left_out)
        else:
            added = (self._numbers >= old.next_id).nonzero()[:, 0]
            count = min(CANDIDATES[self.score], len(added))
            new = self._candidates(queries, count, left_out, added) if count else None
            known = torch.arange(len(ids)) if left_out is None else positions(ids, old.ids)
            found = self._follow(old, known, queries, left_out, self._numbers, new)
        return Calibration(groups, ids, *found[:3], self._next, self.rule)
