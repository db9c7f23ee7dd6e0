"""Batches of rows as tables that LanceDB writes."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from torch import Tensor

from hf_sphere.search.vectors import check_ids, check_names, unit_vectors
from hf_sphere.utils.checks import error_text

WRITTEN, COMPARED = 1 << 23, 1 << 14
"""Bytes that are written at once, and rows that are compared at once."""

WHOLE = ("__array__", "__arrow_c_stream__", "keys")
"""Attributes of an array, of a table and of a mapping, which are one batch."""


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
