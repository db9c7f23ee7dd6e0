"""Find the critical layers of a trained network: put each back to where it was, and measure what that costs.

python recipes/reinitialize_layers.py --model_name_or_path outputs/hyperplanes/cifar10-vgg11
python recipes/reinitialize_layers.py --model_name_or_path outputs/random-labels --split train --max_samples 1000
python recipes/reinitialize_layers.py --model_name_or_path timm:resnet18.a1_in1k --dataset_name <folder> --num_random 3

One layer at a time gets its weights of each snapshot of the run, and fresh random ones; the others stay trained. Data
and snapshots of a run are found in its folder; other models are named as for `compute_projections.py`, and have no
snapshots but random weights; their images are stretched to the size that they want, without a crop. Writes
`reinitialization.json`, `all_results.json` and the heat map as PNG and SVG. Stopped by Ctrl-C, the same command goes
on.
"""

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate import Accelerator
from hf_sphere.training.image_run import load_data
from torch import nn

from hf_sphere.analysis import ReinitializationRobustness, reinitialization_robustness
from hf_sphere.analysis.model_sources import Classifier, file_name, load_classifier
from hf_sphere.data import ImageBatches, load_image_split
from hf_sphere.training import (
    CLASSIFICATION,
    ImageDataArguments,
    ImageSourceArguments,
    TrainingArguments,
)
from hf_sphere.training.command_line import run_recipe
from hf_sphere.training.output_dir import (
    RESULTS_FILE,
    RUN_FILE,
    can_resume_results,
    check_results_dir,
    prepare_results_dir,
)
from hf_sphere.utils.arguments import given_arguments, parse_arguments
from hf_sphere.utils.digest import digest_weights
from hf_sphere.utils.files import write_json
from hf_sphere.utils.snapshots import list_snapshots
from hf_sphere.visualization import plot_reinitialization

CELLS_FILE = "cells.jsonl"
TABLE_FILE = "reinitialization.json"
PICTURES = ("reinitialization.png", "reinitialization.svg")
FILES = (CELLS_FILE, TABLE_FILE, *PICTURES, RESULTS_FILE, RUN_FILE)
"""All that may be written."""
FREE_TO_CHANGE = {
    *("output_dir", "overwrite_output_dir", "drop", "batch_size", "reuse_activations", "cached_gigabytes"),
    *("disable_tqdm", "cache_dir", "dataloader_num_workers"),
}
"""Arguments that may differ between calls that share a folder, since no accuracy depends on them."""


