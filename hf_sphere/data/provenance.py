"""Where images come from: the identity of each row of a dataset, and the record of the images of a training run."""

import base64
import contextlib
import hashlib
import itertools
import logging
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import DatasetDict, Image
from torch import Tensor

from hf_sphere.data.sources import find_rows
from hf_sphere.utils.checks import check_regular
from hf_sphere.utils.files import RECORD_FILE, read_json, write_json
from hf_sphere.utils.loading import find_file
from hf_sphere.utils.shared_rows import ROW_BITS

logger = logging.getLogger(__name__)

RECORDED = {"training": "train", "evaluation": "eval", "validation": "validation", "rejection": "rejection"}
"""Part of a record by the name of a split."""


def fingerprint(splits: DatasetDict) -> int:
    """Return 31 bits of a digest of the splits, their sizes and up to 256 of the encoded images of each."""
    digest = hashlib.sha256()
    for name, rows in splits.items():
        digest.update(f"{name} {len(rows)}\n".encode())
        if column := next((key for key, feature in rows.features.items() if isinstance(feature, Image)), None):
            some = rows.select(range(0, len(rows), max(1, math.ceil(len(rows) / 256)))).select_columns([column])
            for cell in some.cast_column(column, Image(decode=False))[column]:
                with contextlib.suppress(OSError, TypeError):  # a file or an image that is missing
                    if cell["bytes"] is None:
                        check_regular(cell["path"])
                    digest.update(Path(cell["path"]).read_bytes() if cell["bytes"] is None else cell["bytes"])
    return int.from_bytes(digest.digest()[:4]) >> 1


def identify_rows(splits: DatasetDict, name: str, label_column: str | None, data: int) -> Tensor:
    """Return the identity of each row of a part, (N,): `data`, the fingerprint, and the row among all splits."""
    return find_rows(splits, name, label_column) + (data << ROW_BITS)


@dataclass(frozen=True)
class DataRecord:
    """The images that a model was trained and evaluated on, saved beside it as `training_data.json`."""

    names: dict[str, str]  # of the split from which images were taken, of `train`, `eval`, `validation`, `rejection`
    ids: dict[str, Tensor]  # identities of the images that were used, (N,), by the same keys
    label_column: str | None  # of the classes by which parts were held out, if any

    @classmethod
    def of(cls, splits: DatasetDict, used: Mapping[str, Any], label_column: str | None) -> "DataRecord":
        """Make the record of parts, and warn if two have images in common."""
        data, names, ids = fingerprint(splits), dict[str, str](), dict[str, Tensor]()
        for key, split in used.items():
            names[key], rows = split.name, identify_rows(splits, split.name, label_column, data)
            ids[key] = rows[split.rows]
        for one, other in itertools.combinations(used, 2):
            if shared := int(torch.isin(ids[one], ids[other]).sum()):
                both = (f"{name} images ({names[split]})" for name, split in RECORDED.items() if split in (one, other))
                logger.warning("The %s have %d images in common.", " and ".join(both), shared)
        return cls(names, ids, label_column)

    @property
    def data(self) -> int:
        """The fingerprint of the data."""
        return int(self.ids["train"][0]) >> ROW_BITS

    def after(self, saved: "DataRecord | None", *, trains: bool) -> "DataRecord | None":
        """Return the record of a saved model that was then trained or evaluated by this one; warn of images of both."""
        if saved is None or saved.data != self.data:
            return self if trains else saved
        if shared := int(torch.isin(self.ids["eval"], saved.ids["train"]).sum()):
            logger.warning("The saved model was trained on %d of the evaluation images.", shared)
        trained = torch.cat([saved.ids["train"], self.ids["train"]]).unique() if trains else saved.ids["train"]
        return replace(self, ids=saved.ids | self.ids | {"train": trained})

    @classmethod
    def read(cls, model: str | os.PathLike) -> "DataRecord | None":
        """Read the record of a model, in a folder or on the Hub; None if it has none. A damaged record is an error."""
        if (path := find_file(model, RECORD_FILE)) is None:
            return None
        try:
            saved, ids = read_json(path), {}
            for key, text in saved["rows"].items():
                stream = zlib.decompressobj()  # a short text can be decompressed to any length
                bits = np.frombuffer(stream.decompress(base64.b85decode(text), 1 << 24), np.uint8)
                rows = torch.from_numpy(np.unpackbits(bits).nonzero()[0])
                ids[key] = rows[: None if stream.eof else 0] + (saved["data"] << ROW_BITS)
                int(ids[key][0])  # an error if it has no image
            record = cls(dict(saved["names"]), ids, saved["label_column"])
            _ = record.data, record.names["eval"]  # errors if they are missing
            return record
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, zlib.error) as error:
            raise ValueError(f"{path} is damaged: {error!r}. Restore it, or remove it.") from error

    def save(self, folder: Path) -> None:
        """Write the record to the folder of a model."""
        rows = {}  # as text: a compressed bit per row
        for key, ids in self.ids.items():
            bits = np.packbits(np.bincount((ids & (1 << ROW_BITS) - 1).numpy()) > 0)
            rows[key] = base64.b85encode(zlib.compress(bits.tobytes())).decode()
        values = {"data": self.data, "names": self.names, "label_column": self.label_column, "rows": rows}
        write_json(folder / RECORD_FILE, values, strict=True)


def resolve_split(
    split: str | None, record: DataRecord | None, splits: DatasetDict, data: int
) -> tuple[str | None, Tensor | None]:
    """Return the splits that have a part (see `RECORDED`) of a record, and its identities; None for other names."""
    if split is None and record is not None and record.data == data:
        # Where the classes were divided, both parts are of one split.
        split = "evaluation" if record.names["eval"] == record.names["train"] else record.names["eval"]
    if split not in RECORDED or (split in splits and split != "training"):
        return split, None
    if record is None:
        reason = f"the model has no record of its {split} images ({RECORD_FILE}), which the training recipes write"
    elif record.data != data:
        reason = "the model was trained on other data, or they have changed: their splits, sizes or images differ"
    elif RECORDED[split] not in record.ids:
        reason = f"the model was trained without {split} images"
    else:
        ids = record.ids[RECORDED[split]]
        return "+".join(key for key in splits if torch.isin(identify_rows(splits, key, None, data), ids).any()), ids
    raise ValueError(f"no split {split!r}; the data has {', '.join(splits)}. Choose one with --split: {reason}.")
