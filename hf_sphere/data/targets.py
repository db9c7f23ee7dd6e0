"""Targets of images: class labels, real values, or both."""

import functools
import logging
import unicodedata
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import torch
from datasets import ClassLabel, Dataset, Value
from torch import Tensor

from hf_sphere.data.options import DataTask, ImageSourceOptions, ValueOptions
from hf_sphere.data.sampling import Episodes
from hf_sphere.utils.checks import check_choice

logger = logging.getLogger(__name__)

OPEN_SETS = ("retrieval", "few_shot")
"""Tasks whose splits may have different classes."""

_OF_CLASSES = ("classification", "joint", *OPEN_SETS)
_TASKS_OF = {
    **dict.fromkeys(("value_column_name", "computed_value"), ("regression", "joint")),
    **dict.fromkeys(("label_column_name", "label_noise", "class_balanced_sampling", "episodes"), _OF_CLASSES),
    "train_classes": OPEN_SETS,
    "sample_classes": ("classification", "joint"),  # in an open set, evaluation images have other classes
    **dict.fromkeys(("mixup", "cutmix"), ("classification", "retrieval")),
    "rejection_fraction": ("classification",),
}
"""The tasks of options and arguments that do not apply to all."""


def check_task(
    task: str,
    options: ImageSourceOptions,
    values: ValueOptions,
    train_classes: int | None = None,
    episodes: Episodes | None = None,
) -> None:
    """Raise an error if a task does not exist, or does not support the options, targets or episodes."""
    check_choice("task", task, get_args(DataTask))
    stated = {**vars(options), **vars(values), "train_classes": train_classes, "episodes": episodes}
    draws = ("class_balanced_sampling", "mixup", "cutmix") if episodes is not None else ()
    for name, tasks in _TASKS_OF.items():
        if (value := stated.get(name)) and (name in draws or task not in tasks):
            what = "episodes, which draw classes" if task in tasks else f"{task}, but to {' and '.join(tasks)}"
            raise ValueError(f"--{name} {value} does not apply to {what}; leave it out.")


def read_values(rows: Dataset, column: str, split: str) -> Tensor:
    """Read real values, float32, (N,); one that is missing, not a number or not finite is an error."""
    cells = rows.select_columns([column]).with_format("arrow")[:][column].combine_chunks()
    exact = cells.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    values = torch.tensor(exact, dtype=torch.float32)
    if unusable := (~values.isfinite()).nonzero()[:, 0].tolist():
        what = f"value column {column!r} has {len(unusable)} values that are missing or not finite in single precision"
        raise ValueError(f"{what}: {exact[unusable[0]]} of row {unusable[0]} in split {split!r}. Leave them out.")
    if len(exact) and (rounding := abs(values.double().numpy() - exact).max()) > 1e-3 * (np.ptp(exact) or np.inf):
        what = f"value column {column!r} has values from {exact.min():.10g} to {exact.max():.10g} in split {split!r}"
        raise ValueError(f"{what}, which single precision rounds by {rounding:.3g}; subtract their mean.")
    return values


def read_class_names(rows: Dataset, column: str) -> list[str]:
    """Return the name of each class, by index: the names of a `ClassLabel`, or the sorted values of the column."""
    feature = rows.features[column]
    if not is_of_classes(feature):
        raise ValueError(f"label column {column!r} contains {feature}; class labels are integers or names.")
    is_named = isinstance(feature, ClassLabel)
    names = feature.names if is_named else [str(value) for value in sorted(set(rows.unique(column)) - {None})]
    _warn_of_equal_names(column, tuple(names))
    return list(names)


@functools.lru_cache(maxsize=8)  # once for a dataset
def _warn_of_equal_names(column: str, names: tuple[str, ...]) -> None:
    """Warn of classes whose names are the same text in two Unicode forms, as of folders that were made on a Mac."""
    seen: dict[str, str] = {}
    for name in names:
        if (first := seen.setdefault(unicodedata.normalize("NFC", name), name)) != name:
            text = "label column %r: the classes %a and %a have the same name in two Unicode forms; rename one to join "
            logger.warning(text + "them.", column, first, name)


def read_labels(rows: Dataset, column: str, class_names: list[str], split: str) -> Tensor:
    """Read class indices, int64, (N,); a label that is missing or none of the classes is an error."""
    index, values = {name: number for number, name in enumerate(class_names)}, rows[column][:]
    if names := getattr(rows.features[column], "names", None):
        named = dict(enumerate(names))
        values = [named.get(value, value) for value in values]
    else:
        values = [None if value is None else str(value) for value in values]
    labels = [index.get(value, -1) for value in values]
    if count := labels.count(-1):
        what = f"label {values[labels.index(-1)]} of image {labels.index(-1)} in split {split!r}"
        problem = f"{what} is missing or none of the classes, as in {count} row(s) of column {column!r}"
        raise ValueError(f"{problem}; choose a split with these classes.")
    return torch.tensor(labels, dtype=torch.int64)


def is_of_classes(feature: Any) -> bool:
    """Whether a column can be of class labels: `ClassLabel`, integers or texts."""
    kinds = ("int", "uint", "bool", "string", "large_string")
    return isinstance(feature, ClassLabel) or str(getattr(feature, "dtype", "")).startswith(kinds)


def has_labels(rows: Dataset, column: str) -> bool:
    """Whether a label column has classes; those of test images without labels are all missing or -1."""
    is_wrong = not isinstance(rows.features.get(column), (ClassLabel, Value))  # an error elsewhere
    return is_wrong or not set(rows.unique(column)) <= {None, -1}


def slant(images: Tensor) -> Tensor:
    """Slant of the stroke from the vertical in degrees, between -90 and 90, positive where it leans right.

    It is computed from central second moments of the ink: tan(slant) = mu_xy / mu_yy, with x to the right and y up.
    Shearing an image by -tan(slant) makes the stroke upright. Images without ink, or with ink in a single row only,
    have slant 0. Images are uint8 (N, C, H, W), light on dark; the slants are float32 (N,).
    """
    height, width = images.shape[-2:]
    across = torch.arange(width, dtype=torch.float64, device=images.device)
    down = torch.arange(height, dtype=torch.float64, device=images.device)
    slants = []
    for batch in images.split(1000):
        ink = batch.sum(1, dtype=torch.float64)  # integers
        in_rows = ink.sum(2)
        total = in_rows.sum(1, keepdim=True).clamp_min(1)  # a sum of integers, so only blank images are clamped
        offset = down - in_rows @ down[:, None] / total
        moment_yy = (in_rows * offset.square()).sum(1)
        moment_xy = (ink @ across * offset).sum(1)
        # Rows are counted downward, hence the sign.
        slants.append(torch.where(moment_yy > 0, -moment_xy / moment_yy, 0.0).atan().rad2deg())
    return torch.cat(slants).float()


COMPUTED_VALUES: dict[str, Callable[[Tensor], Tensor]] = {"slant": slant}
"""Regression targets computed from pixels, so that any images of strokes can be used for regression.

Light ink on a dark background is assumed, as in MNIST; images of dark ink on paper must be inverted first.
"""

CHANGED_BY = {"slant": ("horizontal_flip", "alternating_flip", "rotation", "random_resized_crop", "occlusion")}
"""Options of `Augmentation` that change the value of an image."""
