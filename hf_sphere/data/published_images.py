"""Convert image datasets in their published layouts of folders and lists to parquet files.

ImageNet-200, OmniArt, CUB-200-2011, Stanford Online Products, and few-shot datasets split by class.
"""

import csv
import io
import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from datasets import ClassLabel, Features, Image, Value

from hf_sphere.data.parquet import ParquetSplit
from hf_sphere.utils.checks import check_regular
from hf_sphere.utils.files import atomic_folder, list_folder
from hf_sphere.utils.image_formats import open_format
from hf_sphere.utils.progress import progress_bar
from hf_sphere.utils.texts import damage

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
YEARS = (1000, 1932)
"""First and last year of OmniArt, as published."""
AS_IT_IS = "Complete the data, or pass --expect_counts false to prepare it as it is"


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


@dataclass
class Source:
    """A folder of data as published, and the counts of what is left out of it on request."""

    folder: Path
    skip_missing: bool
    left_out: Counter[str] = field(default_factory=Counter)

    def keep(self, rows: pd.DataFrame, is_good: pd.Series, why: str, column: str = "path") -> pd.DataFrame:
        """Return the good rows; others are counted, or an error that names the first by a column."""
        for split, bad in rows[~is_good].groupby("split", sort=False):
            if not self.skip_missing:
                total, first = (rows["split"] == split).sum(), bad[column].iloc[0]
                what = f"{len(bad):,} of {total:,} rows of the {split} split {why}; the first: {first}"
                raise ValueError(f"{what}. Complete the data, or leave them out with --skip_missing.")
            self.left_out[f"rows of the {split} split that {why}"] += len(bad)
        return rows[is_good]

    def present(self, rows: pd.DataFrame, splits: Sequence[str]) -> pd.DataFrame:
        """Return the rows whose image file exists; each split must have some."""
        rows = self.keep(rows, rows["path"].map(os.path.isfile).astype(bool), "have no image file")
        if missing := [split for split in splits if split not in set(rows["split"])]:
            raise ValueError(f"found no image of the {missing[0]} split in {self.folder}; is it the right folder?")
        return rows

    def table(
        self, name: str, columns: Sequence[str], separator: str = r"\s+", *, is_full: bool = True, **options: Any
    ) -> pd.DataFrame:
        """Read columns of a list as texts: the first ones, or with `header=0` those of these names.

        If it `is_full`, no cell may be empty.
        """
        path, options = self.folder / name, {"header": None, "quoting": csv.QUOTE_NONE} | options
        check_regular(path)
        try:
            table = pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False, encoding="utf-8-sig", **options)
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{path} is not a readable table: {error}.") from error
        if options["header"] is None:
            table = table.iloc[:, : len(columns)].set_axis(columns[: table.shape[1]], axis=1).reindex(columns=columns)
        elif lacking := [column for column in columns if column not in table]:
            raise ValueError(f"{path} lacks the columns {lacking}; its first line has {[*table]}.")
        table = table[[*columns]].fillna("").apply(lambda cells: cells.str.strip())
        if is_full and (short := (table == "").any(axis=1)).any():
            raise ValueError(f"each row of {name} must have {', '.join(columns)}; got {list(table[short].iloc[0])}.")
        return table


def read_imagenet200(source: Source) -> tuple[pd.DataFrame, Features]:
    """Read a folder per class; the validation images of Tiny ImageNet are in one folder, with a list.

    Classes have the names of `words.txt` if it exists, but the order of their folders.
    """
    train, folder = _rows_by_class(source.folder / "train", "train"), source.folder / "val"
    if (folder / "val_annotations.txt").is_file():
        listed = source.table("val/val_annotations.txt", ("file", "label"), "\t")
        paths = [folder / "images" / file for file in listed["file"]]
        test = pd.DataFrame({"split": "test", "path": paths, "label": listed["label"]})
    else:
        test = _rows_by_class(source.folder / "test", "test")
    rows = source.present(pd.concat([train, test], ignore_index=True), ("train", "test"))
    if alone := sorted({*train["label"]} ^ {*test["label"]}):
        raise ValueError(f"the training and the test split must have the same classes; not in both: {_shorten(alone)}.")
    folders, words = sorted({*train["label"]}), {}
    if (source.folder / "words.txt").is_file():
        words = dict(source.table("words.txt", ("folder", "name"), "\t").itertuples(index=False))
    names = [words.get(name, name) for name in folders]
    return _numbered(rows, folders), Features({"image": Image(), "label": ClassLabel(names=names)})


