"""Targets of images: class labels, real values, or both."""

from typing import Literal, get_args

import pyarrow as pa
import torch
from datasets import ClassLabel, Dataset
from torch import Tensor

from hf_sphere.data.computed_values import COMPUTED_VALUES
from hf_sphere.data.episodes import Episodes
from hf_sphere.data.options import ValueOptions

Task = Literal["classification", "regression", "joint", "retrieval", "few_shot"]
"""Kind of `labels`: classes, real values, classes with real values in addition, or (the last two) classes that are
numbered separately in each split."""

OPEN_SETS = ("retrieval", "few_shot")
"""Tasks whose splits may have different classes."""


def check_task(
    task: str,
    label_column: str | None,
    values: ValueOptions,
    train_classes: int | None = None,
    episodes: Episodes | None = None,
) -> None:
    """Raise an error if a task does not exist, or does not support the targets or episodes."""
    if task not in get_args(Task):
        raise ValueError(f"task must be classification, regression, joint, retrieval or few_shot; got {task!r}.")
    sources = {"value_column_name": values.value_column_name, "computed_value": values.computed_value}
    given = [f"--{name} {value}" for name, value in sources.items() if value is not None]
    if len(given) == 2:
        raise ValueError(f"{' and '.join(given)} are two sources of one value; use only one of them.")
    if given and task in ("classification", *OPEN_SETS):
        raise ValueError(f"{given[0]} does not apply to {task}: leave it out, or choose task regression or joint.")
    if train_classes is not None and task not in OPEN_SETS:
        raise ValueError(
            f"--train_classes {train_classes} does not apply to {task}, which trains on all classes: leave it out, or "
            "choose task retrieval or few_shot."
        )
    if episodes is not None and task == "regression":
        raise ValueError("episodes are drawn by class, and regression has no classes: leave them out.")
    if label_column is not None and task == "regression":
        raise ValueError(
            f"--label_column_name {label_column} does not apply to regression, which has no classes: leave it out, or "
            "choose task classification or joint. Real values come from --value_column_name."
        )
    if values.computed_value is not None and values.computed_value not in COMPUTED_VALUES:
        raise ValueError(f"no computed value {values.computed_value!r}; there are {', '.join(COMPUTED_VALUES)}.")


def read_values(rows: Dataset, column: str, split: str) -> Tensor:
    """Read real values, float32, (N,).

    Raises:
        ValueError: If a value is missing, not a number or not finite; the message contains its row and the split.
    """
    cells = rows.select_columns([column]).with_format("arrow")[:][column].combine_chunks()
    where = f"in split {split!r}"
    missing = torch.tensor(cells.is_null().to_numpy(zero_copy_only=False))
    if missing.any():
        raise ValueError(
            f"value column {column!r} has {int(missing.sum())} missing values: row {_first(missing)} {where} is the "
            "first. Leave such rows out of the data."
        )
    if not (pa.types.is_integer(cells.type) or pa.types.is_floating(cells.type)):
        raise ValueError(
            f"value column {column!r} contains {rows.features[column]}, beginning with row 0 {where}; values must be "
            "integers or real numbers. Convert it, or name another column with --value_column_name."
        )
    exact = cells.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    values = torch.tensor(exact, dtype=torch.float32)
    infinite = ~values.isfinite()
    if infinite.any():
        first = _first(infinite)
        raise ValueError(
            f"value column {column!r} has {int(infinite.sum())} values that are not finite in single precision: "
            f"{exact[first]} of row {first} {where} is the first. Repair them or leave such rows out of the data."
        )
    return values


def _first(marked: Tensor) -> int:
    return int(marked.nonzero()[0, 0])


def read_class_names(rows: Dataset, column: str) -> list[str]:
    """Return the name of each class, by index: the names of a `ClassLabel`, or the sorted values of the column."""
    feature = rows.features[column]
    if isinstance(feature, ClassLabel):
        return list(feature.names)
    kind = getattr(feature, "dtype", "")
    if not kind.startswith(("int", "uint", "bool", "string", "large_string")):
        raise ValueError(f"label column {column!r} contains {feature}; class labels are integers or names.")
    values = set(rows.unique(column)) - {None}
    return [str(value) for value in sorted(values)]


def read_labels(rows: Dataset, column: str, class_names: list[str], split: str) -> Tensor:
    """Read class indices, int64, (N,)."""
    if None in rows.unique(column):
        first = list(rows[column]).index(None)
        raise ValueError(f"label column {column!r} has missing values: image {first} in split {split!r} is the first.")
    values = rows.with_format("numpy")[column][:]
    if isinstance(rows.features[column], ClassLabel):
        labels = torch.as_tensor(values, dtype=torch.int64)
        outside = ((labels < 0) | (labels >= len(class_names))).nonzero()[:, 0]
        if len(outside):
            first = int(outside[0])
            raise ValueError(
                f"label {int(labels[first])} of image {first} in split {split!r} is outside the classes 0 to "
                f"{len(class_names) - 1}. Does this split have labels? If not, choose another one."
            )
        return labels
    index = {name: i for i, name in enumerate(class_names)}
    unknown = sorted({str(value) for value in values} - set(index))
    if unknown:
        raise ValueError(f"split {split!r} has classes that the training split lacks: {', '.join(unknown[:10])}.")
    return torch.tensor([index[str(value)] for value in values])
