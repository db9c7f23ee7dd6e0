"""Parts of a data set by name: splits, slices and unions of them, and parts held out at random."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    IterableDatasetDict,
    ReadInstruction,
    concatenate_datasets,
)
from torch import Tensor

from hf_sphere.data.targets import read_class_names, read_labels

_HELD_OUT = re.compile(r"(kept|held_out)\((.+), ([0-9.]+), seed=([0-9]+)\)")


def as_splits(data: Any, max_rows: Mapping[str, int] | None = None) -> DatasetDict:
    """Return the splits of a data set of `datasets`, and those of a streaming one as files of its cache.

    Args:
        data: A `Dataset`, which becomes the split `train`, `DatasetDict`, `IterableDataset` or `IterableDatasetDict`.
        max_rows: Number of rows, by split, that are read from a streaming data set; the others are read to their end.

    Raises:
        TypeError: If it is something else.
    """
    splits = data if isinstance(data, (DatasetDict, IterableDatasetDict)) else {"train": data}
    for part in splits.values():
        if not isinstance(part, (Dataset, IterableDataset)):
            raise TypeError(
                f"a data set must be one of `datasets` or a dictionary of these; got {type(part).__name__}."
            )
    return DatasetDict({name: _stored(part, (max_rows or {}).get(name)) for name, part in splits.items()})


def _stored(part: Any, max_rows: int | None) -> Dataset:
    if isinstance(part, Dataset):
        return part
    part = part if max_rows is None else part.take(max_rows)
    return Dataset.from_generator(partial(iter, part), features=part.features)


def held_out_names(split: str, fraction: float, seed: int) -> tuple[str, str]:
    """Return the names of the two parts of a split, of which the second has a random fraction of the rows."""
    return f"kept({split}, {fraction:g}, seed={seed})", f"held_out({split}, {fraction:g}, seed={seed})"


def read_split(splits: DatasetDict, name: str, label_column: str | None = None) -> Dataset:
    """Return the rows of a split or of a part of the data.

    Args:
        splits: All splits.
        name: Name of a split; an expression of `datasets` such as `train[:80%]` or `train+test`; `all`; or one of
            `held_out_names`, whose parts have the same proportion of classes.
        label_column: Column of the classes; None if there is none.

    Raises:
        KeyError: If there is no such split.
        ValueError: If the expression is invalid, or no part can be held out.
    """
    if name in splits:
        return splits[name]
    if found := _HELD_OUT.fullmatch(name):
        part, split, fraction, seed = found.groups()
        rows = read_split(splits, split, label_column)
        names = [] if label_column is None else read_class_names(rows, label_column)
        classes = None if label_column is None else read_labels(rows, label_column, names, split)
        held_out = draw_held_out(len(rows), float(fraction), int(seed), classes, names)
        return rows.select((held_out if part == "held_out" else ~held_out).nonzero()[:, 0].tolist())
    if name == "all":
        name = "+".join(splits)
    elif not re.search(r"[\[+]", name):
        raise KeyError(name)
    read = ReadInstruction.from_spec(name).to_absolute({key: len(rows) for key, rows in splits.items()})
    parts = [splits[part.splitname].select(range(part.from_, part.to)) for part in read]
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def draw_held_out(
    count: int, fraction: float, seed: int, classes: Tensor | None = None, names: Sequence[str] = ()
) -> Tensor:
    """Draw a random fraction of the images, bool (`count`,), with the same proportion of each class if there are any.

    Args:
        count: Number of images.
        fraction: Fraction to draw, between 0 and 1.
        seed: Seed of the draw.
        classes: (`count`,), class indices.
        names: Names of the classes, for error messages.

    Raises:
        ValueError: If a part would be empty or lack a class.
    """
    from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit

    known, counts = (None, None) if classes is None else classes.unique(return_counts=True)
    if known is not None and counts is not None and counts.min() < 2:
        single = [names[index] if names else str(index) for index in known[counts < 2].tolist()]
        raise ValueError(
            f"{len(single)} class(es) have a single image, which cannot be both in training and held out: "
            f"{', '.join(single[:5])}. Add images, leave these classes out, or name a split instead of a fraction."
        )
    splitter = (ShuffleSplit if classes is None else StratifiedShuffleSplit)(1, test_size=fraction, random_state=seed)
    try:
        _, drawn = next(splitter.split(torch.arange(count).numpy(), classes))
    except ValueError as error:
        raise ValueError(f"a fraction of {fraction} cannot be held out of {count} images: {error}") from error
    return torch.zeros(count, dtype=torch.bool).index_fill_(0, torch.as_tensor(drawn), True)