def read_omniart(source: Source) -> tuple[pd.DataFrame, Features]:
    """Read the tables of OmniArt; the classes are the schools of the training images."""
    parts = []
    for split in ("train", "test"):
        name, columns = f"{split}_complete.csv", ("omni_id", "creation_year", "school")
        table = source.table(name, columns, ",", is_full=False, header=0, quoting=csv.QUOTE_MINIMAL)
        rows = pd.DataFrame({"split": split, "label": table["school"]})
        rows["path"] = [source.folder / split / f"{identifier}.jpg" for identifier in table["omni_id"]]
        rows["year"] = pd.to_numeric(table["creation_year"], errors="coerce")
        rows["line"] = [f"line {number} of {name}" for number in range(2, len(table) + 2)]
        is_good = (table["omni_id"] != "") & (table["school"] != "") & np.isfinite(rows["year"])
        parts.append(source.keep(rows, is_good, "have no identifier, school or year", "line"))
    rows = source.present(pd.concat(parts, ignore_index=True), ("train", "test"))
    names = sorted({*rows.loc[rows["split"] == "train", "label"]})
    rows["school"] = [f"{path.name} of {school!r}" for path, school in zip(rows["path"], rows["label"], strict=True)]
    rows = source.keep(rows, rows["label"].isin(names), "are of schools that no training image has", "school")
    for split, years in rows.groupby("split", sort=False)["year"]:
        if len(odd := years[~years.between(*YEARS)]):
            span = f"from {odd.min():g} to {odd.max():g}; they are kept"
            print(f"{split}: {len(odd):,} of {len(years):,} years lie outside {YEARS[0]} to {YEARS[1]}, {span}.")
    features = {"image": Image(), "label": ClassLabel(names=names), "year": Value("float32")}
    return _numbered(rows, names), Features(features)


def read_cub200(source: Source) -> tuple[pd.DataFrame, Features]:
    """Read the four lists of Caltech-UCSD Birds 200-2011."""
    lists = ("images", "image_class_labels", "train_test_split", "classes")
    files, classes, marks, names = (source.table(f"{name}.txt", ("id", name)).set_index("id")[name] for name in lists)
    for listed in (classes, marks):
        if len(alone := listed.index.symmetric_difference(files.index)):
            text = f"images.txt and {listed.name}.txt must list the same images"
            raise ValueError(f"{text}; {alone[0]} is in one of them only.")
    if unnamed := {*classes} - {*names.index}:
        raise ValueError(f"classes.txt lacks class {min(unnamed)}.")
    if not {*marks} <= {"0", "1"}:
        raise ValueError(f"train_test_split.txt must contain only 1 (training) or 0; got {max({*marks})!r}.")
    rows = pd.DataFrame({"split": marks.reindex(files.index).map({"1": "train", "0": "test"}).array})
    rows["path"] = [source.folder / "images" / file for file in files]
    rows["label"] = names.index.get_indexer(classes.reindex(files.index))
    # "001.Black_footed_Albatross" is the Black footed Albatross.
    birds = [name.split(".", 1)[-1].replace("_", " ") for name in names]
    features = Features({"image": Image(), "label": ClassLabel(names=birds)})
    return source.present(rows, ("train", "test")), features


