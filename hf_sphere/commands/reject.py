"""Fit a rejection of unknown images to a saved classifier, and save it with the model.

hf-sphere reject --model_name_or_path outputs/birds --images held-out
hf-sphere reject --model_name_or_path outputs/birds --images held-out --unknown no-birds --output_dir outputs/birds-2

The images are labeled, or in folders named like the classes. They must be neither trained on, nor used to choose the
epoch, nor those that the model is tested on; the record of its training is compared. At most the level of further
images of these classes is then called unknown.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_sphere import search
from hf_sphere.utils.arguments import Arguments, argument, parse_arguments
from hf_sphere.utils.files import check_writable, list_folder, read_json, write_json, write_text


@dataclass
class RejectionArguments(Arguments):
    """Model, images and level."""

    model_name_or_path: str = argument(help="Image classifier of this library: folder or Hub id.")
    images: str = argument(help="Images of its classes that it has not seen: folder, or name of a dataset.")
    split: str | None = argument(None, "Split or part; if not set, what the training reserved, or else all images.")
    level: float = argument(0.05, "Largest fraction of images of the classes to reject as unknown.", gt=0, lt=1)
    score: str = argument("auto", "Name of a score of hf_sphere.ood; auto chooses it by one half of the images.")
    by_class: bool = argument(False, "Compare each class with its own images, so that the level holds for each class.")
    unknown: str | None = argument(
        None, "Images of other classes, to measure how many are rejected; for score auto, one half to choose it."
    )
    output_dir: str | None = argument(None, "New folder for the model; by default its own.")
    skip_invalid: bool = argument(False, "Leave out images that cannot be decoded.")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, fit the rejection, and save the model with it."""
    (args,) = parse_arguments((RejectionArguments,), argv, __doc__)
    name, output = args.model_name_or_path, Path(args.output_dir or args.model_name_or_path)
    if args.output_dir is None and not output.is_dir():
        raise FileNotFoundError(f"{name} is not a folder to write to; name a new one with --output_dir.")
    if args.output_dir is not None and list_folder(output):
        raise FileExistsError(f"{output} exists. Choose another --output_dir, or leave it out to change {name}.")
    check_writable(output / "config.json", is_folder=False)
    from hf_sphere.training.output_dir import locked

    # Before the model is loaded, which a run in this folder would replace.
    with locked(output) if args.output_dir is None else nullcontext():
        fit(args, output)


def fit(args: RejectionArguments, output: Path) -> None:
    """Fit the rejection, and save the model with it."""
    from hf_sphere.data.provenance import DataRecord
    from hf_sphere.models import SphereVisionForImageClassification
    from hf_sphere.ood import fit_rejection

    name, skip = args.model_name_or_path, args.skip_invalid
    encoder, record = search.ImageEncoder(name), DataRecord.read(name)
    names = encoder.class_names
    if not isinstance(encoder.model, SphereVisionForImageClassification):
        raise ValueError(f"{name} is no SphereVisionForImageClassification; use hf_sphere.ood.fit_rejection for it.")
    known, others = load_images(encoder, record, args.images, args.split, skip), None
    uses = {"train": "trained on", "validation": "validated on", "eval": "evaluated on"}
    if used := [f"{use} {count:,}" for part, use in uses.items() if (count := known.recorded.get(part))]:
        raise ValueError(
            f"the model was {' and '.join(used)} of the {known.num_images:,} images of {args.images}, split "
            f"{known.name}. Name others, by --split or --images."
        )
    labels = class_labels(known)
    check_classes(args.images, labels, {*labels} - {*names}, "no classes of")
    if args.unknown is not None:
        unknown = load_images(encoder, None, args.unknown, "all", skip)
        check_classes(args.unknown, class_labels(unknown), {*names}, "classes of")
        others = unknown.batches
    reserved = ", reserved by its training" * (known.recorded.get("rejection") == known.num_images)
    whose = f"of {len({*labels})} classes" if labels else "without labels"
    print(f"data      {args.images}, split {known.name}{reserved}: {known.num_images:,} images {whose}")
    if labels and (absent := [each for each in names if each not in {*labels}]):
        few = ", ".join(absent[:5])
        print(f"note      no images of {few}: the level may not hold for {len(absent)} of the classes")
    options: dict[str, Any] = {"by_class": args.by_class, "unknown": others}
    rejection = fit_rejection(encoder.model, labeled(known), args.level, args.score, **options)
    settings = rejection.settings
    if "ranking" in settings:
        ranked = sorted(settings["ranking"].items(), key=lambda item: -item[1])
        against = "classes left out in turn, a proxy" if others is None else "--unknown"
        print(f"scores    {', '.join(f'{each} {value:.3f}' for each, value in ranked)} (AUROC against {against})")
    print(f"rejection {rejection.describe()}")
    if (measured := settings.get("unknown")) is not None:
        share, low, high = (f"{100 * measured[key]:.1f} %" for key in ("rejected", "low", "high"))
        print(f"unknown   {share} of {measured['num_images']:,} images are rejected (95 % interval {low} to {high})")
    save(encoder, output, known, record)
    print(f"wrote     {output}")


