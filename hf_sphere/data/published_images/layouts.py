"""Readers of image datasets in their published layouts of folders and lists.

ImageNet-200, OmniArt, CUB-200-2011, Stanford Online Products, and few-shot datasets split by class.
"""

import csv
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from datasets import ClassLabel, Features, Image, Value

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
FIRST_YEAR, LAST_YEAR = 1000, 1932
"""The years that OmniArt spans, as published."""
CLASS_LISTS = {"train": "train.csv", "validation": "val.csv", "test": "test.csv"}
"""File name of the list of each split of a few-shot dataset."""


@dataclass(frozen=True)
class Published:
    """Published numbers of a dataset; unknown and varying ones are left out."""

    classes: int | None = None  # of all splits together
    classes_of_a_split: dict[str, int] = field(default_factory=dict)  # where the splits have different classes
    images: dict[str, int] = field(default_factory=dict)  # by split
    images_of_a_class: dict[str, int] = field(default_factory=dict)  # by split
    size: tuple[int, int] | None = None  # width and height of every image in pixels


PUBLISHED = {
    "imagenet200": Published(200, images_of_a_class={"train": 500, "test": 50}, size=(64, 64)),
    "omniart": Published(46),
    "cub200": Published(200, images={"train": 5994, "test": 5794}),
    "sop": Published(22_634, {"train": 11_318, "test": 11_316}, images={"train": 59_551, "test": 60_502}),
    "class_split": Published(),
}


class Row(NamedTuple):
    """One image: its path, and the values of its other columns."""

    path: Path
    values: dict[str, Any]


Splits = dict[str, list[Row]]


@dataclass
class Reader:
    """Reads the rows of a dataset, in its folder as published, and counts those that are skipped on request."""

    source: Path
    skip_missing: bool
    left_out: Counter[str] = field(default_factory=Counter)

    def leave_out(self, split: str, why: str, bad: Sequence[Any], total: int) -> None:
        """Count unusable rows, or raise an error."""
        if bad and not self.skip_missing:
            raise ValueError(
                f"{len(bad):,} of {total:,} rows of the {split} split {why}; the first: {bad[0]}. Complete the data, "
                "or leave such rows out with --skip_missing."
            )
        self.left_out[f"rows of the {split} split that {why}"] += len(bad)

    def present(self, rows: Iterable[Row], split: str) -> list[Row]:
        """Return the rows whose image file exists."""
        rows = list(rows)
        existing = {folder: _names_in(folder) for folder in {row.path.parent for row in rows}}
        kept = [row for row in rows if row.path.name in existing[row.path.parent]]
        missing = [row.path for row in rows if row.path.name not in existing[row.path.parent]]
        self.leave_out(split, "have no image file", missing, len(rows))
        if not kept:
            raise ValueError(f"found no image of the {split} split in {self.source}; {_contents(self.source)}.")
        return kept

    def lines(self, name: str, columns: int, separator: str | None = None, header: str = "") -> list[list[str]]:
        """Read the first columns of a text file; if `header` is set, it must be the first line, and is not returned."""
        rows = []
        for number, line in enumerate(self.find(name).read_text(encoding="utf-8-sig").splitlines(), 1):
            cells = line.split(separator, -1 if separator else columns - 1)
            if line.strip() and len(cells) < columns:
                raise ValueError(f"line {number} of {self.source / name} must have {columns} columns; got {line!r}.")
            if line.strip():
                rows.append([cell.strip() for cell in cells[:columns]])
        if not header:
            return rows
        first = (separator or " ").join(rows[0]) if rows else ""
        if first != header:
            got = f"got {first!r}" if first else "it is empty"
            raise ValueError(f"{name} must begin with the line {header!r}; {got}.")
        return rows[1:]

    def find(self, name: str) -> Path:
        """Return the path of a file, which must exist."""
        path = self.source / name
        if not path.is_file():
            raise ValueError(f"{path} does not exist; {_contents(path.parent)}. Is --source the right folder?")
        return path