def read_sop(source: Source) -> tuple[pd.DataFrame, Features]:
    """Read the two lists of Stanford Online Products, an open set: its test classes differ from its training classes.

    Labels are the published class numbers; with a `ClassLabel` of all classes, every split would have all of them.
    """
    columns = ("image_id", "class_id", "super_class_id", "path")
    lists = {split: source.table(f"Ebay_{split}.txt", columns, header=0) for split in ("train", "test")}
    rows = pd.concat([table.assign(split=split) for split, table in lists.items()], ignore_index=True)
    is_good = rows["class_id"].str.fullmatch(r"\d+") & rows["path"].str.contains("/")
    if not is_good.all():
        bad = rows[~is_good].iloc[0]
        need = "the number of a class second, and the path of an image in the folder of its super class last"
        raise ValueError(f"a row of Ebay_{bad['split']}.txt must have {need}; got {' '.join(bad[[*columns]])!r}.")
    # "coffee_maker_final" is the folder of coffee_maker.
    rows["super_class"] = rows["path"].str.partition("/")[0].str.removesuffix("_final")
    names = sorted({*rows["super_class"]})
    rows["label"] = rows["class_id"].astype(int)
    rows["path"] = [source.folder / path for path in rows["path"]]
    _check_disjoint(rows, {split: f"Ebay_{split}.txt" for split in lists})
    features = Features({"image": Image(), "label": Value("int64"), "super_class": ClassLabel(names=names)})
    return _numbered(source.present(rows, [*lists]), names, "super_class"), features


def read_class_split(source: Source) -> tuple[pd.DataFrame, Features]:
    """Read three lists of images with disjoint classes, the usual layout of few-shot datasets.

    Classes are stored as names: with a `ClassLabel` every split would have all classes.
    """
    folder = "split/" if (source.folder / "split").is_dir() else ""
    files = {"train": f"{folder}train.csv", "validation": f"{folder}val.csv", "test": f"{folder}test.csv"}
    columns = ("filename", "label")
    tables = {split: source.table(name, columns, ",", header=0) for split, name in files.items()}
    rows = pd.concat([table.assign(split=split) for split, table in tables.items()], ignore_index=True)
    rows["path"] = [source.folder / "images" / file for file in rows["filename"]]
    _check_disjoint(rows, files)
    return source.present(rows, [*files]), Features({"image": Image(), "label": Value("string")})


READERS: dict[str, Callable[[Source], tuple[pd.DataFrame, Features]]] = {
    "imagenet200": read_imagenet200,
    "omniart": read_omniart,
    "cub200": read_cub200,
    "sop": read_sop,
    "class_split": read_class_split,
}


def prepare_images(args: Any) -> None:
    """Convert a dataset and print a summary. Image files are stored unchanged, and writing is atomic.

    `args` are the `PrepareArguments` of `hf-sphere prepare`.
    """
    folder, output = Path(args.source), Path(args.output)
    if not folder.is_dir():
        raise ValueError(f"--source {folder} is not a folder.")
    _check_output(output, folder, args.overwrite_output_dir)
    source = Source(folder, skip_missing=args.skip_missing)
    rows, features = READERS[args.kind](source)
    for text in _count_differences(args, rows, features):
        print(f"Warning: {text}.")
    with atomic_folder(output) as unfinished:
        parts = [
            _write_split(unfinished, part, features, source, args) for _, part in rows.groupby("split", sort=False)
        ]
        _count_differences(args, pd.concat(parts), features)  # without the unreadable images
    print(f"{'split':<11}{'images':>10}{'classes':>10}{'size':>12}")
    for part in parts:
        split = part["split"].iloc[0]
        size = sum(path.stat().st_size for path in output.glob(f"{split}-*.parquet"))
        print(f"{split:<11}{len(part):>10,}{part['label'].nunique():>10,}{size / 1e6:>9,.1f} MB")
    for what, count in source.left_out.items():
        print(f"Left out: {count:,} {what}.")


def _check_output(output: Path, source: Path, overwrite: bool) -> None:
    if source.resolve().is_relative_to(output.resolve()):
        raise ValueError(f"--output {output} contains --source {source}; choose another folder to write to.")
    if not output.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{output} already exists; choose another --output or pass --overwrite_output_dir.")
    other = [path for path in list_folder(output) if path.suffix != ".parquet"] if output.is_dir() else [output]
    if other:
        raise FileExistsError(f"{output} is not replaced: {other[0]} is not prepared data. Choose another --output.")