def load_images(encoder: "search.ImageEncoder", record: Any, source: str, split: str | None, skip: bool) -> Any:
    """Load images with the preprocessing of a model; without a `split`, those that its training reserved, or all."""
    from hf_sphere.data import ImageSourceOptions, load_image_split
    from hf_sphere.data.provenance import fingerprint
    from hf_sphere.data.sources import load_splits

    splits = load_splits(source)
    is_reserved = record is not None and "rejection" in record.ids and record.data == fingerprint(splits)
    split = split or ("rejection" if is_reserved else "all")
    options = ImageSourceOptions(source, skip_invalid=skip)
    return load_image_split(options, split, like=encoder.name, dataset=splits, device=encoder.model.device)


def class_labels(images: Any) -> list[str]:
    """Return the names of the classes of the images, none if they have no labels."""
    return [images.class_names[label] for label in images.batches.labels.tolist()] if images.class_names else []


def check_classes(source: str, labels: list[str], wrong: set[str], what: str) -> None:
    """Raise an error if some images are of classes that must not occur."""
    if found := [label for label in labels if label in wrong]:
        raise ValueError(
            f"{len(found):,} of the {len(labels):,} images of {source} are of {', '.join(sorted({*found})[:5])}, "
            f"{what} the model; leave them out. Images of other classes, and only these, are for --unknown."
        )


def labeled(images: Any) -> Iterator[dict[str, Any]]:
    """Yield batches with the names of their classes, if they have labels."""
    for batch in images.batches.epoch():
        names = [images.class_names[label] for label in batch["labels"].tolist()] if images.class_names else []
        yield {"pixel_values": batch["pixel_values"], **({"labels": names} if names else {})}


def save(encoder: "search.ImageEncoder", output: Path, known: Any, record: Any) -> None:
    """Save a model with its processor, and the images and the rejection in its record and on its card."""
    from hf_sphere.training.checkpoints import write_model_files
    from hf_sphere.training.model_card import CARD_FILE, rename_model, write_rejection
    from hf_sphere.training.output_dir import RESULTS_FILE, locked
    from hf_sphere.utils.loading import find_file
    from hf_sphere.utils.texts import hide_private

    with locked(output), write_model_files(output) as unfinished:
        encoder.model.save_pretrained(unfinished)
        encoder.processor.save_pretrained(unfinished)
        if record is not None:
            used = {"rejection": known.ids[known.batches.epoch_rows()]} if known.recorded else {}
            replace(record, ids=record.ids | used).save(unfinished)
        if (card := find_file(encoder.name, CARD_FILE)) is not None:
            text = rename_model(Path(card).read_text(encoding="utf-8"), hide_private(str(output)))
            earlier = r"^(\| \w+_rejected \||- `\w+_rejected`:).*\n"  # of an earlier rejection
            write_text(unfinished / CARD_FILE, re.sub(earlier, "", text, flags=re.MULTILINE))
            write_rejection(unfinished / CARD_FILE, encoder.model.rejection.describe())
        if (path := output / RESULTS_FILE).is_file():
            results = read_json(path).items()
            kept = {name: v for name, v in results if name != "rejection" and not name.endswith("_rejected")}
            write_json(unfinished / RESULTS_FILE, kept)