def read_imagenet200(reader: Reader) -> tuple[Splits, Features]:
    """Read a folder per class; the validation images of Tiny ImageNet are in one folder, with a list.

    Classes have the names of `words.txt` if it exists, but the order of their folders.
    """
    rows_of_splits = {"train": _rows_by_class(reader.source / "train")}
    if (reader.source / "val" / "val_annotations.txt").is_file():
        folder = reader.source / "val" / "images"
        listed = reader.lines("val/val_annotations.txt", 2, "\t")
        rows_of_splits["test"] = [Row(folder / file, {"label": name}) for file, name in listed]
    else:
        rows_of_splits["test"] = _rows_by_class(reader.source / "test")
    trained, tested = ({row.values["label"] for row in rows} for rows in rows_of_splits.values())
    splits = {split: reader.present(rows, split) for split, rows in rows_of_splits.items()}
    if alone := sorted(trained ^ tested):
        raise ValueError(f"the training and the test split must have the same classes; not in both: {_shorten(alone)}.")
    folders = sorted(trained)
    words = dict(reader.lines("words.txt", 2, "\t")) if (reader.source / "words.txt").is_file() else {}
    names = [words.get(folder, folder) for folder in folders]
    return _numbered(splits, folders), Features({"image": Image(), "label": ClassLabel(names=names)})


def read_omniart(reader: Reader) -> tuple[Splits, Features]:
    """Read the tables of OmniArt; the classes are the schools of the training images."""
    splits = {split: reader.present(_read_artworks(reader, split), split) for split in ("train", "test")}
    names = sorted({row.values["label"] for row in splits["train"]})
    unknown = [f"{path.name} of {row['label']!r}" for path, row in splits["test"] if row["label"] not in names]
    reader.leave_out("test", "are of schools that no training image has", unknown, len(splits["test"]))
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


def _read_artworks(reader: Reader, split: str) -> list[Row]:
    path = reader.find(f"{split}_complete.csv")
    rows, bad = [], []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file)
            columns = list(table.fieldnames or [])
            lacking = [column for column in ("omni_id", "creation_year", "school") if column not in columns]
            if lacking:
                raise ValueError(f"{path} lacks the columns {lacking}; it has {columns}.")
            for record in table:
                artwork, school = (record["omni_id"] or "").strip(), (record["school"] or "").strip()
                year = _number(record["creation_year"] or "")
                if artwork and school and math.isfinite(year):
                    values = {"label": school, "year": year}
                    rows.append(Row(reader.source / split / f"{artwork}.jpg", values))
                else:
                    bad.append(f"line {table.line_num} of {path.name}")
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a readable table: {error}.") from error
    reader.leave_out(split, "have no identifier, school or year", bad, len(rows) + len(bad))
    return rows


def read_cub200(reader: Reader) -> tuple[Splits, Features]:
    """Read the four lists of Caltech-UCSD Birds 200-2011."""
    files, classes, marks, names = (
        dict(reader.lines(f"{name}.txt", 2)) for name in ("images", "image_class_labels", "train_test_split", "classes")
    )
    for name, listed in (("image_class_labels", classes), ("train_test_split", marks)):
        if alone := sorted(listed.keys() ^ files.keys()):
            raise ValueError(f"images.txt and {name}.txt must list the same images; {alone[0]} is in one of them only.")
    if unnamed := set(classes.values()) - names.keys():
        raise ValueError(f"classes.txt lacks class {min(unnamed)}.")
    if not set(marks.values()) <= {"0", "1"}:
        raise ValueError(f"train_test_split.txt must contain only 1 (training) or 0; got {max(set(marks.values()))!r}.")
    index = {class_id: i for i, class_id in enumerate(names)}
    splits: Splits = {"train": [], "test": []}
    for image, file in files.items():
        row = Row(reader.source / "images" / file, {"label": index[classes[image]]})
        splits["train" if marks[image] == "1" else "test"].append(row)
    splits = {split: reader.present(rows, split) for split, rows in splits.items()}
    # "001.Black_footed_Albatross" is the Black footed Albatross.
    birds = [name.split(".", 1)[-1].replace("_", " ") for name in names.values()]
    return splits, Features({"image": Image(), "label": ClassLabel(names=birds)})