def _count_differences(args: Any, rows: pd.DataFrame, features: Features) -> list[str]:
    """Return how the numbers of classes and images differ from the published ones, an error with `expect_counts`."""
    published, counts = PUBLISHED[args.kind], [("classes", PUBLISHED[args.kind].classes, rows["label"].nunique())]
    images = {split: part["label"].value_counts() for split, part in rows.groupby("split", sort=False)}
    for split, of_class in images.items():
        counts.append((f"{split} classes", published.classes_of_a_split.get(split), len(of_class)))
        counts.append((f"{split} images", published.images.get(split), int(of_class.sum())))
    wrong = [f"{want:,} {what} expected, {got:,} found" for what, want, got in counts if want not in (None, got)]
    for split, each in published.images_of_a_class.items():
        found = [(name, images[split].get(number, 0)) for number, name in enumerate(features["label"].names)]
        if other := [f"{count} of {name}" for name, count in found if count != each]:
            more = f" and others of {len(other) - 1} further classes" if len(other) > 1 else ""
            wrong.append(f"{each} {split} images of each class expected, {other[0]}{more} found")
    if wrong and args.expect_counts:
        raise ValueError(f"these are not {args.kind} as published: {'; '.join(wrong)}. {AS_IT_IS}.")
    return wrong


def _write_split(folder: Path, rows: pd.DataFrame, features: Features, source: Source, args: Any) -> pd.DataFrame:
    """Write a split and return the rows that are readable."""
    split, expected, is_readable, odd = rows["split"].iloc[0], PUBLISHED[args.kind].size, [], 0
    records = rows[[column for column in features if column != "image"]].to_dict("records")
    with (
        ParquetSplit(folder, split, features) as parquet,
        progress_bar(records, split, unit="image", disable=args.disable_tqdm) as bar,
    ):
        for path, values in zip(rows["path"], bar, strict=True):
            check_regular(path)
            encoded = path.read_bytes()
            try:
                with open_format(io.BytesIO(encoded)) as image:
                    size = image.size
            except Exception as error:  # of PIL and its plugins, of many classes
                is_readable.append(False)
                text = pd.DataFrame({"split": [split], "path": [f"{path} ({damage(error)})"]})
                source.keep(text, pd.Series([False]), "have an unreadable image")
                continue
            is_readable.append(True)
            if expected not in (None, size):
                odd += 1
                if args.expect_counts:
                    want, got = (" x ".join(map(str, each)) for each in (expected, size))
                    raise ValueError(f"images of {want} pixels expected, {path} has {got}. {AS_IT_IS}.")
            parquet.add({"image": {"bytes": encoded, "path": path.name}} | values, len(encoded))
    if not any(is_readable):
        raise ValueError(f"no image of the {split} split can be used.")
    if odd:
        print(f"Warning: {odd:,} {split} images are not of size {expected}.")
    return rows[is_readable]


def _check_disjoint(rows: pd.DataFrame, files: dict[str, str]) -> None:
    """Raise an error if a class is in two splits."""
    classes = {files[split]: {*part} for split, part in rows.groupby("split", sort=False)["label"]}
    for one, other in itertools.combinations(classes, 2):
        if shared := sorted(classes[one] & classes[other]):
            both = f"{len(shared):,} are in both: {_shorten(shared)}"
            raise ValueError(f"the classes of {one} and {other} must be disjoint; {both}.")


def _rows_by_class(folder: Path, split: str) -> pd.DataFrame:
    """List the images in the folder of each class, in order."""
    rows = []
    for class_folder in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        inner = class_folder / "images"  # as in Tiny ImageNet
        paths = sorted((inner if inner.is_dir() else class_folder).iterdir())
        are_images = (path.name[0] != "." and path.suffix.lower() in IMAGE_SUFFIXES for path in paths)
        rows += [(split, path, class_folder.name) for path in itertools.compress(paths, are_images)]
    return pd.DataFrame(rows, columns=["split", "path", "label"])


def _numbered(rows: pd.DataFrame, names: list[str], column: str = "label") -> pd.DataFrame:
    """Replace the name of each row's class by its index."""
    return rows.assign(**{column: rows[column].map({name: number for number, name in enumerate(names)})})


def _shorten(items: Sequence[Any]) -> str:
    return ", ".join(map(str, items[:5])) + (" ..." if len(items) > 5 else "")
