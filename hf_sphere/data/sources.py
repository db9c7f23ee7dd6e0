"""Sources of image datasets, their columns, and parts of them by name."""

import itertools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, DatasetDict, Image, IterableDataset, IterableDatasetDict, ReadInstruction
from PIL import Image as PILImage
from torch import Tensor

from hf_sphere.data import folders
from hf_sphere.data.bundled import BUNDLED
from hf_sphere.data.options import ImageSourceOptions
from hf_sphere.data.targets import OPEN_SETS, is_of_classes, read_class_names, read_labels
from hf_sphere.utils.loading import load_dataset

logger = logging.getLogger(__name__)

# Column names used on the Hub, the most common one first; fine labels before coarse ones. `cls` is that of tar shards.
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label", "labels", "coarse_label", "cls")
VALUE_COLUMNS = ("value", "target", "year", "creation_year", "age", "regression_label")


def load_splits(
    name: str, config_name: str | None = None, *, streaming: bool = False, follow_links: bool = False
) -> Any:
    """Load all splits of an image dataset: a bundled one, one on the Hub, or a folder of parquet files or images.

    Links in a folder to files outside it, and tables that name such files, are an error, unless links are followed.
    """
    folder = Path(name)
    if name in BUNDLED and folder.is_dir():
        raise ValueError(f"{name} is a bundled dataset and a folder; write ./{name} for the folder, or rename it.")
    if name in BUNDLED:
        return DatasetDict(BUNDLED[name]())
    kinds = folders.SUFFIXES | folders.UNREADABLE, folders.TABLES, {".txt"}  # texts are read if there is nothing else
    images, tables, _ = (folders.list_files(folder, suffixes, follow_links=follow_links) for suffixes in kinds)
    splits = load_dataset(name, config_name, streaming=streaming)
    names = [] if streaming else _file_names(splits)
    if folder.is_dir() and config_name is None and not folders.has_configs(folder):  # which push_to_hub has checked
        if not images or folders.has_tables(folder):
            folders.check_class_names(tables, next(iter(splits.values())).features or {})
            folders.log_unread(folder)
        elif not tables:
            folders.log_unread(folder, None if streaming else names)
    if tables and not follow_links:
        folders.check_inside(name, names)
    return splits


def _file_names(splits: DatasetDict) -> list[str]:
    """Return the names of the files of images that are not in the tables themselves."""
    names = []
    for rows in splits.values():
        for name, feature in rows.features.items():
            if isinstance(feature, Image) or (isinstance(feature, dict) and {"bytes", "path"} <= feature.keys()):
                cells = rows.data.column(name)
                is_file = pc.is_null(pc.struct_field(cells, "bytes"))
                names += pc.struct_field(cells, "path").filter(is_file).drop_null().to_pylist()
    return names


def find_column(
    dataset: Dataset, name: str | None, candidates: tuple[str, ...], what: str, *, instead: str = "", option: str = ""
) -> str:
    """Return the column `name`, else the first of the usual `candidates` that exists, or the only one of images."""
    if name is not None and name not in dataset.column_names:
        raise ValueError(f"no {what} column {name!r}; the data has the columns {dataset.column_names}.")
    if column := name or next((name for name in candidates if name in dataset.column_names), None):
        return column
    from hf_sphere.data.image_files import holds_images  # texts do not need it

    images = [name for name, feature in dataset.features.items() if holds_images(feature)]
    if what == "image" and len(images) == 1:
        return images[0]
    if what == "label" and images:
        instead += ", or put the images into folders at one depth, one per class"
    raise ValueError(
        f"found no {what} column: none of {list(candidates)} is in {dataset.column_names}. "
        f"Name it with {option or f'--{what}_column_name'}{instead}."
    )


def usual_label(rows: Dataset) -> str | None:
    """Return the first usual name of a column of classes; similarities of texts or masks of images are none."""
    return next((name for name in LABEL_COLUMNS if is_of_classes(rows.features.get(name))), None)


def choose_eval_split(splits: Mapping[str, Any], name: str | None, train: str = "train") -> str | None:
    """Return the name of the evaluation split: `name`, else `test`, else `validation`, but not `train`, else None."""
    usual = ("test", "validation", "valid", "val", "dev")
    return name or next((key for key in usual if key in splits and key != train), None)


def find_split(splits: DatasetDict, name: str, option: str, label_column: str | None = None) -> Dataset:
    """Return a split or part of the data, see `read_split`, which the `option` chooses; an error lists the splits."""
    try:
        rows = read_split(splits, name, label_column)
    except KeyError:
        raise ValueError(f"no split {name!r}; the data has {', '.join(splits)}. Choose one with {option}.") from None
    except (ValueError, AssertionError) as error:  # `datasets` asserts
        raise ValueError(f"split {name!r} of {', '.join(splits)} ({option}) cannot be read: {error}") from error
    if len(rows) == 0:
        raise ValueError(f"split {name!r} is empty; choose another one with {option}.")
    return rows


