"""Sources of datasets, their columns and images, and parts of them by name."""

import io
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, IterableDataset, ReadInstruction, Value
from datasets.utils.file_utils import xopen
from PIL import Image as PILImage, ImageFile
from torch import Tensor

from hf_sphere.data import folders
from hf_sphere.data.targets import is_of_classes, read_class_names, read_labels
from hf_sphere.utils.checks import check_regular
from hf_sphere.utils.loading import load_dataset, load_file, open_format

# Column names used on the Hub, the most common one first; fine labels before coarse ones. `cls` is that of tar shards.
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label", "labels", "coarse_label", "cls")
VALUE_COLUMNS = ("value", "target", "year", "creation_year", "age", "regression_label")


@cache
def _digits() -> DatasetDict:
    """The 1,797 handwritten 8x8 digits of scikit-learn; every fifth image of each class is in the test split."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    is_test = np.zeros(len(images), dtype=bool)
    for label in range(10):
        is_test[np.flatnonzero(digits.target == label)[4::5]] = True
    train, test = (images[~is_test], digits.target[~is_test]), (images[is_test], digits.target[is_test])
    return _as_splits({"train": train, "test": test}, [*map(str, range(10))])


@cache
def _two_clusters() -> DatasetDict:
    """Two clusters of 100 points near (0, 0) and (1, 1), as images of 1 x 2 pixels: -0.05 is 0, and 1.05 is 255."""
    splits = {}
    for split, seed in (("train", 0), ("test", 1)):
        labels = np.repeat([0, 1], 100)
        points = labels[:, None] + np.random.default_rng(seed).uniform(-0.05, 0.05, size=(200, 2))
        pixels = np.round((points + 0.05) * (255 / 1.1)).astype(np.uint8)
        splits[split] = (pixels[:, None, :], labels)
    return _as_splits(splits, ["near (0, 0)", "near (1, 1)"])


def _as_splits(splits: dict[str, tuple[np.ndarray, np.ndarray]], names: list[str]) -> DatasetDict:
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    tables = DatasetDict()
    for split, (images, labels) in splits.items():
        tables[split] = Dataset.from_dict({"image": list(images), "label": labels.tolist()}, features)
    return tables


BUNDLED: dict[str, Callable[[], DatasetDict]] = {"digits": _digits, "two_clusters": _two_clusters}
"""Functions that return the splits, by name."""


def load_splits(
    name: str,
    config_name: str | None = None,
    *,
    streaming: bool = False,
    follow_links: bool = False,
    cache_dir: str | None = None,
) -> Any:
    """Load all splits of a dataset: a bundled one, one on the Hub, a folder, or a file of rows as the split `train`.

    A folder has images, tables or texts; `config_name` can be a folder in it. Links in it to files outside, and tables
    that name such files, are an error, unless links are followed.
    """
    folder, options = Path(name), dict[str, Any](streaming=streaming, cache_dir=cache_dir)
    if name in BUNDLED and folder.is_dir():
        raise ValueError(f"{name} is a bundled dataset and a folder; write ./{name} for the folder, or rename it.")
    if name in BUNDLED:
        return DatasetDict(BUNDLED[name]())
    if folder.is_file():
        return load_file(name, **options)
    if config_name is not None and (folder / config_name).is_dir() and not folders.has_configs(folder):
        folder, config_name = folder / config_name, None
    kinds = folders.SUFFIXES | folders.UNREADABLE, folders.TABLES, {".txt"}  # texts are read if there is nothing else
    images, tables, _ = (folders.list_files(folder, suffixes, follow_links=follow_links) for suffixes in kinds)
    splits = load_dataset(str(folder) if folder.is_dir() else name, config_name, **options)
    names = [] if streaming else [name for rows in splits.values() for name in _named_files(rows)]
    if folder.is_dir() and config_name is None and not folders.has_configs(folder):  # which push_to_hub has checked
        if not images or folders.has_tables(folder):
            folders.check_class_names(tables, next(iter(splits.values())).features or {})
            folders.log_unread(folder)
        elif not tables:
            folders.log_unread(folder, None if streaming else names)
    if tables and not follow_links:
        folders.check_inside(folder, names)
    return splits


def _named_files(rows: Dataset) -> Iterator[str]:
    """Yield the names of the files of images that are not in the table itself."""
    for name, feature in rows.features.items():
        if isinstance(feature, Image) or (isinstance(feature, dict) and {"bytes", "path"} <= feature.keys()):
            cells = rows.data.column(name)
            paths = pc.struct_field(cells, "path").filter(pc.is_null(pc.struct_field(cells, "bytes")))
            yield from paths.drop_null().to_pylist()


def find_column(
    dataset: Dataset, name: str | None, candidates: tuple[str, ...], what: str, *, instead: str = "", option: str = ""
) -> str:
    """Return the column `name`, else the first of the usual `candidates` that exists, or the only one of images."""
    there = dataset.column_names
    if column := next((each for each in ([name] if name else candidates) if each in there), None):
        return column
    images = [each for each, feature in dataset.features.items() if holds_images(feature)]
    if name is None and what == "image" and len(images) == 1:
        return images[0]
    if what == "label" and images:
        instead += ", or put the images into folders at one depth, one per class"
    problem = f"found no {what} column: none of {list(candidates)} is in {there}"
    problem = f"no {what} column {name!r}; the data has the columns {there}" if name else problem
    raise ValueError(f"{problem}. Name it with {option or f'--{what}_column_name'}{instead}.")


def usual_label(rows: Dataset) -> str | None:
    """Return the first usual name of a column of classes; similarities of texts or masks of images are none."""
    return next((name for name in LABEL_COLUMNS if is_of_classes(rows.features.get(name))), None)


def stratifying_column(splits: DatasetDict, label_column: str | None) -> str | None:
    """Return the column of classes by which parts are held out: `label_column`, else the first with a usual name."""
    return label_column or usual_label(next(iter(splits.values())))


def common_column(
    rows: Mapping[str, Dataset], name: str | None, candidates: tuple[str, ...], what: str, instead: str = ""
) -> str:
    """Find a column in the training split, and check that the other splits have it."""
    column = find_column(rows["train"], name, candidates, what, instead=instead)
    for split in rows.values():
        find_column(split, column, (), what)
    return column


def read_groups(rows: Dataset, column: str) -> list[Any]:
    """Return the group of each row, or raise an error if there is no such column, or a row has none."""
    groups = rows[find_column(rows, column, (), "group", option="--group_column")][:]
    if wrong := [n for n, group in enumerate(groups) if group != group or isinstance(group, (list, dict, type(None)))]:
        first = f"{len(wrong):,} rows have none, such as row {wrong[0]}: {groups[wrong[0]]}"
        raise ValueError(f"column {column!r} must have the name of a group in each row; {first}. Leave them out.")
    return groups


def choose_eval_split(splits: Mapping[str, Any], name: str | None, train: str = "train") -> str | None:
    """Return the name of the evaluation split: `name`, else `test`, else `validation`, but not `train`, else None."""
    usual = ("test", "validation", "valid", "val", "dev")
    return name or next((key for key in usual if key in splits and key != train), None)


def check_validation_split(name: str, others: Mapping[str, str]) -> None:
    """Raise an error if the split is one of the `others`, `train` and `eval`."""
    for key in (key for key, other in others.items() if other == name):
        raise ValueError(f"--validation_split {name} is also the split of --{key}_split; name another one.")


def find_split(splits: DatasetDict, name: str, option: str, label_column: str | None = None) -> Dataset:
    """Return the rows of a split or part of the data, see `read_split`; errors name the `option` that chooses it."""
    try:
        if len(rows := read_split(splits, name, label_column)) == 0:
            raise ValueError("it is empty")
        return rows
    except (ValueError, AssertionError) as error:  # `datasets` asserts
        problem = f"no split {name!r}; the data has {', '.join(splits)}. Choose one with {option}"
        raise ValueError(f"{problem}: {error}") from error


def as_splits(data: Any) -> DatasetDict:
    """Return the splits of a dataset of `datasets`; streams are read to their end, into its cache."""
    splits = {}
    for name, rows in (data if isinstance(data, dict) else {"train": data}).items():
        rows, features = rows.with_format(None), rows.features  # another format would change images and labels
        if not isinstance(rows, Dataset):
            images = [column for column, feature in (features or {}).items() if isinstance(feature, Image)]
            for column in images:  # decoded, they would be encoded again, and JPEG loses quality
                rows = rows.cast_column(column, Image(decode=False))
            rows = Dataset.from_generator(partial(_encoded_rows, rows, images), features=rows.features)
            rows = rows if features is None else rows.cast(features)
        splits[name] = rows
    return DatasetDict(splits)


def _encoded_rows(rows: IterableDataset, images: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a stream, with the bytes of the files of its image columns, and other images encoded."""
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
    """Return the rows of a split or of a part of the data.

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
    folds = [*splitter.split(torch.arange(count).numpy(), classes, groups)]
    # Random ones: the splitter puts the largest groups of a class into the same fold for every seed.
    chosen = np.random.default_rng(seed).permutation(len(folds))[:num_drawn]
    drawn = np.concatenate([folds[index][1] for index in chosen])
    return torch.zeros(count, dtype=torch.bool).index_fill_(0, torch.as_tensor(drawn), True)


def encoded_images(dataset: Dataset, column: str) -> Dataset:
    """Return the image column of a split, not decoded."""
    if not holds_images(dataset.features[column]):
        how = f"convert paths or pixels with dataset.cast_column({column!r}, datasets.Image())"
        raise ValueError(f"column {column!r} does not contain images but {dataset.features[column]}; {how}.")
    return dataset.select_columns([column]).cast_column(column, Image(decode=False))


def holds_images(feature: Any) -> bool:
    """Whether a column has images, or encoded images that were stored as bytes."""
    stored = feature.get("bytes") if isinstance(feature, dict) else feature
    return isinstance(feature, Image) or stored in (Value("binary"), Value("large_binary"))


def encode_image(image: PILImage.Image) -> dict[str, Any]:
    """Encode an image without loss, upright; `datasets` would compress one from a JPEG file again."""
    from hf_sphere.utils.pixels import turn_upright  # imports torchvision, which texts do not need

    upright = turn_upright(image)
    # A palette's transparency would be lost.
    upright = upright.convert("RGBA") if "transparency" in upright.info else upright.copy()
    return Image().encode_example(upright)


def open_image(record: Any) -> ImageFile.ImageFile:
    """Open an encoded image of `datasets`, as it is stored; PIL raises errors of many classes."""
    encoded, path = record["bytes"], record["path"]
    if encoded is None and "://" in path:  # in a zip file, or remote
        with xopen(path, "rb") as file:
            encoded = file.read()
    if encoded is None:
        check_regular(path)
    image = open_format(path if encoded is None else io.BytesIO(encoded))
    if getattr(image, "is_animated", False) and image.format != "MPO":  # MPO: a photo with its preview
        image.close()
        raise ValueError("it is animated; save one of its frames")
    return image


def file_names(dataset: Dataset, column: str, folder: str | os.PathLike = "") -> list[str]:
    """Return the file of each image of a split, relative to `folder` below it, or an empty list if none is named."""
    tables = encoded_images(dataset, column).with_format("arrow").iter(1000)
    names = [name for table in tables for name in pc.struct_field(table[column], "path").to_pylist()]
    root = os.path.join(os.path.abspath(folder), "") if folder else ""
    return [(name or "").removeprefix(root) for name in names] if any(names) else []
