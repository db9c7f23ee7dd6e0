"""Write image datasets as folders of parquet files for `datasets.load_dataset`."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features

BYTES_A_FILE = 500_000_000
"""Maximum image bytes per file."""

ROWS_AT_A_TIME = 100
"""Rows per parquet row group, the unit held in memory."""


class ParquetSplit:
    """Writes the rows of a split, one by one, to files with names such as `train-00000-of-00003.parquet` at the end."""

    def __init__(self, folder: Path, split: str, features: Features) -> None:
        self.folder = folder
        self.split = split
        self.schema = features.arrow_schema
        self._rows: list[dict[str, Any]] = []
        self._files: list[Path] = []
        self._writer: pq.ParquetWriter | None = None
        self._bytes = 0

    def __enter__(self) -> "ParquetSplit":
        return self

    def add(self, row: dict[str, Any], size: int) -> None:
        """Add a row in its encoded form, with an image of `size` bytes."""
        if self._bytes and self._bytes + size > BYTES_A_FILE:
            self._write(close=True)
        self._rows.append(row)
        self._bytes += size
        if len(self._rows) == ROWS_AT_A_TIME:
            self._write()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._write(close=True)
        for index, file in enumerate(self._files):
            file.rename(self.folder / f"{self.split}-{index:05d}-of-{len(self._files):05d}.parquet")

    def _write(self, close: bool = False) -> None:
        if self._rows and self._writer is None:
            self._files.append(self.folder / f"{self.split}-{len(self._files):05d}.parquet")
            self._writer = pq.ParquetWriter(self._files[-1], self.schema)
        if self._writer is not None:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self.schema))
            self._rows = []
            if close:
                self._writer.close()
                self._writer, self._bytes = None, 0
