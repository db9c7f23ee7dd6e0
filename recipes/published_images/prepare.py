"""Convert published image datasets to parquet files that `load_image_data` reads."""

import io
from collections import Counter
from pathlib import Path

from datasets import Features
from PIL import Image as PILImage
from published_images.layouts import PUBLISHED, READERS, Reader, Row, Splits
from tqdm.auto import tqdm

from hf_sphere.data.parquet import ParquetSplit
from hf_sphere.utils.arguments import check_regular
from hf_sphere.utils.files import atomic_folder
from hf_sphere.utils.texts import damage


def prepare_images(
    kind: str,
    source: Path,
    output: Path,
    *,
    overwrite: bool = False,
    skip_missing: bool = False,
    expect_counts: bool = True,
    progress: bool = True,
) -> None:
    """Convert a dataset and print a summary. Image files are stored unchanged, and writing is atomic.

    Args:
        kind: One of `published_images.layouts.READERS`.
        source: Folder of the data as published.
        output: Folder to write.
        overwrite: Replace prepared data in `output`.
        skip_missing: Skip unusable rows instead of raising an error.
        expect_counts: Raise an error, instead of printing a warning, if the numbers of classes and images or their size
            differ from the published ones.
        progress: Whether to show progress bars.
    """
    if not source.is_dir():
        raise ValueError(f"--source {source} is not a folder.")
    _check_output(output, source, overwrite)
    reader = Reader(source, skip_missing=skip_missing)
    splits, features = READERS[kind](reader)
    _check_counts(kind, splits, features, strict=expect_counts, warn=True)
    with atomic_folder(output) as unfinished:
        for split, rows in splits.items():
            splits[split] = _write_split(
                unfinished, split, rows, features, reader, PUBLISHED[kind].size, strict=expect_counts, progress=progress
            )
        # Checked again, without the unreadable images.
        _check_counts(kind, splits, features, strict=expect_counts, warn=False)
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
    other = [path for path in output.iterdir() if path.suffix != ".parquet"] if output.is_dir() else [output]
    if other:
        raise FileExistsError(f"{output} is not replaced: {other[0]} is not prepared data. Choose another --output.")


def _check_counts(kind: str, splits: Splits, features: Features, *, strict: bool, warn: bool) -> None:
    """Compare the numbers of classes and images with the published ones."""
    published, wrong = PUBLISHED[kind], []
    images = {split: Counter(row.values["label"] for row in rows) for split, rows in splits.items()}
    numbers = [("classes", published.classes, len(set().union(*images.values())))]
    for split, found in images.items():
        numbers.append((f"{split} classes", published.classes_of_a_split.get(split), len(found)))
        numbers.append((f"{split} images", published.images.get(split), found.total()))
    wrong = [f"{want:,} {what} expected, {got:,} found" for what, want, got in numbers if want not in (None, got)]
    for split, each in published.images_of_a_class.items():
        names = features["label"].names
        other = [f"{images[split][i]} of {name}" for i, name in enumerate(names) if images[split][i] != each]
        if other:
            more = f" and others of {len(other) - 1} further classes" if len(other) > 1 else ""
            wrong.append(f"{each} {split} images of each class expected, {other[0]}{more} found")
    if wrong and strict:
        raise ValueError(
            f"these are not {kind} as published: {'; '.join(wrong)}. Complete the data, or pass --expect_counts false "
            "to prepare it as it is."
        )
    for text in wrong if warn else []:
        print(f"Warning: {text}.")


def _write_split(
    folder: Path,
    split: str,
    rows: list[Row],
    features: Features,
    reader: Reader,
    size: tuple[int, int] | None,
    *,
    strict: bool,
    progress: bool,
) -> list[Row]:
    """Write a split and return the rows that are readable."""
    kept, odd = [], 0
    with (
        ParquetSplit(folder, split, features) as parquet,
        tqdm(rows, split, unit="image", disable=not progress) as bar,
    ):
        for row in bar:
            check_regular(row.path)
            encoded = row.path.read_bytes()
            try:
                with PILImage.open(io.BytesIO(encoded)) as image:
                    found = image.size
            except Exception as error:  # of PIL and its plugins, of many classes
                reader.leave_out(split, "have an unreadable image", [f"{row.path} ({damage(error)})"], len(rows))
                continue
            if size is not None and found != size:
                odd += 1
                if strict:
                    raise ValueError(
                        f"images of {size[0]} x {size[1]} pixels expected, {row.path} has {found[0]} x {found[1]}. "
                        "Pass --expect_counts false to prepare the data as it is."
                    )
            parquet.add({"image": {"bytes": encoded, "path": row.path.name}} | row.values, len(encoded))
            kept.append(row)
    if not kept:
        raise ValueError(f"no image of the {split} split can be used.")
    if odd:
        print(f"Warning: {odd:,} {split} images are not of size {size}.")
    return kept