def read_sop(reader: Reader) -> tuple[Splits, Features]:
    """Read the two lists of Stanford Online Products, an open set: its test classes differ from its training classes.

    Labels are the published class numbers; with a `ClassLabel` of all classes, every split would have all of them.
    """
    lists = {split: f"Ebay_{split}.txt" for split in ("train", "test")}
    splits = _read_disjoint(reader, lists, _read_products)
    names = sorted({row.values["super_class"] for rows in splits.values() for row in rows})
    splits = {split: reader.present(rows, split) for split, rows in splits.items()}
    features = Features({"image": Image(), "label": Value("int64"), "super_class": ClassLabel(names=names)})
    return _numbered(splits, names, "super_class"), features


def _read_products(reader: Reader, name: str) -> list[Row]:
    rows = []
    for cells in reader.lines(name, 4, header="image_id class_id super_class_id path"):
        _, class_id, _, file = cells
        folder, slash, _ = file.partition("/")
        if not class_id.isdecimal() or not slash:
            raise ValueError(
                f"a row of {name} must have the number of a class second, and the path of an image in the folder of "
                f"its super class last; got {' '.join(cells)!r}."
            )
        # "coffee_maker_final" is the folder of coffee_maker.
        values = {"label": int(class_id), "super_class": folder.removesuffix("_final")}
        rows.append(Row(reader.source / file, values))
    return rows


def read_class_split(reader: Reader) -> tuple[Splits, Features]:
    """Read three lists of images with disjoint classes, the usual layout of few-shot datasets.

    Classes are stored as names: with a `ClassLabel` every split would have all classes.
    """
    folder = "split/" if (reader.source / "split").is_dir() else ""
    lists = {split: folder + name for split, name in CLASS_LISTS.items()}
    splits = _read_disjoint(reader, lists, _read_class_list)
    splits = {split: reader.present(rows, split) for split, rows in splits.items()}
    return splits, Features({"image": Image(), "label": Value("string")})


def _read_class_list(reader: Reader, name: str) -> list[Row]:
    lines = reader.lines(name, 2, ",", header="filename,label")
    empty = [cells for cells in lines if not all(cells)]
    if empty:
        raise ValueError(f"a row of {name} must have a file and its class; got {','.join(empty[0])!r}.")
    return [Row(reader.source / "images" / file, {"label": label}) for file, label in lines]


def _read_disjoint(reader: Reader, lists: dict[str, str], read: Callable[[Reader, str], list[Row]]) -> Splits:
    """Read the list of each split; no class may be in two of them."""
    splits = {split: read(reader, name) for split, name in lists.items()}
    classes = {lists[split]: {row.values["label"] for row in rows} for split, rows in splits.items()}
    for one, other in itertools.combinations(classes, 2):
        if shared := sorted(classes[one] & classes[other]):
            raise ValueError(
                f"the classes of {one} and {other} must be disjoint; {len(shared):,} are in both: {_shorten(shared)}. "
                "Use lists that split the data by class."
            )
    return splits


READERS: dict[str, Callable[[Reader], tuple[Splits, Features]]] = {
    "imagenet200": read_imagenet200,
    "omniart": read_omniart,
    "cub200": read_cub200,
    "sop": read_sop,
    "class_split": read_class_split,
}


def _rows_by_class(folder: Path) -> list[Row]:
    """List the images in the folder of each class, in order."""
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist; {_contents(folder.parent)}. Is --source the right folder?")
    rows = []
    for class_folder in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        inner = class_folder / "images"  # as in Tiny ImageNet
        image_folder = inner if inner.is_dir() else class_folder
        names = sorted(name for name in _names_in(image_folder) if name.lower().endswith(IMAGE_SUFFIXES))
        rows += [Row(image_folder / name, {"label": class_folder.name}) for name in names if not name.startswith(".")]
    return rows


def _numbered(splits: Splits, names: list[str], column: str = "label") -> Splits:
    """Replace the name of each row's class by its index, and drop rows of other classes."""
    index = {name: i for i, name in enumerate(names)}
    return {
        split: [Row(path, row | {column: index[row[column]]}) for path, row in rows if row[column] in index]
        for split, rows in splits.items()
    }


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _contents(folder: Path) -> str:
    names = sorted(_names_in(folder))
    if not names:
        return f"{folder} is empty" if folder.is_dir() else f"{folder} does not exist either"
    return f"{folder} contains {_shorten(names, 6)}"


def _shorten(items: Sequence[Any], count: int = 5) -> str:
    return ", ".join(str(item) for item in items[:count]) + (" ..." if len(items) > count else "")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
