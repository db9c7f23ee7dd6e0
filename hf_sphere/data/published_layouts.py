"""Image data sets in the folders and lists that they are published as.

ImageNet-200, OmniArt, CUB-200-2011, Stanford Online Products, and sets for few-shot learning.
"""

import contextlib
import csv
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Features, Image, Value

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
FIRST_YEAR, LAST_YEAR = 1000, 1932
"""The years that OmniArt is published to span."""
PRODUCT_COLUMNS = ["image_id", "class_id", "super_class_id", "path"]
"""The first line of both lists of Stanford Online Products."""
CLASS_LISTS = {"train": "train.csv", "validation": "val.csv", "test": "test.csv"}
"""The list of each split of a set for few-shot learning."""


@dataclass(frozen=True)
class Published:
    """Numbers that a data set is published with.

    Attributes:
        classes: Classes in all; None for a layout of many data sets.
        classes_of_a_split: Classes of each split where the splits do not have the same; empty if they do.
        images: Images a split; empty if not known.
        images_of_a_class: Images of each class a split; empty if they differ.
        size: Width and height of every image in pixels; None if they differ.
    """

    classes: int | None
    classes_of_a_split: dict[str, int] = field(default_factory=dict)
    images: dict[str, int] = field(default_factory=dict)
    images_of_a_class: dict[str, int] = field(default_factory=dict)
    size: tuple[int, int] | None = None


PUBLISHED = {
    "imagenet200": Published(200, images_of_a_class={"train": 500, "test": 50}, size=(64, 64)),
    "omniart": Published(46),
    "cub200": Published(200, images={"train": 5994, "test": 5794}),
    "sop": Published(22_634, {"train": 11_318, "test": 11_316}, images={"train": 59_551, "test": 60_502}),
    "class_split": Published(None),
}


@dataclass(frozen=True)
class Row:
    """One image: where it is, and its other columns."""

    path: Path
    values: dict[str, Any]


class Reader:
    """Reads a data set's rows and keeps account of those that are left out.

    Args:
        source: Folder of the data as published.
        skip_missing: Whether to leave out rows that cannot be used, instead of raising.
    """

    def __init__(self, source: Path, *, skip_missing: bool) -> None:
        self.source = source
        self.skip_missing = skip_missing
        self.left_out: Counter[str] = Counter()

    def leave_out(self, split: str, why: str, bad: Sequence[Any], total: int) -> None:
        """Count rows that cannot be used, or raise."""
        if bad and not self.skip_missing:
            raise ValueError(
                f"{len(bad):,} of {total:,} rows of the {split} split {why}; the first: {bad[0]}. Complete the data, "
                "or leave such rows out with --skip_missing."
            )
        self.left_out[f"rows of the {split} split that {why}"] += len(bad)

    def present(self, rows: list[Row], split: str) -> list[Row]:
        """Return the rows whose image file is there."""
        found = {folder: _names_in(folder) for folder in {row.path.parent for row in rows}}
        missing = [row.path for row in rows if row.path.name not in found[row.path.parent]]
        self.leave_out(split, "have no image file", missing, len(rows))
        gone = set(missing)
        kept = [row for row in rows if row.path not in gone]
        if not kept:
            raise ValueError(f"found no image of the {split} split in {self.source}; {_contents(self.source)}.")
        return kept

    def lines(self, name: str, separator: str | None, columns: int) -> list[list[str]]:
        """Read the first columns of a text file."""
        found = []
        for number, line in enumerate(self.find(name).read_text(encoding="utf-8-sig").splitlines(), 1):
            cells = line.split(separator, -1 if separator else columns - 1)
            if line.strip() and len(cells) < columns:
                raise ValueError(f"line {number} of {self.source / name} must have {columns} columns; got {line!r}.")
            if line.strip():
                found.append([cell.strip() for cell in cells[:columns]])
        return found

    def find(self, name: str) -> Path:
        """Return a file of the data, or say what there is in its place."""
        path = self.source / name
        if not path.is_file():
            raise ValueError(f"{path} is not there; {_contents(path.parent)}. Is --source the folder it should be?")
        return path


Splits = dict[str, list[Row]]