@dataclass
class RobustnessArguments:
    """Which layers of which model are put back to what."""

    model_name_or_path: str = field(
        metadata={
            "help": "An image classifier: a run's folder, another saved model, a repository of the Hub, timm:<name> or "
            "torchvision:<name>."
        }
    )
    output_dir: str | None = field(
        default=None, metadata={"help": "Folder to write; outputs/reinitialization/<name of the model> if not set."}
    )
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace the results in output_dir."})
    split: Literal["eval", "train", "validation"] = field(
        default="eval",
        metadata={
            "help": "Images to measure on: those that results are reported on, those trained on, with the labels that "
            "they had there, or those held out."
        },
    )
    max_samples: int | None = field(default=None, metadata={"help": "Measure on so many of them, drawn at random."})
    layers: Literal["conv", "linear", "all"] = field(default="all", metadata={"help": "Which kinds of layers."})
    include_1x1: bool = field(default=True, metadata={"help": "Convolutions whose kernel is one point as well."})
    include_batch_norm: bool = field(
        default=True, metadata={"help": "With a layer, put back the batch norm that it feeds."}
    )
    snapshots: list[str] | None = field(
        default=None, metadata={"help": "Files of snapshots of the model; those in the run's folder if not set."}
    )
    num_random: int = field(default=1, metadata={"help": "Draws of fresh random weights of each layer."})
    seed: int = field(
        default=0, metadata={"help": "Seed of these draws, and of the choice of images for a model that is of no run."}
    )
    drop: float = field(
        default=0.05, metadata={"help": "A layer is critical if putting it back costs more accuracy than this."}
    )
    batch_size: int = field(default=250, metadata={"help": "Images a batch."})
    reuse_activations: bool = field(
        default=True, metadata={"help": "Compute what comes before the changed layer once, where that can be."}
    )
    cached_gigabytes: float = field(default=2.0, metadata={"help": "Memory for that."})
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bar."})

    def __post_init__(self) -> None:
        for name, least in (("max_samples", 1), ("batch_size", 1), ("num_random", 0), ("cached_gigabytes", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} must be at least {least}; got {value}.")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write and draw."""
    args, data_args = parse_arguments((RobustnessArguments, ImageSourceArguments), argv, __doc__ or "")
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    transformers.utils.logging.disable_progress_bar()  # one bar is enough: that of the layers
    try:
        measure(args, data_args, given=given_arguments(argv))
    except KeyboardInterrupt:
        command = "the same command" + (" without --overwrite_output_dir" if args.overwrite_output_dir else "")
        print(f"\nStopped. What is finished is kept: {command} goes on from here.", file=sys.stderr)
        sys.exit(130)


def measure(args: RobustnessArguments, data_args: ImageSourceArguments, given: set[str]) -> None:
    """Put every layer back to everything, and write what that costs."""
    output_dir = Path(args.output_dir or f"outputs/reinitialization/{file_name(args.model_name_or_path)}")
    check_results_dir(output_dir, overwrite=args.overwrite_output_dir, resume=True)
    accelerator = Accelerator()
    if accelerator.num_processes > 1:
        raise ValueError(
            f"this recipe runs in one process, and was started in {accelerator.num_processes}: use python."
        )
    run = find_run(args.model_name_or_path)
    classifier = load_classifier(args.model_name_or_path)
    seed = adopt(args, data_args, run, classifier, given)
    kept = run or Path(args.model_name_or_path)
    snapshots = args.snapshots or [one.path for one in (list_snapshots(kept) if kept.is_dir() else [])]
    settings = asdict(data_args) | asdict(args) | {"data_seed": seed}
    settings["weights"] = digest_weights(classifier.model, [_digest(Path(path)) for path in snapshots])
    goes_on = can_resume_results(output_dir, settings, ignored=FREE_TO_CHANGE, overwrite=args.overwrite_output_dir)
    batches = load_batches(args, data_args, seed, accelerator)
    lowest, highest = int(batches.labels.min()), int(batches.labels.max())
    if lowest < 0:
        raise ValueError(f"the images of {data_args.dataset_name} have no labels, so there is no accuracy to measure.")
    if highest >= classifier.num_classes:
        raise ValueError(
            f"the images have labels up to {highest}, but {args.model_name_or_path} has {classifier.num_classes} "
            "classes; name the data that it was trained for with --dataset_name."
        )
    accuracy = Accuracy(batches, args.max_samples)
    images = f"{accuracy.num_images:,} images of {data_args.dataset_name}, {args.split}"
    print(f"measuring on {images}")

    def begin() -> None:
        prepare_results_dir(output_dir, FILES, overwrite=args.overwrite_output_dir, resume=goes_on)
        write_json(output_dir / RUN_FILE, settings)

    result = reinitialization_robustness(
        classifier.model.to(accelerator.device),
        snapshots,
        accuracy,
        layers=args.layers,
        include_1x1=args.include_1x1,
        include_batch_norm=args.include_batch_norm,
        num_random=args.num_random,
        seed=args.seed,
        fresh=classifier.fresh,
        reuse_activations=args.reuse_activations,
        max_cached_bytes=int(args.cached_gigabytes * 2**30),
        finished=Cells(output_dir / CELLS_FILE, begin, read=goes_on),
        progress=not args.disable_tqdm,
    )
    report(result, args, images, output_dir)


def find_run(model: str) -> Path | None:
    """The folder of the run that a model is of: its own, or that around `best` or a checkpoint."""
    path = Path(model)
    folders = (path, path.parent) if path.exists() else ()
    return next((folder for folder in folders if (folder / RUN_FILE).is_file()), None)


def adopt(
    args: RobustnessArguments,
    data_args: ImageSourceArguments,
    run: Path | None,
    classifier: Classifier,
    given: set[str],
) -> int:
    """Take what is not given from the run that trained the model, and from the model; return the images' seed."""
    settings: dict[str, Any] = {}
    if run is not None:
        settings = json.loads((run / RUN_FILE).read_text(encoding="utf-8"))
        if "train_classes" in settings or "value_column_name" in settings:
            raise ValueError(f"{run} is no run of train_image_classification.py, and what it learnt has no accuracy.")
    elif "dataset_name" not in given:
        raise ValueError("the model is not in the folder of a run, so name its images with --dataset_name.")
    for one in fields(data_args):
        if one.name in settings and one.name not in given:
            setattr(data_args, one.name, settings[one.name])
    data_args.image_size = data_args.image_size or list(classifier.image_size)
    data_args.num_channels = data_args.num_channels or classifier.num_channels
    data_args.image_mean = data_args.image_mean or classifier.mean
    data_args.image_std = data_args.image_std or classifier.std
    return settings.get("seed", args.seed)


def load_batches(
    args: RobustnessArguments, data_args: ImageSourceArguments, seed: int, accelerator: Accelerator
) -> ImageBatches:
    """Load the images to measure on as the run saw them; the seed is that of the run, which chose them."""
    if args.split == "eval":  # without the training images, which may be many
        limits = [limit for limit in (args.max_samples, data_args.max_eval_samples) if limit is not None]
        return load_image_split(
            data_args,
            data_args.eval_split,
            max_samples=min(limits, default=None),  # drawn by one seed, fewer images are among the more
            batch_size=args.batch_size,
            device=accelerator.device,
            seed=seed,
            progress=not args.disable_tqdm,
        ).batches
    sizes = {"per_device_train_batch_size": args.batch_size, "per_device_eval_batch_size": args.batch_size}
    training = TrainingArguments(output_dir="", seed=seed, disable_tqdm=args.disable_tqdm, **sizes)
    data = load_data(CLASSIFICATION, ImageDataArguments(**asdict(data_args)), training, accelerator)
    if args.split == "train":
        return data.train
    if data.validation is None:
        raise ValueError("no images were held out: --validation_fraction is 0. Choose --split eval or train.")
    if args.max_samples is not None:
        raise ValueError("--max_samples is for --split eval and train; those held out are measured all.")
    return data.validation


def _digest(path: Path) -> str:
    """Digest of a file, if it is there."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Accuracy:
    """The share of images that a model classifies as labelled.

    Args:
        batches: The images; always in the order of the first epoch, without augmentation.
        max_samples: Only the first so many of them; all if None.

    Attributes:
        num_images: How many are measured on.
    """

    def __init__(self, batches: ImageBatches, max_samples: int | None) -> None:
        self.batches = batches
        self.num_images = min(max_samples or batches.examples_per_epoch, batches.examples_per_epoch)

    @torch.inference_mode()
    def __call__(self, model: nn.Module) -> float:
        """Measure a model that is in eval mode."""
        right: Any = 0
        seen = 0
        for batch in self.batches.epoch(augment=False):
            labels = batch["labels"][: self.num_images - seen]
            output = model(batch["pixel_values"][: self.num_images - seen])
            logits = output.logits if hasattr(output, "logits") else output
            right += (logits.argmax(-1) == labels).sum()
            seen += len(labels)
            if seen == self.num_images:
                break
        return int(right) / seen


class Cells(MutableMapping[str, float]):
    """Accuracies by name, kept in a file line by line, so that a stopped run goes on.

    Args:
        path: A file of JSON lines.
        begin: Called once, before the first line is written.
        read: Whether to read those that are there, and go on with them.
    """

    def __init__(self, path: Path, begin: Callable[[], None], *, read: bool) -> None:
        self.path = path
        self.begin: Callable[[], None] | None = begin
        self.known: dict[str, float] = {}
        if read and path.is_file():
            text = path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # a kill may have cut the last line
            for line in whole.splitlines():
                self.known |= json.loads(line)
            if whole != text:
                path.write_text(whole, encoding="utf-8")

    def __getitem__(self, name: str) -> float:
        return self.known[name]

    def __setitem__(self, name: str, value: float) -> None:
        if self.begin is not None:
            self.begin()
            self.begin = None
        self.known[name] = value
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: value}) + "\n")

    def __delitem__(self, name: str) -> None:
        raise TypeError("what has been measured is not forgotten")

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)


def report(result: ReinitializationRobustness, args: RobustnessArguments, images: str, output_dir: Path) -> None:
    """Print, write and draw."""
    print(result.table(args.drop))
    result.save(output_dir / TABLE_FILE)
    critical = result.critical_layers(args.drop)
    summary = {"model": args.model_name_or_path, "images": images, "accuracy": result.accuracy}
    write_json(output_dir / RESULTS_FILE, summary | {"drop": args.drop, "critical_layers": critical})
    try:
        for picture in PICTURES:
            title = Path(args.model_name_or_path).name
            plot_reinitialization(result.to_dict(), title=title, path=output_dir / picture)
    except ImportError as error:
        print(f"no picture: {error}")
    print(f"\nResults in {output_dir}")


if __name__ == "__main__":
    run_recipe(main)