def choose_splits(
    splits: DatasetDict, options: ImageSourceOptions, task: str, train_classes: int | None
) -> dict[str, tuple[str, Dataset]]:
    """Return name and rows of `train`, `eval` and possibly `validation`; without an evaluation split it is held out."""
    train = options.train_split
    names = {"train": train, "eval": choose_eval_split(splits, options.eval_split, train) or train}
    label_column = stratifying_column(splits, options, task)
    is_divided = names["eval"] == train and options.eval_split is None
    by_class = train_classes is not None or (is_divided and task in OPEN_SETS)
    if is_divided and not by_class:
        find_split(splits, train, "--train_split")
        names["train"], names["eval"] = held_out_names(train, options.held_out_fraction, options.eval_seed)
        how = ", stratified by class," if label_column else ""
        text = "The data has no evaluation split: %g %% of the split %s is held out%s with seed %d, as the split '%s'."
        logger.info(text, 100 * options.held_out_fraction, train, how, options.eval_seed, names["eval"])
    if options.eval_fraction is not None and (train_classes is not None or not is_divided):
        reason = f"with the evaluation split {names['eval']}" if train_classes is None else "with train_classes"
        raise ValueError(f"eval_fraction {options.eval_fraction} has no effect {reason}; leave it out.")
    if (name := options.validation_split) is not None:
        if by_class:
            raise ValueError(f"all classes are divided, also those of --validation_split {name}; hold out a fraction.")
        check_validation_split(name, names)
        names["validation"] = name
    return {key: (name, find_split(splits, name, f"--{key}_split", label_column)) for key, name in names.items()}


def read_groups(rows: Dataset, column: str) -> list[Any]:
    """Return the group of each row, or raise an error if there is no such column, or a row has none."""
    groups = rows[find_column(rows, column, (), "group", option="--group_column")][:]
    if wrong := [n for n, group in enumerate(groups) if group != group or isinstance(group, (list, dict, type(None)))]:
        first = f"{len(wrong):,} rows have none, such as row {wrong[0]}: {groups[wrong[0]]}"
        raise ValueError(f"column {column!r} must have the name of a group in each row; {first}. Leave them out.")
    return groups


def check_validation_split(name: str, others: Mapping[str, str]) -> None:
    """Raise an error if the split is one of the `others`, `train` and `eval`."""
    for key in (key for key, other in others.items() if other == name):
        raise ValueError(f"--validation_split {name} is also the split of --{key}_split; name another one.")


def common_column(
    rows: dict[str, Dataset], name: str | None, candidates: tuple[str, ...], what: str, instead: str = ""
) -> str:
    """Find a column in the training split, and check that the other splits have it."""
    column = find_column(rows["train"], name, candidates, what, instead=instead)
    for split in rows.values():
        find_column(split, column, (), what)
    return column


def stratifying_column(splits: DatasetDict, options: ImageSourceOptions, task: str) -> str | None:
    """Return the label column by which parts are held out: that of the options, else detected by name, or None."""
    rows = next(iter(splits.values()))
    return None if task == "regression" else options.label_column_name or usual_label(rows)


def count_training_classes(rows: Dataset, label_column: str, options: ImageSourceOptions) -> int:
    """Return the number of classes to train on, the first ones; where possible two are held out at least."""
    count = len(rows.unique(label_column))
    train_classes = count - max(round(options.held_out_fraction * count), 2 if count > 3 else 1)
    text = "The data has no evaluation split: %g %% of the %d classes are held out, the last ones; --train_classes %d."
    logger.info(text, 100 * options.held_out_fraction, count, train_classes)
    return train_classes


_HELD_OUT = re.compile(r"(kept|held_out)\((.+), ([-+.e0-9]+), seed=([0-9]+)(?:, by=([^()]+))?\)")


def as_splits(data: Any, max_rows: Mapping[str | None, int | None]) -> DatasetDict:
    """Return the splits of a dataset of `datasets`; streams are read to `max_rows`, or their end, into its cache."""
    splits = data if isinstance(data, (DatasetDict, IterableDatasetDict)) else {"train": data}
    for rows in splits.values():
        if not isinstance(rows, (Dataset, IterableDataset)):
            raise TypeError(f"a dataset must be one of `datasets` or a dictionary of these; got {type(rows).__name__}.")
    # Another format would change images and labels.
    return DatasetDict({name: _stored(rows.with_format(None), max_rows.get(name)) for name, rows in splits.items()})


def _stored(rows: Any, max_rows: int | None) -> Dataset:
    if isinstance(rows, Dataset):
        return rows
    rows, features = rows if max_rows is None else rows.take(max_rows), rows.features
    images = [name for name, feature in (features or {}).items() if isinstance(feature, Image)]
    for name in images:  # decoded, they would be encoded again, and JPEG loses quality
        rows = rows.cast_column(name, Image(decode=False))
    stored = Dataset.from_generator(partial(_encoded_rows, rows, images), features=rows.features)
    return stored if features is None else stored.cast(features)


