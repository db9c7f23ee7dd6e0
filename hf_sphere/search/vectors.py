"""Vectors as APIs and databases deliver or take them, names of their groups, and samples that are drawn by these."""

import base64
import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.checks import check_dense, check_embeddings, check_rows, shorten, to_embeddings, to_tensor
from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.utils.checks import check_exclusive, check_integer, error_text

logger = logging.getLogger(__name__)

Content = Literal["image", "text", "vector"]
"""What rows are."""

WRITTEN, COMPARED = 1 << 23, 1 << 14
"""Bytes that are written at once, and rows that are compared at once."""

WHOLE = ("__array__", "__arrow_c_stream__", "keys")
"""Attributes of an array, of a table and of a mapping, which are one batch."""


def read_vectors(
    values: Any, what: str = "vectors", *, scale: Any = None, offset: Any = 0.0, dim: int | None = None
) -> Tensor:
    """Return vectors as float32 on the CPU, (N, d).

    Args:
        values: (N, d) floating-point numbers of any precision, integers, or texts: the base64 of little-endian float32.
            A table of numbers, too, whose columns are the dimensions.
        what: Their name in messages.
        scale: Step of integers: a number, whose value does not change cosines (1.0), or one per dimension, which does.
        offset: Value of the integer 0, a number or one per dimension. With `ranges` of sentence-transformers'
            `quantize_embeddings`, scale = (ranges[1] - ranges[0]) / 255 and offset = ranges[0] + 128 * scale.
        dim: Number of leading dimensions to keep, of a model trained for that (Matryoshka); normalized again.

    Raises:
        ValueError: If lengths differ, numbers are not finite, or integers have no scale.
        TypeError: If values are no dense numbers.

    Example:
        >>> read_vectors(embeddings.half(), dim=2).shape[1]
        2
    """
    vectors = check_embeddings(parse_vectors(values, what, scale, offset), what=what)
    if dim is None:
        return vectors
    return F.normalize(vectors[:, : check_integer("dim", dim, 1, vectors.shape[1])], dim=1)


def parse_vectors(values: Any, what: str = "vectors", scale: Any = None, offset: Any = 0.0) -> Tensor:
    """Return the same as `read_vectors`, but numbers may be infinite or NaN."""
    check_dense(what, values)
    kind = "numbers, the same number of them for each, or the base64 of float32"
    if not isinstance(values, (Tensor, Sequence)):
        values = np.asarray(values) if hasattr(values, "__array__") else [*values]
    if not isinstance(values, Tensor) and len(values) and all(isinstance(row, str) for row in values):
        try:
            values = np.stack([np.frombuffer(base64.b64decode(row, validate=True), "<f4") for row in values])
        except ValueError as error:
            first = f"{kind}; got texts such as {values[0][:40]!r} ({error})"
            raise ValueError(f"{what} must be {first}. Texts need a model: --model_name_or_path.") from error
    values = to_tensor(what, values, kind).detach().cpu()
    if scale is not None:
        shapes = [torch.as_tensor(step).shape for step in (scale, offset)]
        if any(shape not in ((), (1,), values.shape[1:]) for shape in shapes):  # else it might be one per row
            raise ValueError(f"{what} have {values.shape[-1]} dimensions; scale and offset are one number or one each.")
        values = values.float() * torch.as_tensor(scale).float() + torch.as_tensor(offset).float()
    elif not values.is_floating_point():
        hint = "scale=1.0 if all dimensions have the same, else one number per dimension, and the offset, if any"
        raise ValueError(f"{what} are integers, which need their scale. Use hf_sphere.search.read_vectors: {hint}.")
    return values.float()


def column_vectors(rows: Any, column: str) -> Any:
    """Return the cells of a column of a dataset; vectors and numbers of lists that are missing are NaN."""
    cells = rows.select_columns([column]).with_format("arrow")[:][column]
    is_list = isinstance(cells.type, (pa.ListType, pa.LargeListType, pa.FixedSizeListType))
    if not cells.null_count and not (is_list and pc.list_flatten(cells).null_count):
        return rows.with_format("numpy")[column][:]
    values = cells.to_pylist()
    if not is_list:
        return values
    missing = [np.nan] * max((len(value) for value in values if value is not None), default=0)
    return [missing if row is None else [np.nan if x is None else x for x in row] for row in values]


