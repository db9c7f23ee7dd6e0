"""A space of embeddings: search, matches at a false-accept level, identification."""

from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from hf_sphere.geometry.checks import to_embeddings
from hf_sphere.search.calibration import Rule, Score
from hf_sphere.search.compression import CompressedSpace, compress
from hf_sphere.search.drift import ComparedVectors
from hf_sphere.search.index_files import read_index, write_index
from hf_sphere.search.neighbor_search import SearchKind
from hf_sphere.search.report import VectorReport, report_vectors
from hf_sphere.search.vectors import as_list, as_names, check_ids, check_names, unit_vectors, usable_rows
from hf_sphere.utils.checks import check_choice, check_integer, check_seed
from hf_sphere.utils.pages import DataFrame, Table

if TYPE_CHECKING:
    from hf_sphere.search.duplicates import Duplicates


class EmbeddingSpace(ComparedVectors, Table):
    """Embeddings that are searched for matches, with a promise about queries that have none.

    For a query of a group that is not in the space, the probability that any row is accepted is at most
    `false_accept`, if its group is exchangeable with the calibration; see `Calibration`. Decisions are per
    query. By default the calibration queries are rows of the space, each searched without its own group. So an index of
    an approximate search, which may miss the best row, accepts at most less.

    For cosines with one row per group this is a theorem, and for `rule="strict"` with separate calibration queries,
    too. In other cases it was measured: the sharp rule exceeds the level where a few groups are twins, and each rule
    where rows calibrate and a few groups are mixed in a cycle; see `Calibration` for the bounds.

    Attributes:
        vectors: (N, d) float32.
        score: `cosine` or `margin`.
        model: Name of the model of the vectors, or None.
        migration: How `migrate` mapped them, or None.
        skipped: Ids of the rows that `fit` left out, row numbers without ids.
        rule: `bounded`, `sharp` or `strict`.

    Example:
        >>> space = EmbeddingSpace.fit(embeddings, groups=labels)
        >>> found = space.search(embeddings[:2], k=3, false_accept=0.9)
        >>> found.rows.shape, found.accepted.dtype
        (torch.Size([2, 3]), torch.bool)
    """

    @classmethod
    def fit(
        cls,
        vectors: Any,
        groups: Any = None,
        *,
        ids: Any = None,
        invalid: Literal["refuse", "skip"] = "refuse",
        model: str | None = None,
        calibration: Any = None,
        calibration_groups: Any = None,
        score: Literal["auto"] | Score = "auto",
        rule: Rule = "bounded",
        rows_per_group: int = 8,
        calibration_rows: int = 5_000,
        kind: SearchKind | None = None,
        seed: int = 0,
    ) -> "EmbeddingSpace":
        """Make a space of vectors and calibrate it.

        Args:
            vectors: (N, d), finite and not zero: a tensor, an array, lists or a column of a dataset. They are
                normalized, with a message if they are not unit vectors. Unit vectors of float32 are not copied: do not
                change them later.
            groups: (N,) names, text or integers: rows of one group match each other, such as the sentences of an
                article or the photographs of a person. If None, each row is a group; then near-duplicates count as
                matches of different groups, which makes the threshold high.
            ids: (N,) different texts or integers, by which results name the rows. If None, a row has a number that it
                keeps when others are added or removed.
            invalid: What to do with rows that are not finite, or zero: `refuse` them by an error with their ids, or
                `skip` them, with a message; see `skipped`.
            model: Name of the model of the vectors, by which those of others are recognized; see `check_model`.
            calibration: (C, d) vectors like the queries to come, which have no match in the space: one that is also a
                row is an error, or a warning if it is added later. If None, rows of the space take their place.
            calibration_groups: (C,) names of their groups, which are none of the space; if None, each is a group.
            score: `cosine`, or `margin`: log-sum-exp over the rows of a group of how much their cosine to the query is
                above the mean of the row's cosines to its three nearest other groups. It finds more, and has no
                threshold for other engines. If `auto`, `margin` if there are groups.
            rule: `strict`, `bounded` or `sharp`, from the fewest matches to the most: with separate calibration, at
                most 1, 1.2 and 2 times the level is accepted. They differ for groups of several calibration queries;
                see `Calibration`.
            rows_per_group: Maximum number of rows of a group that are calibration queries.
            calibration_rows: Maximum number of calibration queries that are rows of the space.
            kind: Kind of the search, see `NeighborSearch`; if None, chosen by the number of rows.
            seed: Seed of the choice of calibration queries.

        Raises:
            ValueError: If an argument is invalid, a calibration query is a row, or there is only one group.
        """
        limits: Any = {"rows_per_group": rows_per_group, "calibration_rows": calibration_rows}
        options: Any = {name: check_integer(name, limit, 1) for name, limit in limits.items()}
        options["seed"] = check_seed(seed)
        vectors, numbers, skipped = to_embeddings(vectors, 1, "vectors"), None, list[Any]()
        groups = None if groups is None else check_names("groups", groups, len(vectors))
        ids = None if ids is None else check_ids(ids, len(vectors))
        if check_choice("invalid", invalid, ("refuse", "skip")) == "skip":
            numbers, skipped = usable_rows("vectors", vectors, ids)
            vectors = vectors[numbers] if skipped else vectors
            groups, ids = (names and [names[row] for row in numbers.tolist()] for names in (groups, ids))
        units = unit_vectors("vectors", vectors, ids, ", or leave them out with invalid='skip'")
        space = cls(units, groups, ids=ids, numbers=numbers, score=score, kind=kind, **options)
        space.skipped, space.model = skipped, model
        space.calibrate(calibration, calibration_groups, score=score, rule=rule)
        return space

    def __repr__(self) -> str:
        groups = "" if self._names is None else f", {len(self._groups.unique()):,} groups"
        text = f"EmbeddingSpace({len(self):,} vectors of {self.vectors.shape[1]} dimensions{groups}"
        if (known := self._calibration) is not None:
            which = "rows" if self._queries is None else "separate queries"
            text += f"; {self.score} score, calibrated by {len(known.groups):,} {which} of {known.num_groups:,} groups"
        return text + ")"

    def to_pandas(self) -> DataFrame:
        """Return a row per vector: id, and group if there are groups."""
        import pandas as pd

        groups = {} if self._names is None else {"group": self.groups}
        return pd.DataFrame({"id": list(self.ids), **groups})

    def compress(
        self, bits: Literal[1, 2, 4, 8] = 2, *, max_recall_loss: float | None = None, seed: int = 0
    ) -> CompressedSpace:
        """Return a space of codes of FAISS instead of vectors, which finds the largest cosines.

        Its recall@10 is measured before, for queries that are held out, also when the codes are fitted: a row per
        group, up to 500 and a tenth of all, among the other rows. The codes of all rows are calibrated then.

        Args:
            bits: Bits per dimension.
            max_recall_loss: Largest loss that is accepted, by its 95 % interval over groups: 0.1 for a recall of 0.9.
            seed: Seed of the queries and of the codes.

        Raises:
            ValueError: If the loss may be larger, the space is too small, or an argument is invalid.
            ImportError: If FAISS is not installed, or too old.
        """
        return compress(self, bits, max_recall_loss, seed)

    def add(
        self, groups: Any, vectors: Any, *, ids: Any = None, model: str | None = None, check: bool = True
    ) -> list[Any]:
        """Add rows (n, d), or one (d,), and return their ids; groups are a name for all, or one for each.

        The calibration follows: for cosines by the new rows alone. Separate calibration queries that become rows cause
        a warning with their number. A space without groups has None, and one that was
        fitted without ids numbers the rows. Vectors of another `model` are refused unless `check` is False, see
        `check_model`.

        Raises:
            ValueError: If a vector, name or id is invalid, a group calibrates, or the vectors are of another model.
        """
        for what, given, known in (("ids", ids, self._ids), ("groups", groups, self._names)):
            if (given is None) != (known is None):
                raise ValueError(f"the space has {'no ' * (known is None)}{what}; add rows alike ({what}=).")
        vectors = self._check("vectors", vectors, None if ids is None else (ids := as_list(ids)))
        if check:
            self._refuse_foreign(vectors, model)
        if self._ids is not None:
            ids = check_ids(ids, len(vectors), self._ids)
        if self._names is not None:
            groups = as_list(groups) * (len(vectors) if np.ndim(groups) == 0 else 1)
            check_names("groups, old and new,", [self._names[0], *groups], 1 + len(groups))
            self.check_groups(groups)
        numbers = torch.arange(self._next, self._next + len(vectors))
        all_groups = torch.cat([self._groups, self._number(groups, numbers)])
        self._set(torch.arange(len(self)), vectors, numbers, all_groups, self._ids and self._ids + ids)
        return numbers.tolist() if self._ids is None else ids

    def remove(self, groups: Any = None, *, ids: Any = None) -> int:
        """Remove the rows of a group or of several, or those with ids; return their number.

        Raises:
            ValueError: If there is no such group or id, or no row remains.
        """
        what, wanted = as_names(groups, ids)
        names = self.ids if what == "id" else self.groups or []
        removed = [name for name in names if name in wanted]
        hint = " Name its rows by ids=." if what == "group" and wanted.intersection(self._ids or []) else ""
        self._check_removal(what, wanted, removed, hint)
        kept = torch.tensor([name not in wanted for name in names]).nonzero()[:, 0]
        ids = self._ids and [self._ids[row] for row in kept.tolist()]
        self._set(kept, self.vectors[:0], self._numbers[:0], self._groups[kept], ids)
        return len(removed)

    def save(self, folder: str | PathLike) -> None:
        """Write the space and its calibration to a folder, in the format of an `ImageIndex`, also over an older one.

        Raises:
            FileExistsError: If the folder contains other files or an index with its sources, which a space has not, or
                has changed since the space was loaded from it.
        """
        write_index(folder, self, {})

    @classmethod
    def load(cls, folder: str | PathLike) -> "EmbeddingSpace":
        """Read a space that `save` wrote, or an `ImageIndex`; the vectors stay on disk, mapped into memory.

        On Windows they are read, since it would refuse to replace a mapped file.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If a file is damaged.
        """
        return read_index(cls, folder)[2]

    def report(self, *, seed: int = 0) -> VectorReport:
        """Describe the directions of the vectors and what is wrong with them; see `hf_sphere.search.report_vectors`.

        Raises:
            ValueError: If the distance is not the cosine.
        """
        check_choice("the distance of the report", self.metric["distance"], ["cosine"])
        report = report_vectors(self.vectors, self.groups, ids=self._ids, seed=seed)
        report.verdicts.append("Norms are those in the space, which fit normalizes; report_vectors has the original.")
        return report

    def duplicates(
        self,
        threshold: float | None = None,
        *,
        expected_false: float | None = None,
        labels: Any = None,
        parts: Any = None,
    ) -> "Duplicates":
        """Find clusters of near-identical rows.

        Args:
            threshold: Smallest cosine of a duplicate. If None, it is chosen by a fitted model of the best matches of
                rows in other groups. A group contains the duplicates of its rows: a shot, a product or a source, not a
                class. Without groups, each row is one.
            expected_false: Number of false pairs that the model expects then; 1 if None.
            labels: (N,) names of classes, to find those that are likely wrong.
            parts: (N,) names, such as `train` and `test`, to find clusters with rows of several.

        Raises:
            ValueError: If an argument is invalid, the threshold cannot be chosen, or the space compares no cosines.
        """
        from hf_sphere.search.duplicates import find_duplicates  # which imports scipy

        return find_duplicates(self, threshold, expected_false, labels, parts)
