"""Store embeddings as datasets: folders of parquet files that `datasets.load_dataset` loads.

`hf-sphere extract` writes them and `hf-sphere evaluate` reads them. The columns:

embedding      (d,) real numbers
label          class in the data; only if the data has labels
prediction     predicted class, with the class names of the model; this and the next two only if the model has a head
confidence     probability of that class: softmax, or the sigmoid if an image can have several classes
logits         (K,) real numbers
values         (K,) real numbers, of a regression instead of the last three
concentration  concentration of the embedding's distribution, if the head defines one
known          whether the image is of one of the classes; this and the next two only if the model has a rejection
p_value        p-value of that
class_p_values (K,) p-value of each class, if the rejection has them
index          row of the source split, or of the concatenation of two pooled splits
row_id         identity of the image: the same in all splits and parts of a dataset (`hf_sphere.data.provenance`)

`embeddings.json` in the same folder contains the model, the dataset and the distance.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import ClassLabel, Features, List, Value
from torch import Tensor

from hf_sphere.data.sampling import draw_subset
from hf_sphere.data.sources import find_split, load_splits
from hf_sphere.data.targets import read_class_names, read_labels, read_values
from hf_sphere.geometry.checks import check_labels
from hf_sphere.search.vectors import column_vectors, read_vectors
from hf_sphere.utils.checks import check_integer, check_not_text, check_seed
from hf_sphere.utils.files import atomic_folder, read_json, read_whole, write_json
from hf_sphere.utils.problem_types import SINGLE_LABEL

ABOUT_FILE = "embeddings.json"
"""Model, dataset and distance of the embeddings."""

DATA_FOLDER = "data"
"""Folder of the parquet files; only in a folder of this name does `datasets` accept arbitrary split names."""

RULES = {"label": "a class", "confidence": "a probability, in [0, 1]", "concentration": "at least 0"}
"""What the numbers of a column must be."""

SIGNED = [Value(f"int{bits}") for bits in (8, 16, 32, 64)]
"""Types of integer columns that may be negative."""

Columns = Mapping[str, Tensor]
"""Columns of some rows by name, each (B, ...)."""


@dataclass(frozen=True)
class Embeddings:
    """Embeddings with stored labels and predictions.

    Attributes:
        name: Name of the dataset or path of the folder.
        split: Name of the split.
        embeddings: (N, d), float32.
        labels: (N,) indices into `class_names`, if there are labels.
        class_names: Names of the data's classes.
        predictions: (N,) indices into `predicted_names`, if there are predictions.
        predicted_names: Names of the model's classes.
        certainties: `confidence`, in [0, 1], if there are predictions, and `concentration`, at least 0, if there is
            one, (N,) each.
        about: Content of `embeddings.json`; empty without the file.
        indices: (N,) rows of the source dataset, if stored.
        logits: (N, K), float32, if stored.
        row_ids: (N,), int64, identities of the images, if stored.
        texts: The column `text`, if there is one.
    """

    name: str
    split: str
    embeddings: Tensor
    labels: Tensor | None
    class_names: list[str]
    predictions: Tensor | None
    predicted_names: list[str]
    certainties: dict[str, Tensor]
    about: dict[str, Any]
    indices: Tensor | None = None
    logits: Tensor | None = None
    row_ids: Tensor | None = None
    texts: list[str] | None = None

    @property
    def problem_type(self) -> str:
        """The `problem_type` of the model; one class per image if it is not stored."""
        return self.about.get("problem_type") or SINGLE_LABEL

    def match_predictions(self) -> tuple[Tensor, Tensor]:
        """Compare labels and predictions by the names of the classes.

        Returns:
            (N,) bool, whether the label is one of the model's classes, and (N,) bool, whether it was predicted.

        Raises:
            ValueError: If there are no labels or no predictions.
        """
        if self.labels is None or self.predictions is None:
            raise ValueError(f"{self.name} needs labels and predictions to compare them.")
        index = {name: label for label, name in enumerate(self.predicted_names)}
        expected = torch.tensor([index.get(name, -1) for name in self.class_names])[self.labels]
        return expected >= 0, expected == self.predictions


@contextlib.contextmanager
def embeddings_writer(
    folder: str | PathLike,
    split: str,
    about: Mapping[str, Any],
    *,
    class_names: Sequence[str] = (),
    predicted_names: Sequence[str] = (),
) -> Iterator[Callable[[Columns], None]]:
    """Yield a function that adds rows; the folder is created or replaced atomically when the block ends.

    Args:
        folder: Folder to write.
        split: Name of the split.
        about: Model, dataset and distance, for `embeddings.json`; the numbers of rows and of dimensions are added.
        class_names: Names of the classes of `label`, by index.
        predicted_names: Names of the classes of `prediction`, by index.

    Raises:
        ValueError: If `datasets` does not accept the name of the split, or no row was added.

    Example:
        >>> with embeddings_writer("vectors", "test", about={}) as add: add({"embedding": embeddings})
    """
    folder = Path(folder)
    if re.fullmatch(r"\w+(\.\w+)*", split) is None:
        raise ValueError(f"the name of a split consists of letters, digits, underscores and dots; got {split!r}.")
    names = {"label": class_names, "prediction": predicted_names}
    check_not_text("class_names", class_names)
    check_not_text("predicted_names", predicted_names)
    with atomic_folder(folder) as unfinished, contextlib.ExitStack() as stack:
        (unfinished / DATA_FOLDER).mkdir()
        writer: pq.ParquetWriter | None = None
        count = dim = 0

        def add(columns: Columns) -> None:
            nonlocal writer, count, dim
            if writer is None:
                features = Features()
                for name, values in columns.items():
                    value = Value(str(values.dtype).removeprefix("torch."))
                    features[name] = value if values.ndim == 1 else List(value, length=values.shape[1])
                    if name in names:
                        features[name] = ClassLabel(names=list(names[name]))
                file = unfinished / DATA_FOLDER / f"{split}-00000-of-00001.parquet"
                writer = stack.enter_context(pq.ParquetWriter(file, features.arrow_schema))
                dim = columns["embedding"].shape[1]
            cells = {name: [*values.numpy()] for name, values in columns.items()}
            writer.write_table(pa.Table.from_pydict(cells, schema=writer.schema))
            count += len(columns["embedding"])

        yield add
        if count == 0:
            raise ValueError(f"no embeddings were added, so there is nothing to write to {folder}.")
        stack.close()
        write_json(unfinished / ABOUT_FILE, {**about, "embedding_dim": dim, "num_images": count}, strict=True)


def read_embeddings(
    name: str,
    *,
    split: str | None = None,
    only_split: bool = False,
    needed: Sequence[str] = (),
    max_samples: int | None = None,
    seed: int = 0,
) -> Embeddings:
    """Read an embedding dataset, possibly written by other code: only the column `embedding` is required.

    Args:
        name: Folder or Hub id.
        split: Split to read; optional if there is only one.
        only_split: If the dataset has a single split, read it even if it has another name.
        needed: Further required columns.
        max_samples: Maximum number of rows, sampled with `seed`.
        seed: Seed of the sampling.

    Raises:
        ValueError: If a column is missing or has invalid values, the split does not exist, or there are several and
            none was chosen.

    Example:
        >>> data = read_embeddings("outputs/embeddings")  # doctest: +SKIP
    """
    check_not_text("needed", needed)

    def read_all(folder: Path) -> tuple[Any, dict[str, Any]]:
        return load_splits(name), read_json(folder / ABOUT_FILE) if (folder / ABOUT_FILE).is_file() else {}

    splits, about = read_whole(name, read_all)
    if len(splits) > 1 and split is None:
        raise ValueError(f"{name} has the splits {', '.join(splits)}; choose one with --split.")
    split_name = next(iter(splits)) if split is None or (only_split and len(splits) == 1) else split
    rows = find_split(splits, split_name, "--split")
    columns = rows.column_names
    predicted = ["confidence", "prediction"] if {"confidence", "prediction"} & set(columns) else []
    if missing := [c for c in dict.fromkeys(["embedding", *needed, *predicted]) if c not in columns]:
        raise ValueError(f"{name} has no column {' and no column '.join(missing)}; it has: {', '.join(columns)}.")
    numbers = torch.arange(len(rows))
    if max_samples is not None and check_integer("--max_samples", max_samples, 1) < len(rows):
        numbers = draw_subset(len(rows), max_samples, check_seed(seed))
        rows = rows.select(numbers.tolist())
    if predicted and not isinstance(rows.features["prediction"], ClassLabel):
        raise ValueError(f"column prediction of {name} has no names of classes; cast it to datasets.ClassLabel.")
    names = {c: read_class_names(rows, c) for c in ("label", "prediction") if c in columns}
    classes = {c: read_labels(rows, c, names[c], split_name) for c in names}
    certainties = {c: read_values(rows, c, split_name) for c in ("confidence", "concentration") if c in columns}
    checked = dict(certainties)
    if rows.features.get("label") in SIGNED:
        checked["label"] = torch.tensor([int(label) for label in names["label"]])[classes["label"]]
    for column, cells in checked.items():
        if (invalid := (cells < 0) | ((cells > 1) & (column == "confidence"))).any():
            first = int(invalid.nonzero()[0, 0])
            problem = f"is {cells[first].item()} in row {numbers[first]}, not {RULES[column]}"
            raise ValueError(f"column {column} of {name}, split {split_name!r}, {problem}. Remove the row or column.")

    def read(column: str) -> Tensor:
        return read_vectors(column_vectors(rows, column), f"column {column} of {name}", scale=1.0)

    def integers(column: str) -> Tensor | None:
        is_there = rows.features.get(column) in SIGNED
        return check_labels(rows[column][:], len(rows), f"column {column} of {name}") if is_there else None

    return Embeddings(
        name=name,
        split=split_name,
        embeddings=read("embedding"),
        logits=read("logits") if "logits" in columns else None,
        labels=classes.get("label"),
        class_names=names.get("label", []),
        predictions=classes.get("prediction"),
        predicted_names=names.get("prediction", []),
        certainties=certainties,
        indices=integers("index"),
        row_ids=integers("row_id"),
        texts=[str(text or "") for text in rows["text"][:]] if "text" in columns else None,
        about=about,
    )
