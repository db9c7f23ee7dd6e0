"""Embeddings as data sets: a folder of parquet files that `datasets.load_dataset` loads, and what was embedded beside.

`recipes/extract_embeddings.py` writes them and `recipes/evaluate_embeddings.py` reads them. The columns:

embedding      (d,) real numbers
label          class of the data; only if the data has labels
prediction     class that the model chose, by the model's own names; this and the next two only if the model has a head
confidence     softmax of that class
logits         (K,) real numbers
concentration  certainty of the embedding, from heads that have one
index          row of the source split; of the splits put behind each other, where there were two
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from torch import Tensor

from hf_sphere.data.parquet import ParquetSplit
from hf_sphere.data.sources import find_split, load_splits
from hf_sphere.data.targets import read_class_names, read_labels, read_values
from hf_sphere.utils.files import atomic_folder, write_json

ABOUT_FILE = "embeddings.json"
"""What was embedded, by what: beside the data."""

DATA_FOLDER = "data"
"""Where the parquet files are: `datasets` finds splits of any name in a folder called so, and only in that."""

SIGNED = [Value(f"int{bits}") for bits in (8, 16, 32, 64)]
"""Columns of integers that may be negative."""

Columns = Mapping[str, Tensor]
"""Columns of some rows, by name: (B, ...) each."""


@dataclass(frozen=True)
class Embeddings:
    """An embedding data set that has been read.

    Attributes:
        name: Name of the data set or path of the folder.
        split: Name of the split that was read.
        embeddings: (N, d), float32.
        labels: (N,) indices into `class_names`, if there are labels.
        class_names: Names of the data's classes.
        predictions: (N,) indices into `predicted_names`, if there are predictions.
        predicted_names: Names of the model's classes.
        confidences: (N,), in [0, 1], if there are predictions.
        concentrations: (N,), at least 0, if the embeddings have them.
        about: What `embeddings.json` says; empty without it.
        indices: (N,) rows of the data set that was embedded, if they are known.
    """

    name: str
    split: str
    embeddings: Tensor
    labels: Tensor | None
    class_names: list[str]
    predictions: Tensor | None
    predicted_names: list[str]
    confidences: Tensor | None
    concentrations: Tensor | None
    about: dict[str, Any]
    indices: Tensor | None = None

    def judge_predictions(self) -> tuple[Tensor, Tensor]:
        """Compare labels and predictions by the names of the classes.

        Returns:
            (N,) bool, whether the label is one of the model's classes, and (N,) bool, whether it was predicted.
        """
        assert self.labels is not None  # the caller has seen to both
        assert self.predictions is not None
        index = {name: number for number, name in enumerate(self.predicted_names)}
        own = torch.tensor([index.get(name, -1) for name in self.class_names])[self.labels]
        return own >= 0, own == self.predictions


@contextlib.contextmanager
def written_embeddings(
    folder: Path,
    split: str,
    about: Mapping[str, Any],
    *,
    class_names: Sequence[str] = (),
    predicted_names: Sequence[str] = (),
) -> Iterator[Callable[[Columns], None]]:
    """Yield a function that adds rows; the folder appears, or is replaced, when all of them have been written.

    Args:
        folder: Where to write.
        split: Name of the split.
        about: What was embedded by what, for `embeddings.json`; the number of rows and of coordinates are added.
        class_names: Names of the classes that `label` counts.
        predicted_names: Names of the classes that `prediction` counts.

    Raises:
        ValueError: If the name of the split is none that `datasets` takes, or no row was added.
    """
    if re.fullmatch(r"\w+(\.\w+)*", split) is None:
        raise ValueError(f"a split is named by letters, digits, underscores and dots; got {split!r}.")
    names = {"label": class_names, "prediction": predicted_names}
    with atomic_folder(folder) as unfinished, contextlib.ExitStack() as stack:
        (unfinished / DATA_FOLDER).mkdir()
        parquet: ParquetSplit | None = None
        count = coordinates = 0

        def add(columns: Columns) -> None:
            nonlocal parquet, count, coordinates
            if parquet is None:
                features = Features({name: _feature(name, values, names) for name, values in columns.items()})
                parquet = stack.enter_context(ParquetSplit(unfinished / DATA_FOLDER, split, features))
                coordinates = columns["embedding"].shape[1]
            size = sum(values[0].nbytes for values in columns.values())
            cells = {name: values.numpy() for name, values in columns.items()}
            for row in range(len(columns["embedding"])):
                parquet.add({name: values[row] for name, values in cells.items()}, size)
                count += 1

        yield add
        if count == 0:
            raise ValueError(f"there is no embedding to write to {folder}.")
        stack.close()
        write_json(unfinished / ABOUT_FILE, {**about, "embedding_dim": coordinates, "num_images": count})


def read_embeddings(
    name: str,
    *,
    split: str | None = None,
    only_split: bool = False,
    needed: Sequence[str] = (),
    max_samples: int | None = None,
    seed: int = 0,
) -> Embeddings:
    """Read an embedding data set, of the recipe or of another program: only the column `embedding` must be there.

    Args:
        name: Folder, or id on the Hub.
        split: Split to read; may be left out where there is only one.
        only_split: Read the only split of a data set that has a single one, even if `split` is another name.
        needed: Further columns that must be there.
        max_samples: Read only so many rows, drawn by `seed`.
        seed: Seed of that choice.

    Raises:
        ValueError: If a column is missing or holds what it should not, the split is not there, or it is not clear which
            one is meant.
    """
    splits = load_splits(name)
    if len(splits) > 1 and split is None:
        raise ValueError(f"{name} has the splits {', '.join(splits)}; choose one with --split.")
    chosen = next(iter(splits)) if split is None or (only_split and len(splits) == 1) else split
    rows = find_split(splits, chosen, "--split")
    columns = rows.column_names
    paired = {"prediction", "confidence"} if {"prediction", "confidence"} & set(columns) else set()
    missing = [column for column in ("embedding", *needed, *sorted(paired)) if column not in columns]
    if missing:
        raise ValueError(
            f"{name} has no column {' and no column '.join(dict.fromkeys(missing))}; it has: {', '.join(columns)}. "
            "recipes/extract_embeddings.py writes embedding, label if the data has labels, prediction and confidence "
            "if the model has a head, and concentration if that head has one."
        )
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"--max_samples must be at least 1; got {max_samples}.")
    numbers = torch.arange(len(rows))
    if max_samples is not None and max_samples < len(rows):
        drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:max_samples]
        numbers = drawn.sort().values
        rows = rows.select(numbers.tolist())
    class_names = read_class_names(rows, "label") if "label" in columns else []
    if paired and not isinstance(rows.features["prediction"], ClassLabel):
        raise ValueError(
            f"column prediction of {name} holds {rows.features['prediction']}, which does not tell the model's classes "
            "by name. Cast it: dataset.cast_column('prediction', datasets.ClassLabel(names=[...])), or leave it out."
        )
    predicted_names = read_class_names(rows, "prediction") if paired else []
    labels = read_labels(rows, "label", class_names, chosen) if "label" in columns else None
    confidences = read_values(rows, "confidence", chosen) if paired else None
    concentrations = read_values(rows, "concentration", chosen) if "concentration" in columns else None

    place = f"of {name}, split {chosen!r}"
    if labels is not None and rows.features["label"] in SIGNED:
        given = torch.tensor([int(label) for label in class_names])[labels]
        rule = "classes count from 0, and -1 often says that there is no label. Leave such rows, or the column, out"
        _refuse(given < 0, given, "label", place, numbers, rule)
    if confidences is not None:
        rule = "it must be a probability, in [0, 1]. Take the softmax of the logits, or leave it and prediction out"
        _refuse((confidences < 0) | (confidences > 1), confidences, "confidence", place, numbers, rule)
    if concentrations is not None:
        rule = "it must be at least 0, the concentration without any direction. Repair it, or leave the column out"
        _refuse(concentrations < 0, concentrations, "concentration", place, numbers, rule)
    about = Path(name) / ABOUT_FILE
    return Embeddings(
        name=name,
        split=chosen,
        embeddings=_read_vectors(rows, "embedding", name),
        labels=labels,
        class_names=class_names,
        predictions=read_labels(rows, "prediction", predicted_names, chosen) if paired else None,
        predicted_names=predicted_names,
        confidences=confidences,
        concentrations=concentrations,
        indices=torch.tensor(rows["index"][:]) if rows.features.get("index") in SIGNED else None,
        about=json.loads(about.read_text(encoding="utf-8")) if about.is_file() else {},
    )


def _feature(name: str, values: Tensor, names: Mapping[str, Sequence[str]]) -> Any:
    """Kind of a column: classes by name, vectors of one length, or numbers."""
    if name in names:
        return ClassLabel(names=list(names[name]))
    number = Value(str(values.dtype).removeprefix("torch."))
    return number if values.ndim == 1 else List(number, length=values.shape[1])


def _refuse(wrong: Tensor, values: Tensor, column: str, place: str, numbers: Tensor, rule: str) -> None:
    """Refuse a column with wrong values, naming the first by its row in the split."""
    if wrong.any():
        first = int(wrong.nonzero()[0, 0])
        raise ValueError(f"column {column} {place}, is {values[first].item()} in row {numbers[first]}; {rule}.")


def _read_vectors(rows: Dataset, column: str, name: str) -> Tensor:
    """Read a column of vectors of one length, float32 (N, d)."""
    cells = rows.select_columns([column]).with_format("arrow")[:][column].combine_chunks()
    kind = cells.type
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_list(kind) for is_list in lists) or not (
        pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)
    ):
        raise ValueError(f"column {column} of {name} holds {rows.features[column]}; it must be lists of numbers.")
    lengths = cells.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False)
    odd = (lengths != lengths[0]).nonzero()[0] if lengths[0] > 0 else [0]
    numbers = cells.flatten()
    if len(odd) or numbers.null_count:
        where = f": row {odd[0]} is none, or one of another length" if len(odd) else ", but some numbers are missing"
        raise ValueError(f"column {column} of {name} must have vectors of one length in all rows{where}.")
    values = numbers.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    return torch.tensor(values).reshape(len(rows), -1)