def read_imagenet200(reader: Reader) -> tuple[Splits, Features]:
    """Read folders of classes; those of Tiny ImageNet have their validation images in one folder and a list."""
    found = {"train": _by_class(reader.source / "train")}
    if (reader.source / "val" / "val_annotations.txt").is_file():
        folder = reader.source / "val" / "images"
        listed = reader.lines("val/val_annotations.txt", "\t", 2)
        found["test"] = [(folder / file, name) for file, name in listed]
    else:
        found["test"] = _by_class(reader.source / "test")
    names = sorted({name for _, name in found["train"]})
    splits = {
        split: reader.present([Row(path, {"label": name}) for path, name in files], split)
        for split, files in found.items()
    }
    tested = {name for _, name in found["test"]}
    if tested != set(names):
        alone = sorted(tested ^ set(names))
        raise ValueError(
            f"the classes of the test split must be those of the training split; {len(alone)} are in one only: "
            f"{', '.join(alone[:5])}{' ...' if len(alone) > 5 else ''}."
        )
    return _numbered(splits, names), Features({"image": Image(), "label": ClassLabel(names=names)})


def read_omniart(reader: Reader) -> tuple[Splits, Features]:
    """Read OmniArt's tables; the classes are the schools of the training images."""
    splits = {split: reader.present(_read_artworks(reader, split), split) for split in ("train", "test")}
    names = sorted({row.values["label"] for row in splits["train"]})
    unknown = [row for row in splits["test"] if row.values["label"] not in names]
    shown = [f"{row.path.name} of {row.values['label']!r}" for row in unknown]
    reader.leave_out("test", "are of schools that no training image has", shown, len(splits["test"]))
    splits = _numbered(splits, names)
    for split, rows in splits.items():
        years = [row.values["year"] for row in rows]
        odd = [year for year in years if not FIRST_YEAR <= year <= LAST_YEAR]
        if odd:
            print(
                f"{split}: {len(odd):,} of {len(years):,} years lie outside {FIRST_YEAR} to {LAST_YEAR}, from "
                f"{min(odd):g} to {max(odd):g}; they are kept."
            )
    return splits, Features({"image": Image(), "label": ClassLabel(names=names), "year": Value("float32")})


def _numbered(splits: Splits, names: list[str], column: str = "label") -> Splits:
    """Put the index of its class in the place of its name; rows of other classes are left out."""
    index = {name: i for i, name in enumerate(names)}
    return {
        split: [
            Row(row.path, row.values | {column: index[row.values[column]]})
            for row in rows
            if row.values[column] in index
        ]
        for split, rows in splits.items()
    }


def _read_artworks(reader: Reader, split: str) -> list[Row]:
    path = reader.find(f"{split}_complete.csv")
    rows, bad = [], []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file)
            have = list(table.fieldnames or [])
            lacking = [column for column in ("omni_id", "creation_year", "school") if column not in have]
            if lacking:
                raise ValueError(f"{path} lacks the columns {lacking}; it has {have}.")
            for record in table:
                artwork, school, year = (record[name] or "" for name in ("omni_id", "school", "creation_year"))
                values = {"label": school.strip(), "year": _number(year)}
                if artwork.strip() and values["label"] and values["year"] is not None:
                    rows.append(Row(reader.source / split / f"{artwork.strip()}.jpg", values))
                else:
                    bad.append(f"line {table.line_num} of {path.name}")
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no readable table: {error}.") from error
    reader.leave_out(split, "have no identifier, school or year", bad, len(rows) + len(bad))
    return rows


def read_cub200(reader: Reader) -> tuple[Splits, Features]:
    """Read the four lists of Caltech-UCSD Birds 200-2011."""
    files, classes, parts, names = (
        dict(reader.lines(f"{name}.txt", None, 2))
        for name in ("images", "image_class_labels", "train_test_split", "classes")
    )
    for name, listed in (("image_class_labels", classes), ("train_test_split", parts)):
        if listed.keys() != files.keys():
            alone = sorted(listed.keys() ^ files.keys())
            raise ValueError(f"images.txt and {name}.txt must list the same images; {alone[0]} is in one of them only.")
    if not set(classes.values()) <= names.keys():
        raise ValueError(f"classes.txt lacks class {min(set(classes.values()) - names.keys())}.")
    if not set(parts.values()) <= {"0", "1"}:
        raise ValueError(f"train_test_split.txt must hold 1 (training) or 0; got {max(set(parts.values()))!r}.")
    index = {number: i for i, number in enumerate(names)}
    splits: Splits = {"train": [], "test": []}
    for image, file in files.items():
        row = Row(reader.source / "images" / file, {"label": index[classes[image]]})
        splits["train" if parts[image] == "1" else "test"].append(row)
    splits = {split: reader.present(rows, split) for split, rows in splits.items()}
    # "001.Black_footed_Albatross" is the Black footed Albatross.
    birds = [name.split(".", 1)[-1].replace("_", " ") for name in names.values()]
    return splits, Features({"image": Image(), "label": ClassLabel(names=birds)})