def _encoded_rows(rows: IterableDataset, images: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a stream, with the bytes of the files of its image columns, and other images encoded."""
    from hf_sphere.data.image_files import encode_image

    for row in rows:
        files = {name: pa.array([row[name]], Image.pa_type) for name in images}
        row |= {name: Image().embed_storage(file)[0].as_py() for name, file in files.items()}
        yield {name: encode_image(cell) if isinstance(cell, PILImage.Image) else cell for name, cell in row.items()}


_HELD_OUT = re.compile(r"(kept|held_out)\((.+), ([-+.e0-9]+), seed=([0-9]+)(?:, by=([^()]+))?\)")


def held_out_names(split: str, fraction: float, seed: int, by: str | None = None) -> tuple[str, str]:
    """Return the names of two parts of a split, the second a random fraction; groups of the column `by` stay whole."""
    drawn = f"({split}, {fraction:g}, seed={seed}{f', by={by}' if by else ''})"
    return f"kept{drawn}", f"held_out{drawn}"


def read_split(splits: DatasetDict, name: str, label_column: str | None = None) -> Dataset:
    """Return the rows of a split or of a part of the data; a KeyError is that of a split that does not exist.

    The name is that of a split; an expression of `datasets` such as `train[:80%]` or `train+test`; `all`; or one of
    `held_out_names`, whose parts have the same proportion of classes, those of the label column.
    """
    return splits[name] if name in splits else _join(splits, _find_pieces(splits, name, label_column))


def find_rows(splits: DatasetDict, name: str, label_column: str | None = None) -> Tensor:
    """Return the rows of a split, part or pool of them among those of all splits, one after the other: (N,)."""
    starts = dict(zip(splits, itertools.accumulate(map(len, splits.values()), initial=0), strict=False))
    return torch.cat([rows + starts[split] for split, rows in _find_pieces(splits, name, label_column)])


def _join(splits: DatasetDict, pieces: list[tuple[str, Tensor]]) -> Dataset:
    joined = [splits[split].select(rows.tolist()) for split, rows in pieces]
    return joined[0] if len(joined) == 1 else datasets.concatenate_datasets(joined)


def _find_pieces(splits: DatasetDict, name: str, label_column: str | None) -> list[tuple[str, Tensor]]:
    """Return the splits that a name, see `read_split`, stands for, and the rows of each that belong to it, (N,)."""
    if name in splits:
        return [(name, torch.arange(len(splits[name])))]
    pooled = [*splits] if name == "all" else re.split(r"\+(?![^(]*\))", name)
    if name == "all" or len(pooled) > 1:
        return [piece for part in pooled for piece in _find_pieces(splits, part, label_column)]
    if (match := _HELD_OUT.fullmatch(name)) is None:
        if "[" not in name:
            raise KeyError(name)
        sizes = {key: len(rows) for key, rows in splits.items()}
        return [(p.splitname, torch.arange(p.from_, p.to)) for p in ReadInstruction.from_spec(name).to_absolute(sizes)]
    kind, whole, fraction, seed, by = match.groups()
    pieces = _find_pieces(splits, whole, label_column)
    rows, classes = _join(splits, pieces), None
    if label_column is not None and by != label_column:
        names = read_class_names(rows, find_column(rows, label_column, (), "label"))
        classes = read_labels(rows, label_column, names, whole)
    groups = None if by is None else read_groups(rows, by)
    held_out = draw_held_out(len(rows), float(fraction), int(seed), classes, groups)
    masks = (held_out if kind == "held_out" else ~held_out).split([len(rows) for _, rows in pieces])
    return [(split, rows[mask]) for (split, rows), mask in zip(pieces, masks, strict=True)]


def draw_held_out(
    count: int, fraction: float, seed: int, classes: Tensor | None = None, groups: Sequence[Any] | None = None
) -> Tensor:
    """Draw a random fraction of images, bool (`count`,), stratified by `classes`, if any; `groups` are not divided."""
    from sklearn import model_selection

    num_drawn = 1  # of the folds
    if groups is not None and classes is not None:
        share = Fraction(fraction).limit_denominator(10)
        num_drawn = share.numerator
        splitter: Any = model_selection.StratifiedGroupKFold(share.denominator, shuffle=True, random_state=seed)
    else:
        kind = model_selection.ShuffleSplit if groups is None else model_selection.GroupShuffleSplit
        kind = kind if classes is None else model_selection.StratifiedShuffleSplit
        splitter = kind(1, test_size=fraction, random_state=seed)
    try:
        folds = [*splitter.split(torch.arange(count).numpy(), classes, groups)]
    except ValueError as error:
        what = "images" if groups is None else f"images in {len({*groups})} groups"
        raise ValueError(f"a fraction of {fraction} cannot be held out of {count} {what}: {error}") from error
    # Random ones: the splitter puts the largest groups of a class into the same fold for every seed.
    chosen = np.random.default_rng(seed).permutation(len(folds))[:num_drawn]
    drawn = np.concatenate([folds[index][1] for index in chosen])
    return torch.zeros(count, dtype=torch.bool).index_fill_(0, torch.as_tensor(drawn), True)
