"""Turn an image data set, laid out as it is published, into parquet files that every recipe loads.

python recipes/prepare_images.py imagenet200 --source data/tiny-imagenet-200 --output data/prepared/imagenet200
python recipes/prepare_images.py omniart --source data/omniart --output data/prepared/omniart --skip_missing
python recipes/prepare_images.py cub200 --source data/CUB_200_2011 --output data/prepared/cub200
python recipes/prepare_images.py sop --source data/Stanford_Online_Products --output data/prepared/sop
python recipes/prepare_images.py class_split --source data/mini_imagenet --output data/prepared/mini_imagenet

imagenet200  {train,test}/<class>/*.jpg, or train/<class>/images/*.JPEG with val/images and val/val_annotations.txt,
             whose val becomes the test split. Columns image, label.
omniart      {train,test}/<omni_id>.jpg with train_complete.csv and test_complete.csv. Columns image, label (the school)
             and year.
cub200       images/<class>/*.jpg with images.txt, image_class_labels.txt, train_test_split.txt and classes.txt.
             Columns image, label.
sop          <super class>_final/*.JPG with Ebay_train.txt and Ebay_test.txt, whose classes differ. Columns image, label
             (the number of the class) and super_class.
class_split  images/*.jpg with train.csv, val.csv and test.csv, beside images or in a folder split, whose first line is
             filename,label and whose classes differ: mini-ImageNet and other sets as they are distributed for few-shot
             learning. Splits train, validation and test; columns image, label (the name of the class).

Image files are stored as they are, byte for byte. The output is written whole or not at all, and only if the numbers of
classes and images are those published, of class_split whatever they are.
"""

import io
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from datasets import Features
from PIL import Image as PILImage
from tqdm.auto import tqdm

from hf_sphere.data.parquet import ParquetSplit
from hf_sphere.data.published_layouts import PUBLISHED, READERS, Reader, Row, Splits
from hf_sphere.training.command_line import run_recipe
from hf_sphere.utils.arguments import parse_arguments
from hf_sphere.utils.files import atomic_folder