def parts_of_batches(
    batches: Any, names: tuple[str, str | None, str | None], schema: pa.Schema | None = None
) -> Iterator[pa.Table]:
    """Yield the rows of whole batches, about `WRITTEN` bytes at once."""
    id_column = names[2]
    if hasattr(batches, "iter"):  # of datasets
        batches = batches.iter(COMPARED)
    elif not isinstance(batches, Iterator) and any(hasattr(batches, name) for name in WHOLE):
        batches = [batches]
    tables, count, written = [], 0, 0
    for number, batch in enumerate(itertools.chain(batches, [None])):
        if batch is not None:
            try:
                table = to_table(batch, *names)
                schema = schema or table.schema
                if {*table.column_names} != {*schema.names}:  # select would drop further ones
                    raise ValueError(f"the columns are {table.column_names}; the others have {schema.names}.")
                kinds = [each.field(id_column).type for each in (schema, table.schema)] if id_column else []
                if len({*map(pa.types.is_integer, kinds)}) > 1:
                    raise ValueError(f"ids must be all texts or all integers; got {kinds[1]} after {kinds[0]}.")
                tables.append(table.select(schema.names).cast(schema))
            except (ValueError, TypeError, KeyError) as error:  # the last one for a missing column
                text = f"batch {number}, from row {count:,} on: {error_text(error).rstrip('.')}."
                raise ValueError(f"{text} Before it, {written:,} rows were written.") from error
            count += len(table)
        if tables and (batch is None or sum(part.nbytes for part in tables) >= WRITTEN):
            part = pa.concat_tables(tables)
            if id_column:
                check_ids(part[id_column], len(part))
            yield part
            tables, written = [], count


def to_table(batch: Any, column: str, group_column: str | None, id_column: str | None) -> pa.Table:
    """Return a batch with unit vectors, and checked ids and names of groups."""
    if hasattr(batch, "__arrow_c_stream__"):  # tables of pyarrow, pandas and polars
        is_pandas = hasattr(batch, "iloc")  # whose row numbers are no column
        batch = pa.Table.from_pandas(batch, preserve_index=False) if is_pandas else pa.table(batch)
        batch = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns = dict(batch) if isinstance(batch, Mapping) else {column: batch}
    vectors = unit_vectors("rows", columns[column], columns[id_column] if id_column else None)
    if id_column:
        columns[id_column] = check_ids(columns[id_column], len(vectors))
    if group_column:
        columns[group_column] = check_names(f"names of column {group_column!r}", columns[group_column], len(vectors))
    columns[column] = pa.FixedSizeListArray.from_arrays(pa.array(vectors.numpy().ravel()), vectors.shape[1])
    return pa.table({name: v.numpy(force=True) if isinstance(v, Tensor) else v for name, v in columns.items()})


def positions(values: Tensor, others: Tensor) -> Tensor:
    """Return where each value is among others, which differ, (n,) int64; -1 if it is not there."""
    order = others.argsort()
    at = order[torch.searchsorted(others[order], values).clamp_max(len(others) - 1)]
    return at.where(others[at] == values, -1)


def hash_rows(vectors: Tensor) -> Tensor:
    """Return a number of each vector, (N,) int64: of two different ones of a million in one of 10^7 cases the same."""
    blocks = ((block + 0.0).contiguous().numpy() for block in vectors.split(1024))  # -0.0 and 0.0 are equal
    digests = (hashlib.blake2b(row, digest_size=8).digest() for block in blocks for row in block)
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests], dtype=torch.long)


def repeated_rows(vectors: Tensor) -> list[int]:
    """Return the rows that are equal to an earlier one."""
    first = dict[int, int]()
    return [row for row, value in enumerate(hash_rows(vectors).tolist()) if first.setdefault(value, row) != row]


def unit_vectors(what: str, vectors: Any, ids: Sequence[Any] | None = None, hint: str = "") -> Tensor:
    """Return finite vectors that are not zero as unit vectors, float32 on the CPU; the error names ids of others.

    They are not copied if they are that already. A message says if they were not, but for queries and rows.
    """
    vectors = to_embeddings(vectors, 1, what).cpu()
    norms = _norms(vectors)
    if not (valid := norms.isfinite() & (norms > 0)).all():
        ids = None if ids is None else check_names("ids", ids, len(vectors))
        check_rows(valid, f"{what} must be finite and not zero", "are not", ids, hint)
    if what not in ("queries", "rows") and len(odd := norms[(norms - 1).abs() > 1e-2]):
        text = "%d of %d %s are not unit vectors (norms from %.3g to %.3g); they are normalized."
        logger.warning(text, len(odd), len(norms), what, odd.min(), odd.max())
    if vectors.dtype == torch.float32 and (norms - 1).abs().max() <= 1e-6:
        return vectors
    units = torch.empty(vectors.shape)
    for block, part in zip(vectors.split(8192), units.split(8192), strict=True):  # without large copies
        part[:] = project_to_sphere(block.double())
    return units