def read_sop(reader: Reader) -> tuple[Splits, Features]:
    """Read the two lists of Stanford Online Products, an open set: its test images are of other classes.

    Classes stay the numbers that they are published as. They have no names, and a `ClassLabel` of all of them would say
    in every file, and to every classifier, that each split has each class.
    """
    listed = {split: _read_products(reader, f"Ebay_{split}.txt") for split in ("train", "test")}
    trained, tested = ({row.values["label"] for row in rows} for rows in listed.values())
    if trained & tested:
        raise ValueError(
            f"the classes of Ebay_test.txt must not be those of Ebay_train.txt; {len(trained & tested):,} are in both, "
            f"the first: {min(trained & tested)}. Restore the lists as they are published."
        )
    names = sorted({row.values["super_class"] for rows in listed.values() for row in rows})
    splits = {split: reader.present(rows, split) for split, rows in listed.items()}
    features = Features({"image": Image(), "label": Value("int64"), "super_class": ClassLabel(names=names)})
    return _numbered(splits, names, "super_class"), features


def _read_products(reader: Reader, name: str) -> list[Row]:
    lines = reader.lines(name, None, len(PRODUCT_COLUMNS))
    if lines[:1] != [PRODUCT_COLUMNS]:
        first = f"got {' '.join(lines[0])!r}" if lines else "it is empty"
        raise ValueError(f"{name} must begin with the line {' '.join(PRODUCT_COLUMNS)!r}; {first}.")
    rows = []
    for cells in lines[1:]:
        _, number, _, file = cells
        folder, slash, _ = file.partition("/")
        if not number.isdecimal() or not slash:
            raise ValueError(
                f"a row of {name} must have the number of a class second, and the path of an image in the folder of "
                f"its super class last; got {' '.join(cells)!r}."
            )
        # "coffee_maker_final" is the folder of coffee_maker.
        values = {"label": int(number), "super_class": folder.removesuffix("_final")}
        rows.append(Row(reader.source / file, values))
    return rows


def read_class_split(reader: Reader) -> tuple[Splits, Features]:
    """Read three lists of images whose classes differ, as sets for few-shot learning are distributed.

    Classes stay names and become no `ClassLabel`, which would say that each split has each class.
    """
    folder = "split/" if (reader.source / "split").is_dir() else ""
    listed = {split: _read_list(reader, folder + name) for split, name in CLASS_LISTS.items()}
    classes = {split: {row.values["label"] for row in rows} for split, rows in listed.items()}
    for one, other in itertools.combinations(classes, 2):
        if shared := sorted(classes[one] & classes[other]):
            raise ValueError(
                f"the classes of {CLASS_LISTS[one]} must not be those of {CLASS_LISTS[other]}; {len(shared):,} are in "
                f"both: {', '.join(shared[:5])}{' ...' if len(shared) > 5 else ''}. Take the lists of a split by "
                "classes, as few-shot learning needs it."
            )
    splits = {split: reader.present(rows, split) for split, rows in listed.items()}
    return splits, Features({"image": Image(), "label": Value("string")})


def _read_list(reader: Reader, name: str) -> list[Row]:
    lines = reader.lines(name, ",", 2)
    if lines[:1] != [["filename", "label"]]:
        first = f"got {','.join(lines[0])!r}" if lines else "it is empty"
        raise ValueError(f"{name} must begin with the line 'filename,label'; {first}.")
    empty = [cells for cells in lines if not all(cells)]
    if empty:
        raise ValueError(f"a row of {name} must have a file and its class; got {','.join(empty[0])!r}.")
    return [Row(reader.source / "images" / file, {"label": label}) for file, label in lines[1:]]


READERS: dict[str, Callable[[Reader], tuple[Splits, Features]]] = {
    "imagenet200": read_imagenet200,
    "omniart": read_omniart,
    "cub200": read_cub200,
    "sop": read_sop,
    "class_split": read_class_split,
}


def _by_class(folder: Path) -> list[tuple[Path, str]]:
    """List the images in the folders of classes, in order, with the class of each."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not there; {_contents(folder.parent)}. Is --source the folder it should be?")
    found = []
    for class_folder in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        inner = class_folder / "images"  # as in Tiny ImageNet
        place = inner if inner.is_dir() else class_folder
        files = sorted(name for name in _names_in(place) if not name.startswith("."))
        found += [(place / name, class_folder.name) for name in files if name.lower().endswith(IMAGE_SUFFIXES)]
    return found


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _contents(folder: Path) -> str:
    names = sorted(_names_in(folder))
    if not names:
        return f"{folder} is empty" if folder.is_dir() else f"{folder} is not there either"
    return f"{folder} holds {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}"


def _number(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        value = float(text)
        return value if math.isfinite(value) else None
    return None
