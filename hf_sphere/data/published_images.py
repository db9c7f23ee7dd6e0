"""Convert image datasets in their published layouts of folders and lists to parquet files.

ImageNet-200, OmniArt, CUB-200-2011, Stanford Online Products, and few-shot datasets split by class.
"""

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, Features, Image, Value
from datasets.table import embed_table_storage

from hf_sphere.utils.files import atomic_folder, list_folder
from hf_sphere.utils.loading import open_format
from hf_sphere.utils.progress import progress_bar

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
BYTES_A_FILE = 500_000_000  # of images in a parquet file, about


def read_imagenet200(source: Path) -> tuple[pd.DataFrame, Features]:
    """Read a folder per class, named by `words.txt` if it exists; the test images of Tiny ImageNet are in a list."""
    train, words, folder = _rows_by_class(source / "train", "train"), {}, source / "val"
    if (folder / "val_annotations.txt").is_file():
        listed = _read_table(folder / "val_annotations.txt", ("file", "label"), "\t")
        paths = [folder / "images" / file for file in listed["file"]]
        test = pd.DataFrame({"split": "test", "path": paths, "label": listed["label"]})
    else:
        test = _rows_by_class(source / "test", "test")
    if (source / "words.txt").is_file():
        words = dict(_read_table(source / "words.txt", ("folder", "name"), "\t").itertuples(index=False))
    folders = sorted({*train["label"]})
    features = {"image": Image(), "label": ClassLabel(names=[words.get(name, name) for name in folders])}
    return _numbered(pd.concat([train, test], ignore_index=True), folders), Features(features)


def read_omniart(source: Path) -> tuple[pd.DataFrame, Features]:
    """Read the tables of OmniArt; the classes are the schools of the training images."""
    parts = []
    for split in ("train", "test"):
        columns = ("omni_id", "creation_year", "school")
        table = _read_table(source / f"{split}_complete.csv", columns, ",", header=0, quoting=csv.QUOTE_MINIMAL)
        paths = [source / split / f"{number}.jpg" for number in table["omni_id"]]
        years = pd.to_numeric(table["creation_year"], errors="coerce")
        parts.append(pd.DataFrame({"split": split, "path": paths, "label": table["school"], "year": years}))
    rows = pd.concat(parts, ignore_index=True)
    trained = rows[(rows["split"] == "train") & rows["path"].map(Path.is_file)].dropna()
    names = sorted({*trained["label"]} - {""})
    features = {"image": Image(), "label": ClassLabel(names=names), "year": Value("float32")}
    return _numbered(rows, names), Features(features)


def read_cub200(source: Path) -> tuple[pd.DataFrame, Features]:
    """Read the four lists of Caltech-UCSD Birds 200-2011."""
    lists = ("images", "image_class_labels", "train_test_split", "classes")
    tables = (_read_table(source / f"{name}.txt", ("id", name)).set_index("id")[name] for name in lists)
    files, classes, marks, names = tables
    rows = pd.DataFrame({"split": marks.reindex(files.index).map({"1": "train", "0": "test"})})
    rows = rows.assign(path=[source / "images" / file for file in files], label=classes.reindex(files.index))
    # "001.Black_footed_Albatross" is the Black footed Albatross.
    birds = [name.split(".", 1)[-1].replace("_", " ") for name in names]
    features = {"image": Image(), "label": ClassLabel(names=birds)}
    return _numbered(rows, [*names.index]), Features(features)


def read_sop(source: Path) -> tuple[pd.DataFrame, Features]:
    """Read two lists of an open set; labels are the published numbers, as a `ClassLabel` would have all classes."""
    columns = ("image_id", "class_id", "super_class_id", "path")
    tables = {split: _read_table(source / f"Ebay_{split}.txt", columns, header=0) for split in ("train", "test")}
    rows = pd.concat([table.assign(split=split) for split, table in tables.items()], ignore_index=True)
    # "coffee_maker_final" is the folder of coffee_maker.
    rows["super_class"] = rows["path"].str.partition("/")[0].str.removesuffix("_final")
    names = sorted({*rows["super_class"]})
    rows = rows.assign(label=rows["class_id"].astype(int), path=[source / path for path in rows["path"]])
    features = {"image": Image(), "label": Value("int64"), "super_class": ClassLabel(names=names)}
    return _numbered(rows, names, "super_class"), Features(features)


def read_class_split(source: Path) -> tuple[pd.DataFrame, Features]:
    """Read three lists with disjoint classes, stored as names, as a `ClassLabel` would have all classes."""
    folder = source / "split" if (source / "split").is_dir() else source
    files = {"train": "train.csv", "validation": "val.csv", "test": "test.csv"}
    tables = {split: _read_table(folder / file, ("filename", "label"), ",", header=0) for split, file in files.items()}
    rows = pd.concat([table.assign(split=split) for split, table in tables.items()], ignore_index=True)
    rows["path"] = [source / "images" / file for file in rows["filename"]]
    return rows, Features({"image": Image(), "label": Value("string")})


READERS: dict[str, tuple[Callable[[Path], tuple[pd.DataFrame, Features]], dict[str, int]]] = {
    "imagenet200": (read_imagenet200, {"classes": 200, "train images": 100_000, "test images": 10_000}),
    "omniart": (read_omniart, {"classes": 46}),
    "cub200": (read_cub200, {"classes": 200, "train images": 5994, "test images": 5794}),
    "sop": (read_sop, {"train classes": 11_318, "test classes": 11_316, "train images": 59_551, "test images": 60_502}),
    "class_split": (read_class_split, {}),
}
"""Functions that read a dataset, and its published numbers; unknown and varying ones are left out."""