def _norms(vectors: Tensor) -> Tensor:
    norms = torch.empty(len(vectors), dtype=torch.float64, device=vectors.device)
    for block, part in zip(vectors.split(1024), norms.split(1024), strict=True):
        # In place: a small result between two large copies would keep the memory of the first from being reused.
        torch.linalg.vector_norm(block, dim=1, dtype=torch.float64, out=part)
    return norms


@dataclass
class Room:
    """Memory of rows (capacity, d), of which the first ones are used."""

    memory: Tensor
    used: int

    def append(self, rows: Tensor, new: Tensor) -> tuple[Tensor, "Room"]:
        """Return the used rows and new ones behind them, which are copied to larger memory only if it is full."""
        count, total = len(rows), len(rows) + len(new)
        # A copy of a space has the same memory, where it may have added rows of its own; changed rows have another one.
        room = self
        if self.used != count or total > len(self.memory) or rows.data_ptr() != self.memory.data_ptr():
            room = Room(rows.new_empty(total + total // 8, rows.shape[1]), total)  # unused memory is not occupied
            room.memory[:count] = rows
        room.memory[count:total], room.used = new, total
        return room.memory[:total], room


def usable_rows(what: str, vectors: Tensor, ids: Sequence[Any] | None) -> tuple[Tensor, list[Any]]:
    """Return the rows of vectors (N, d) that are finite and not zero, and the ids of others, which a message lists."""
    norms = _norms(vectors)
    valid = norms.isfinite() & (norms > 0)
    others = (~valid).nonzero()[:, 0].tolist()
    others = others if ids is None else [ids[row] for row in others]
    if others:
        text = "%d of %d %s are not finite, or zero, and are left out: %s %s."
        logger.warning(text, len(others), len(valid), what, "rows" if ids is None else "ids", shorten(others, 20))
    return valid.nonzero()[:, 0], others


def check_ids(ids: Any, count: int, known: Sequence[Any] = ()) -> list[Any]:
    """Return ids, one per row and different, also from those that are `known`, texts or integers."""
    names, old = check_names("ids", ids, count), {*known}
    check_names("ids, old and new,", [*known[:1], *names], count + len(known[:1]))
    repeated = [name for name, times in Counter([*names, *old.intersection(names)]).items() if times > 1]
    if repeated:
        where = "are in the space or repeated" if old.intersection(repeated) else "are repeated"
        raise ValueError(f"ids must be different; {len(repeated):,} {where}: {shorten(repeated)}.")
    return names


def check_names(what: str, groups: Any, count: int) -> list[Any]:
    """Return names of groups, texts or integers, one per row."""
    if not isinstance(groups, list) and np.ndim(groups) == 0:  # also a set, which has no order
        raise ValueError(f"{what} must be a list, an array or a column of names; got {groups!r}.")
    names = as_list(groups, what)
    if len(names) != count:
        raise ValueError(f"{what} must have one name per row, {count:,}; got {len(names):,}.")
    kinds = {type(name) for name in names}
    if len(kinds) != 1 or not kinds <= {int, str}:
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"{what} must be all texts or all integers; got {found}.")
    return names


def as_names(groups: Any, ids: Any) -> tuple[str, set[Any]]:
    """Return what names rows, `group` or `id`, and the names: texts or integers, to which True and 1.0 are not 1."""
    check_exclusive("name the rows", {"groups": groups is not None, "ids": ids is not None})
    what, names = ("group", as_list(groups)) if ids is None else ("id", as_list(ids))
    if odd := [name for name in names if type(name) not in (int, str)]:
        raise ValueError(f"there is no {what} {odd[0]!r} in the space, only texts or integers.")
    return what, {*names}


def as_list(values: Any, what: str = "ids and names of groups") -> list[Any]:
    """Return a list of names or numbers, also for a single one, as values of Python."""
    check_dense(what, values)
    if isinstance(values, Mapping) or hasattr(values, "columns"):  # whose items are the names of columns
        raise ValueError(f"ids and names must be a list, an array or a column, and no {type(values).__name__}.")
    for method in ("tolist", "to_pylist", "as_py"):  # of a column of pyarrow in several parts, and of one value
        values = getattr(values, method)() if hasattr(values, method) else values
    values = [values] if isinstance(values, (str, bytes)) or not isinstance(values, Iterable) else values
    values = [value.item() if hasattr(value, "item") else value for value in values]
    return [value.as_py() if isinstance(value, pa.Scalar) else value for value in values]


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