@dataclass
class PrepareArguments:
    """What to turn into what."""

    kind: Literal["imagenet200", "omniart", "cub200", "sop", "class_split"] = field(
        metadata={"help": "Which data set; its name can also stand first, without --kind."}
    )
    source: str = field(
        metadata={
            "help": "Folder of the data as published. It holds, of imagenet200, the folders train and test or val; of "
            "omniart, the folders train and test, train_complete.csv and test_complete.csv; of cub200, the folder "
            "images, images.txt, image_class_labels.txt, train_test_split.txt and classes.txt; of sop, a folder for "
            "each super class, Ebay_train.txt and Ebay_test.txt; of class_split, the folder images, and train.csv, "
            "val.csv and test.csv beside it or in a folder split."
        }
    )
    output: str = field(metadata={"help": "Folder to write, for --dataset_name of the training recipes."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace the prepared data in output."})
    skip_missing: bool = field(
        default=False,
        metadata={"help": "Leave out rows whose image is missing or unreadable, or whose school or year is unknown."},
    )
    expect_counts: bool = field(
        default=True,
        metadata={"help": "Whether other numbers than those published are an error; false only warns, for subsets."},
    )
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bars."})


RUNS = {
    "imagenet200": ("train_image_classification", "prototypes/imagenet200-resnet32-d50"),
    "omniart": ("train_joint_prediction", "prototypes/omniart-joint-w0.25"),
    "cub200": ("train_image_classification", "prototypes/cub200-resnet34-d50"),
    "sop": ("train_image_retrieval", "vmf/sop-retrieval-vmf"),
    "class_split": ("train_few_shot", "few_shot/mini_imagenet-conv4-5shot-plain-cosine"),
}
"""A recipe and a configuration to go on with."""


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and do as it says."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--kind")
    (args,) = parse_arguments((PrepareArguments,), words, "Turn published image data into parquet files.")
    try:
        prepare(args)
    except KeyboardInterrupt:
        print("\nStopped; nothing was written.", file=sys.stderr)
        sys.exit(130)


def prepare(args: PrepareArguments) -> None:
    """Turn one data set into parquet files."""
    source, output = Path(args.source), Path(args.output)
    if not source.is_dir():
        raise ValueError(f"--source {source} is not a folder.")
    check_output(output, source, overwrite=args.overwrite_output_dir)
    reader = Reader(source, skip_missing=args.skip_missing)
    splits, features = READERS[args.kind](reader)
    check_counts(args, splits, features)
    with atomic_folder(output) as unfinished:
        written = {
            split: write_split(unfinished, split, rows, features, args, reader) for split, rows in splits.items()
        }
        check_counts(args, written, features, silent=True)  # once more, without what could not be read
    print(describe(args, written, reader))


def check_output(output: Path, source: Path, *, overwrite: bool) -> None:
    """Refuse to replace anything but prepared data, and that only if asked to."""
    if source.resolve().is_relative_to(output.resolve()):
        raise ValueError(f"--output {output} holds --source {source}; choose another folder to write to.")
    if not output.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{output} is there already; choose another --output or pass --overwrite_output_dir.")
    other = [path for path in output.iterdir() if path.suffix != ".parquet"] if output.is_dir() else [output]
    if other:
        raise FileExistsError(f"{output} is not replaced: {other[0]} is no prepared data. Choose another --output.")


def check_counts(args: PrepareArguments, splits: Splits, features: Features, *, silent: bool = False) -> None:
    """Compare numbers with those published; other ones are an error, or a warning if asked for."""
    published, wrong = PUBLISHED[args.kind], []
    images = {split: Counter(row.values["label"] for row in rows) for split, rows in splits.items()}
    classes = len(set().union(*images.values()))
    if published.classes is not None and classes != published.classes:
        wrong.append(f"{published.classes:,} classes expected, {classes:,} found")
    for split, found in images.items():
        for what, expected, number in (
            ("classes", published.classes_of_a_split.get(split), len(found)),
            ("images", published.images.get(split), found.total()),
        ):
            if expected is not None and number != expected:
                wrong.append(f"{expected:,} {split} {what} expected, {number:,} found")
        if split in published.images_of_a_class:
            each = published.images_of_a_class[split]
            other = [f"{found[i]} of {name}" for i, name in enumerate(features["label"].names) if found[i] != each]
            if other:
                more = f" and others of {len(other) - 1} further classes" if len(other) > 1 else ""
                wrong.append(f"{each} {split} images of each class expected, {other[0]}{more} found")
    if wrong and args.expect_counts:
        raise ValueError(
            f"these are not {args.kind} as published: {'; '.join(wrong)}. Complete the data, or pass "
            "--expect_counts false to prepare what is there."
        )
    for text in [] if silent else wrong:
        print(f"Warning: {text}.")


def write_split(
    folder: Path, split: str, rows: list[Row], features: Features, args: PrepareArguments, reader: Reader
) -> list[Row]:
    """Write a split as parquet files and return the rows that are in them."""
    size = PUBLISHED[args.kind].size
    kept, odd = [], 0
    with (
        ParquetSplit(folder, split, features) as parquet,
        tqdm(rows, split, unit="image", disable=args.disable_tqdm) as bar,
    ):
        for row in bar:
            encoded = row.path.read_bytes()
            try:
                with PILImage.open(io.BytesIO(encoded)) as picture:
                    found = picture.size
            except (OSError, ValueError, SyntaxError, PILImage.DecompressionBombError) as error:
                reader.leave_out(split, "have an unreadable image", [f"{row.path} ({error})"], len(rows))
                continue
            if size is not None and found != size:
                odd += 1
                if args.expect_counts:
                    raise ValueError(
                        f"images of {size[0]} x {size[1]} pixels expected, {row.path} has {found[0]} x {found[1]}. "
                        "Pass --expect_counts false to prepare what is there."
                    )
            parquet.add({"image": {"bytes": encoded, "path": row.path.name}} | row.values, len(encoded))
            kept.append(row)
    if not kept:
        raise ValueError(f"no image of the {split} split can be used.")
    if odd:
        print(f"Warning: {odd:,} {split} images do not have {size[0]} x {size[1]} pixels.")
    return kept


def describe(args: PrepareArguments, splits: Splits, reader: Reader) -> str:
    """Say what was written, what was left out, and how to use it."""
    lines = [f"{'split':<11}{'images':>10}{'classes':>10}{'size':>12}"]
    for split, rows in splits.items():
        size = sum(path.stat().st_size for path in Path(args.output).glob(f"{split}-*.parquet"))
        classes = len({row.values["label"] for row in rows})
        lines.append(f"{split:<11}{len(rows):>10,}{classes:>10,}{size / 1e6:>9,.1f} MB")
    lines += [f"Left out: {count:,} {rows}." for rows, count in reader.left_out.items() if count]
    recipe, run = RUNS[args.kind]
    command = f"python recipes/{recipe}.py --config recipes/configs/{run}.yaml --dataset_name {args.output}"
    return "\n".join([*lines, command])


if __name__ == "__main__":
    run_recipe(main)