def prepare_images(args: Any) -> None:
    """Convert a dataset by the `PrepareArguments`, and print a summary; image files are stored unchanged."""
    source, output = Path(args.source), Path(args.output)
    other = [path for path in list_folder(output) if path.suffix != ".parquet" or not path.is_file()]
    if other or (output.exists() and not args.overwrite_output_dir):
        how = f"{other[0]} is not prepared data" if other else "--overwrite_output_dir replaces prepared data"
        raise FileExistsError(f"{output} already exists: {how}. Choose another --output.")
    read, published = READERS[args.kind]
    rows, features = read(source)
    bar = progress_bar(rows["path"], "Checking", unit="image", disable=args.disable_tqdm)
    is_readable = pd.Series([_is_image(path) for path in bar], rows.index, dtype=bool)
    is_bad = rows.isna().any(axis=1) | (rows == "").any(axis=1) | ~is_readable
    why, left_out = "have an empty, invalid or unknown cell, or no readable image", rows[is_bad]
    if len(left_out) and not args.skip_missing:
        first = ", ".join(f"{name} {cell}" for name, cell in left_out.iloc[0].items())
        raise ValueError(f"{len(left_out):,} of {len(rows):,} rows {why}; --skip_missing skips them. First: {first}")
    rows = rows[~is_bad]
    parts = dict([*rows.groupby("split", sort=False)])
    if missing := {"train", "test"} - {*parts}:
        raise ValueError(f"found no image of the {max(missing)} split in {source}; is it the right folder?")
    found = {"classes": rows["label"].nunique()}
    for split, part in parts.items():
        found |= {f"{split} classes": part["label"].nunique(), f"{split} images": len(part)}
    shared = sum(found[f"{split} classes"] for split in parts) - found["classes"]
    if args.kind in ("sop", "class_split") and shared:
        raise ValueError(f"{shared:,} of the classes are in another split, too; those of splits must differ.")
    expected = [(what, count, found.get(what, 0)) for what, count in published.items()]
    wrong = [f"{count:,} {what} expected, {got:,} found" for what, count, got in expected if got != count]
    if wrong and args.expect_counts:
        how = "Complete the data, or pass --expect_counts false to prepare it as it is"
        raise ValueError(f"{'; '.join(wrong)}. {how}.")
    for text in wrong:
        print(f"Warning: {text}.")
    with atomic_folder(output) as unfinished:
        for split, part in parts.items():
            cells = {name: part[name].tolist() for name in features if name != "image"}
            data = Dataset.from_dict({"image": part["path"].map(str).tolist()} | cells, features).with_format("arrow")
            count = math.ceil(sum(path.stat().st_size for path in part["path"]) / BYTES_A_FILE)
            with progress_bar(None, split, len(part), unit="image", disable=args.disable_tqdm) as bar:
                for number in range(count):
                    file = unfinished / f"{split}-{number:05d}-of-{count:05d}.parquet"
                    with pq.ParquetWriter(file, features.arrow_schema) as writer:
                        for table in data.shard(count, number).iter(100):
                            writer.write_table(embed_table_storage(table))
                            bar.update(len(table))
    print(f"{'split':<11}{'images':>10}{'classes':>10}{'size':>12}")
    for split, part in parts.items():
        size = sum(path.stat().st_size for path in output.glob(f"{split}-*.parquet"))
        print(f"{split:<11}{len(part):>10,}{part['label'].nunique():>10,}{size / 1e6:>9,.1f} MB")
    for split, count in left_out["split"].value_counts(sort=False, dropna=False).items():
        print(f"Left out: {count:,} rows of the {split} split that {why}.")


def _read_table(path: Path, columns: Sequence[str], separator: str = r"\s+", **options: Any) -> pd.DataFrame:
    """Read columns of a list as texts: the first ones, or with `header=0` those of these names."""
    is_named = options.setdefault("header", None) is not None
    names: dict[str, Any] = {"usecols": columns} if is_named else {"usecols": [*range(len(columns))], "names": columns}
    options = {"quoting": csv.QUOTE_NONE, "dtype": str, "keep_default_na": False, "encoding": "utf-8-sig"} | options
    table = pd.read_csv(path, sep=separator, **names, **options)
    return table[[*columns]].fillna("").apply(lambda cells: cells.str.strip())


def _rows_by_class(folder: Path, split: str) -> pd.DataFrame:
    """List the images in the folder of each class, or in its folder `images` as in Tiny ImageNet, in order."""
    files = sorted(path for pattern in ("*/*", "*/images/*") for path in folder.glob(pattern))
    images = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES]
    paths = [path for path in images if not any(part[0] == "." for part in path.relative_to(folder).parts)]
    return pd.DataFrame({"split": split, "path": paths, "label": [path.relative_to(folder).parts[0] for path in paths]})


def _numbered(rows: pd.DataFrame, names: list[str], column: str = "label") -> pd.DataFrame:
    """Replace the name of each row's class by its index."""
    return rows.assign(**{column: rows[column].map({name: number for number, name in enumerate(names)})})


def _is_image(path: Path) -> bool:
    try:
        return path.is_file() and open_format(path).close() is None
    except Exception:  # of PIL and its plugins, of many classes
        return False
