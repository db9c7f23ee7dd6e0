"""Convert published image datasets to parquet files that `load_image_data` reads."""

import io
from collections import Counter
from pathlib import Path
from typing import Any

from datasets import Features

from hf_sphere.data.parquet import ParquetSplit
from hf_sphere.data.published_images.layouts import PUBLISHED, READERS, Reader, Row, Splits
from hf_sphere.utils.checks import check_regular
from hf_sphere.utils.files import atomic_folder, list_folder
from hf_sphere.utils.image_formats import open_format
from hf_sphere.utils.progress import progress_bar
from hf_sphere.utils.texts import damage


def prepare_images(args: Any) -> None:
    """Convert a dataset and print a summary. Image files are stored unchanged, and writing is atomic.

    `args` are the `PrepareArguments` of `hf-sphere prepare`.
    """
    source, output = Path(args.source), Path(args.output)
    if not source.is_dir():
        raise ValueError(f"--source {source} is not a folder.")
    _check_output(output, source, args.overwrite_output_dir)
    reader = Reader(source, skip_missing=args.skip_missing)
    splits, features = READERS[args.kind](reader)
    for text in _count_differences(args, splits, features):
        print(f"Warning: {text}.")
    with atomic_folder(output) as folder:
        splits = {split: _write_split(folder, split, rows, features, reader, args) for split, rows in splits.items()}
        _count_differences(args, splits, features)  # without the unreadable images
    print(f"{'split':<11}{'images':>10}{'classes':>10}{'size':>12}")
    for split, rows in splits.items():
        size = sum(path.stat().st_size for path in output.glob(f"{split}-*.parquet"))
        classes = len({row.values["label"] for row in rows})
        print(f"{split:<11}{len(rows):>10,}{classes:>10,}{size / 1e6:>9,.1f} MB")
    for what, count in reader.left_out.items():
        if count:
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


def _count_differences(args: Any, splits: Splits, features: Features) -> list[str]:
    """Return how the numbers of classes and images differ from the published ones, an error with `expect_counts`."""
    published = PUBLISHED[args.kind]
    images = {split: Counter(row.values["label"] for row in rows) for split, rows in splits.items()}
    counts = [("classes", published.classes, len(set().union(*images.values())))]
    for split, of_class in images.items():
        counts.append((f"{split} classes", published.classes_of_a_split.get(split), len(of_class)))
        counts.append((f"{split} images", published.images.get(split), of_class.total()))
    wrong = [f"{want:,} {what} expected, {got:,} found" for what, want, got in counts if want not in (None, got)]
    for split, each in published.images_of_a_class.items():
        names = features["label"].names
        other = [f"{images[split][i]} of {name}" for i, name in enumerate(names) if images[split][i] != each]
        if other:
            more = f" and others of {len(other) - 1} further classes" if len(other) > 1 else ""
            wrong.append(f"{each} {split} images of each class expected, {other[0]}{more} found")
    if wrong and args.expect_counts:
        raise ValueError(
            f"these are not {args.kind} as published: {'; '.join(wrong)}. Complete the data, or pass --expect_counts "
            "false to prepare it as it is."
        )
    return wrong


def _write_split(folder: Path, split: str, rows: list[Row], features: Features, reader: Reader, args: Any) -> list[Row]:
    """Write a split and return the rows that are readable."""
    expected, kept, odd = PUBLISHED[args.kind].size, [], 0
    with (
        ParquetSplit(folder, split, features) as parquet,
        progress_bar(rows, split, unit="image", disable=args.disable_tqdm) as bar,
    ):
        for row in bar:
            check_regular(row.path)
            encoded = row.path.read_bytes()
            try:
                with open_format(io.BytesIO(encoded)) as image:
                    size = image.size
            except Exception as error:  # of PIL and its plugins, of many classes
                reader.leave_out(split, "have an unreadable image", [f"{row.path} ({damage(error)})"], len(rows))
                continue
            if expected not in (None, size):
                odd += 1
                if args.expect_counts:
                    raise ValueError(
                        f"images of {expected[0]} x {expected[1]} pixels expected, {row.path} has {size[0]} x "
                        f"{size[1]}. Pass --expect_counts false to prepare the data as it is."
                    )
            parquet.add({"image": {"bytes": encoded, "path": row.path.name}} | row.values, len(encoded))
            kept.append(row)
    if not kept:
        raise ValueError(f"no image of the {split} split can be used.")
    if odd:
        print(f"Warning: {odd:,} {split} images are not of size {expected}.")
    return kept
