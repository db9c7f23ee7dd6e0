"""Vectors on disk or in an object store, in tables of LanceDB."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hf_sphere.geometry.checks import shorten
from hf_sphere.search.calibration import PARTS, RULES, Calibration, Candidates, Nearest, Rule, Score
from hf_sphere.search.matching import CANDIDATES, CalibratedSearch, Matches, sort_candidates
from hf_sphere.search.neighbor_search import SPARE, TARGET_RECALL, NeighborSearch
from hf_sphere.search.vectors import COMPARED, as_names, mix, name_keys, parts_of_batches, positions, sample_rows
from hf_sphere.utils.checks import check_choice, check_extra, check_integer

os.environ.setdefault("LANCE_DEFAULT_IO_BUFFER_SIZE", str(64 << 20))  # otherwise Lance reads up to 2 GiB ahead

SMALLEST_INDEX, TUNING_QUERIES, EFFORTS = 5_000, 200, (1, 2, 4, 8, 16)
"""Rows from which on an index is built, queries to measure its recall, and how much of it is searched."""


class LanceSpace(CalibratedSearch):
    """Vectors in a database of LanceDB, with the p-values of an `EmbeddingSpace`, which rows calibrate.

    All that grows with the rows stays on disk or in the object store. A row has a stable number that Lance assigns,
    also if several processes write. Calibration queries are rows, compared with all rows when a level is first used;
    after a change again for margins, and for cosines with added rows only unless LanceDB updated or restored some.
    Without a level, a search by margins is one by cosines. A space sees the rows that were there when it was opened or
    last changed.

    Attributes:
        table: The table of LanceDB; its `_rowid` are the `rows` of `Matches`, and the ids without an id_column.
        rule: `bounded`, `sharp` or `strict`.
        recall: Recall@10 that `build_index` measured; 1 without an index, since the search is exact then.

    Example:
        >>> space = LanceSpace.create("outputs/vectors", embeddings.split(100))
        >>> space.search(embeddings[:2], 3, false_accept=0.5).rows.shape
        torch.Size([2, 3])
    """

    metric = {"distance": "cosine"}

    def __init__(self, database: Any, table: Any) -> None:
        about: Any = (table.schema.metadata or {}).get(b"hf_sphere")  # None if another program wrote the table
        self.table, self._database = table, database
        self._column, self._group_column, self._id_column, *self._options, self.score, self.rule = json.loads(about)
        self._columns = ["_rowid", self._column, *[self._group_column] * bool(self._group_column)]
        self._dim = table.schema.field(self._column).type.list_size
        index, known = _open(database, "index"), _open(database, "calibration")
        self._effort, self.recall, self._version = 0, 1.0, 0
        self._compared: tuple[Tensor, Tensor] | None = None  # vectors and groups that margins are above
        if index is not None:
            self._effort, self.recall = index.to_arrow().to_pylist()[0].values()
        if known is not None:
            self._version, next_id = json.loads(known.schema.metadata[b"hf_sphere"])
            columns = known.to_arrow().to_pydict()
            parts: Any = {name: torch.from_numpy(np.array(columns[name])) for name in PARTS}
            self._calibration = Calibration(**parts, next_id=next_id, rule=self.rule)

    @classmethod
    def create(
        cls,
        uri: str | os.PathLike,
        batches: Any,
        *,
        column: str = "vector",
        group_column: str | None = None,
        id_column: str | None = None,
        score: Literal["auto"] | Score = "auto",
        rule: Rule = "bounded",
        rows_per_group: int = 8,
        calibration_rows: int = 5_000,
    ) -> "LanceSpace":
        """Write a new space.

        Args:
            uri: Folder, or address in an object store, such as `s3://bucket/vectors`.
            batches: Iterator of arrays (n, d), or of mappings or pyarrow tables of columns; or a dataset, or one array.
            column: Column of the vectors, which are normalized.
            group_column: Column of the names of the groups, texts or integers; if None, each row is a group.
            id_column: Column of the ids, different texts or integers; each batch is compared with those in the table.
                If None, the numbers of Lance are the ids.
            score: See `EmbeddingSpace.fit`; so is the rule.
            rule: `bounded`, `sharp` or `strict`.
            rows_per_group: Maximum number of rows of a group that are calibration queries.
            calibration_rows: Maximum number of calibration queries.

        Raises:
            FileExistsError: If there is a space already.
            ImportError: If LanceDB is not installed.
            ValueError: If a batch is invalid; the message has the number of rows that were written.
        """
        names = column, group_column, id_column
        options: list[Any] = [*names, check_integer("rows_per_group", rows_per_group, 1)]
        options += [check_integer("calibration_rows", calibration_rows, 1)]
        check_choice("score", score, ("auto", "cosine", "margin"))
        options += [("margin" if group_column else "cosine") if score == "auto" else score]
        options += [check_choice("rule", rule, RULES)]
        database, parts = _connect(uri), parts_of_batches(batches, names)
        if there := [name for name in ("vectors", "index", "calibration") if _open(database, name) is not None]:
            raise FileExistsError(f"{uri} has tables already ({', '.join(there)}); use LanceSpace.open(...).add.")
        if (first := next(parts, None)) is None:
            raise ValueError("batches are empty; give at least one vector.")
        first = first.replace_schema_metadata({"hf_sphere": json.dumps(options)})
        space = cls(database, database.create_table("vectors", first))
        space._add(parts)
        return space

    @classmethod
    def open(cls, uri: str | os.PathLike) -> "LanceSpace":
        """Open a space.

        Raises:
            ValueError: If there is none.
            TypeError: If another program wrote the table.
        """
        database = _connect(uri)
        return cls(database, database.open_table("vectors"))

    def __len__(self) -> int:
        return self.table.count_rows()

    def add(self, batches: Any) -> int:
        """Write more rows, as `create` does, and return their number. Several processes may do so at the same time."""
        names = self._column, self._group_column, self._id_column
        return self._add(parts_of_batches(batches, names, self.table.schema))

    def _add(self, parts: Iterator[pa.Table]) -> int:
        count = 0
        for part in parts:
            for block in part.combine_chunks().to_batches(COMPARED) if (name := self._id_column) else ():
                if known := self._rows([name], _is_in(name, block[name].to_pylist()))[name].to_pylist():
                    written = f"Before them, {count:,} rows were written."
                    raise ValueError(f"ids must be different, but are in the space: {shorten(known)}. {written}")
            self.table.add(part)
            count += len(part)
        return count

    def remove(self, groups: Any = None, *, ids: Any = None) -> int:
        """Remove the rows of a group or of several, or those with ids; return their number.

        Raises:
            ValueError: If there is no such group or id, or no row would remain.
        """
        what, wanted = as_names(groups, ids)
        column = str(self._group_column) if what == "group" else self._id_column or "_rowid"
        removed = self._rows([column], condition := _is_in(column, wanted))[column].to_pylist()
        self._check_removal(what, wanted, removed)
        self.table.delete(condition)
        return len(removed)

    def build_index(self, queries: Any = None) -> float:
        """Build an index (IVF_RQ, one bit per dimension), search enough of it for a recall@10 of 0.98, and return that.

        Rows that are added later are searched exactly until this adds them to the index. It builds a new one if the
        recall has become too low, and none below 5,000 rows.

        Args:
            queries: (Q, d) held-out queries to measure the recall by an exact search. If None, 200 mirror images of
                tenth neighbors, as in `NeighborSearch`.
        """
        if len(self) < SMALLEST_INDEX:
            return self.recall
        from lancedb.index import IvfRq

        if queries is None:
            points = self._vectors(self._sample(1, TUNING_QUERIES)[1])
            queries = 2 * points - self._vectors(self._compare(points, 10, self._blocks()).ids[:, -1].contiguous())
        queries = self._check("queries", queries)
        lowest = self._compare(queries, 10, self._blocks()).scores[:, -1:] - 1e-9
        for step in range(0 if self._effort else 5, 10):
            if step == 0:
                self.table.optimize()
            elif step == 5:
                self.table.create_index(self._column, config=IvfRq(distance_type="l2"))
            self._effort = EFFORTS[step % 5]
            self.recall = float((self._candidates(queries, 10).scores >= lowest).double().mean())
            if self.recall >= TARGET_RECALL:
                break
        self._write("index", pa.table({"effort": [self._effort], "recall": [self.recall]}))
        return self.recall

    def search(
        self, queries: Any, k: int = 10, *, false_accept: float | None = None, where: str | None = None
    ) -> Matches:
        """Find the rows with the largest cosines, as `EmbeddingSpace.search`.

        With `where`, a condition in SQL such as `year > 2020 AND language = 'en'`, only among rows that fulfill it; -1
        fills up where there are fewer than k. The p-values stay about the whole space.
        """
        return self._search_rows(queries, k, false_accept, where)

    @property
    def calibration(self) -> Calibration:
        """The calibration of the current rows; an error if they are of one group."""
        old, version = self._calibration, self.table.version
        if old is not None and self._version == version:
            return old
        groups, ids, next_id = self._sample(*self._options)
        queries = self._vectors(ids)
        self._compared = queries, groups
        if old is None or self.score == "margin" or self._is_changed(old.next_id):
            found = self._find(queries, groups)
        else:
            present = self._unpack(self._rows(["_rowid"], _is_in("_rowid", old.matches[old.matches >= 0].tolist())))[0]
            added = self._compare(queries, CANDIDATES["cosine"], self._blocks(start=old.next_id), groups)
            found = self._follow(old, positions(ids, old.ids), queries, groups, present, added)
        if (found.ids[:, 0] < 0).any():
            raise ValueError("the rows are of one group, so no query without a match is known; add other groups.")
        calibration = Calibration(groups, ids, *found[:3], next_id, self.rule)
        table = pa.table({name: getattr(calibration, name).tolist() for name in PARTS})
        with suppress(RuntimeError, ValueError, OSError):  # another process writes its own, or nobody may write
            self._write("calibration", table.replace_schema_metadata({"hf_sphere": json.dumps([version, next_id])}))
        self._calibration, self._version = calibration, version
        return calibration

    def _is_changed(self, next_id: int) -> bool:
        """Whether rows that calibrated or were searched have been updated or restored since, which keep their ids."""
        before, names = self._database.open_table("vectors"), ["_rowid", "_row_last_updated_at_version"]
        try:
            before.checkout(self._version)
        except (ValueError, RuntimeError):  # this version was cleaned up
            return True
        for first in range(0, next_id, 64 * COMPARED):  # each query reads the two numbers of all rows
            where = f"_rowid >= {first} AND _rowid < {min(first + 64 * COMPARED, next_id)}"
            old, new = (table.search().select(names).where(where).to_arrow() for table in (before, self.table))
            if len(new.join(old, names, join_type="left anti", use_threads=False)):
                return True
        return False

    @property
    def is_calibrated(self) -> bool:
        """Whether searches without a level have p-values: of cosines, once a level was used."""
        return self._calibration is not None and self.score == "cosine"

    def _offsets(self, rows: Tensor, left_out: Tensor | None = None) -> Tensor:
        """Return what margins of rows are above, by the vectors of blocks of them and of those that calibrate."""
        if self._compared is None:
            self._compared = self._vectors(self.calibration.ids), self.calibration.groups
        offsets = torch.zeros(rows.shape, dtype=torch.float64)
        for block in torch.arange(len(rows)).split(64):
            found = rows[block]
            if len(table := self._rows(self._columns, _is_in("_rowid", found[found >= 0].unique().tolist()))):
                ids, groups, vectors = self._unpack(table)
                without = None if left_out is None else left_out[block]
                near = Nearest.of(vectors, groups, *self._compared)
                offsets[block] = near.offsets(positions(found.contiguous(), ids), without)
        return offsets

    def _candidates(
        self, queries: Tensor, count: int, left_out: Tensor | None = None, among: str | None = None
    ) -> Candidates:
        if among is not None:
            self._rows(["_rowid"], f"_rowid < 0 AND coalesce({among}, false)")  # `a) OR (b` is an error
        if not self._effort or left_out is not None:
            return self._compare(queries, count, self._blocks(among), left_out)
        found = []
        for query in queries:
            search = self.table.search(query.numpy(), self._column).distance_type("l2").limit(count + SPARE)
            search = search.nprobes(20 * self._effort).refine_factor(5 * self._effort)
            if among is not None:
                search = search.maximum_nprobes(0).where(among)  # as many as the condition needs
            table = search.select([*self._columns, "_distance"]).to_arrow()
            found.append(self._compare(query[None], count, [table]))
        return Candidates(*map(torch.cat, zip(*found, strict=True)))

    def _names_of(self, rows: Tensor) -> list[Any]:
        return self._cells(str(self._group_column), rows[None])[0]

    def _ids_of(self, rows: Tensor) -> list[list[Any]]:
        if self._id_column is None:
            return np.where(rows.numpy() < 0, np.array(None), rows.numpy()).tolist()
        return self._cells(self._id_column, rows)

    def _cells(self, column: str, rows: Tensor) -> list[list[Any]]:
        """Return the cells of a column, None where there is no row."""
        table = self._rows(["_rowid", column], _is_in("_rowid", {*rows[rows >= 0].tolist()}))
        cells = dict(zip(table["_rowid"].to_pylist(), table[column].to_pylist(), strict=True))
        return [[cells.get(row) for row in some] for some in rows.tolist()]

    def _compare(self, queries: Tensor, k: int, tables: Iterable[pa.Table], groups: Tensor | None = None) -> Candidates:
        """Return the rows of tables with the best scores; of other groups than those of the queries, if given."""
        none = torch.full((len(queries), k), -1)
        best = Candidates(none.double() * torch.inf, none.clone(), none.clone(), none.clone())
        groups = none[:, 0] if groups is None else groups
        for table in filter(len, tables) if len(queries) else ():
            ids, numbers, vectors = self._unpack(table)
            largest = torch.cat([(part @ vectors.T).amax(1) for part in queries.split(64)])
            better = (largest > best.scores[:, -1] - 1e-5).nonzero()[:, 0]  # more than the rounding of the products
            if len(better):
                search = NeighborSearch(vectors, kind="torch")
                for at in better.split(64):
                    distances, rows = search.search_others(queries[at], k, numbers, groups[at])
                    found = ids[rows].where(rows >= 0, -1)
                    new = (1 - distances, numbers[rows], found, found)
                    both = Candidates(*(torch.cat([old[at], each], 1) for old, each in zip(best, new, strict=True)))
                    for old, column in zip(best, sort_candidates(both, count=k), strict=True):
                        old[at] = column
        return best

    def _sample(self, rows_per_group: int, most: int) -> tuple[Tensor, Tensor, int]:
        """Return the groups and ids of the rows that `sample_rows` draws among all, and the id of the next new row."""
        groups = ids = torch.empty(0, dtype=torch.long)
        next_id = 0
        names = [name for name in self._columns if name != self._column]
        for table in filter(len, self._blocks(columns=names)):
            new, numbers, _ = self._unpack(table)
            groups, ids = torch.cat([groups, numbers]), torch.cat([ids, new])
            next_id = max(next_id, int(ids.max()) + 1)
            first = np.unique(keys := self._keys(groups))[:most]  # no other groups can be drawn
            rows = torch.from_numpy(np.flatnonzero(keys <= first[-1]))
            rows = rows[sample_rows(groups[rows], keys[rows], ids[rows], rows_per_group, rows_per_group * len(first))]
            groups, ids = groups[rows], ids[rows]
        rows = sample_rows(groups, self._keys(groups), ids, rows_per_group, most)
        return groups[rows], ids[rows], next_id

    def _keys(self, groups: Tensor) -> np.ndarray:
        """Return the keys of groups as those of an `EmbeddingSpace`, (n,) uint64."""
        numbers = groups.numpy()
        return mix((numbers.view(np.uint64) if self._group_column else mix(numbers)) ^ mix(np.zeros(1, int)))

    def _blocks(self, where: str | None = None, start: int = 0, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows in the order of their ids; a reader of all vectors would read far ahead."""
        batches = self.table.search().select(["_rowid"]).to_batches()
        last = max((int(batch["_rowid"].to_numpy().max()) for batch in batches if len(batch)), default=-1)
        for first in range(start, last + 1, COMPARED):
            condition = f"_rowid >= {first} AND _rowid < {first + COMPARED} AND ({where or True})"
            yield self._rows(columns or self._columns, condition)

    def _rows(self, columns: list[str], condition: str) -> pa.Table:
        return self.table.search().select(columns).where(condition).to_arrow()

    def _unpack(self, table: pa.Table) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ids, the group numbers and the vectors, (n, d), as far as the table has them."""
        ids = torch.tensor(table["_rowid"].to_numpy().astype(np.int64))
        numbers, vectors = ids, torch.empty(0)
        if self._group_column in table.column_names:
            names = table[self._group_column].combine_chunks().dictionary_encode()
            numbers = torch.tensor(name_keys(names.dictionary.to_pylist()).view(np.int64)[names.indices.to_numpy()])
        if self._column in table.column_names:
            vectors = torch.tensor(table[self._column].combine_chunks().flatten().to_numpy()).reshape(-1, self._dim)
            if len(vectors) < len(ids) or not ((vectors.norm(dim=1) - 1).abs() < 1e-3).all():  # NaN is not below, too
                raise ValueError("rows that another program wrote are no unit vectors; add rows with LanceSpace.add.")
        return ids, numbers, vectors

    def _vectors(self, ids: Tensor) -> Tensor:
        known, _, vectors = self._unpack(self._rows(["_rowid", self._column], _is_in("_rowid", ids.tolist())))
        return vectors[positions(ids, known)]

    def _write(self, name: str, table: pa.Table) -> None:
        self._database.create_table(name, table, mode="create" if _open(self._database, name) is None else "overwrite")


def _connect(uri: str | os.PathLike) -> Any:
    check_extra("lance", "LanceSpace", "lancedb")
    import lancedb

    session = lancedb.Session(index_cache_size_bytes=256 << 20)  # 6 GiB by default
    return lancedb.connect(os.fspath(uri), storage_options={"new_table_enable_stable_row_ids": "true"}, session=session)


def _open(database: Any, name: str) -> Any:
    try:
        return database.open_table(name)
    except (ValueError, FileNotFoundError) as error:
        if "not found" not in str(error):
            raise
        return None


def _is_in(column: str, values: Iterable[Any]) -> str:
    texts = ("'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value) for value in values)
    return f"`{column}` IN ({', '.join(texts) or 'NULL'})"
