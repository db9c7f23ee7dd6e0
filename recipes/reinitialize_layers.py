"""Find the critical layers of a trained network: put each back to where it was, and measure what that costs.

python recipes/reinitialize_layers.py --model_name_or_path outputs/hyperplanes/cifar10-vgg11
python recipes/reinitialize_layers.py --model_name_or_path outputs/random-labels --split train --max_samples 1000
python recipes/reinitialize_layers.py --model_name_or_path timm:resnet18.a1_in1k --dataset_name <folder> --num_random 3

One layer at a time gets its weights of each snapshot of the run, and fresh random ones; the others stay trained. Data
and snapshots of a run are found in its folder; other models are named as for `compute_projections.py`, and have no
snapshots but random weights. Writes `reinitialization.json`, `all_results.json` and the heat map as PNG and SVG.
Stopped by Ctrl-C, the same command goes on.
"""

import hashlib
import json
import logging
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate import Accelerator
from torch import nn

from hf_sphere.analysis import ReinitializationRobustness, reinitialization_robustness
from hf_sphere.data import ImageBatches, load_image_split
from hf_sphere.model_digest import digest_weights
from hf_sphere.model_sources import Classifier, file_name, load_classifier
from hf_sphere.snapshot_files import list_snapshots
from hf_sphere.training import (
    CLASSIFICATION,
    ImageDataArguments,
    ImageSourceArguments,
    TrainingArguments,
    claim_output_dir,
    parse_arguments,
)
from hf_sphere.training.checkpoints import RESULTS_FILE, RUN_FILE, holds_same_run
from hf_sphere.training.image_run import load_data
from hf_sphere.training.run import run_recipe, write_json
from hf_sphere.visualization import plot_reinitialization

CELLS_FILE = "cells.jsonl"
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
    max_samples: int | None = field(default=None, metadata={"help": "Measure on the first so many of them."})
    layers: Literal["conv", "linear", "all"] = field(default="all", metadata={"help": "Which kinds of layers."})
    include_1x1: bool = field(default=True, metadata={"help": "Convolutions whose kernel is one point as well."})
    include_batch_norm: bool = field(
        default=True, metadata={"help": "With a layer, put back the batch norm that it feeds."}
    )
    snapshots: list[str] | None = field(
        default=None, metadata={"help": "Files of snapshots of the model; those in the run's folder if not set."}
    )
    num_random: int = field(default=1, metadata={"help": "Draws of fresh random weights of each layer."})
    seed: int | None = field(
        default=None, metadata={"help": "Seed of these, and of the choice of images; that of the run if not set."}
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
        measure(args, data_args)
    except KeyboardInterrupt:
        print("\nStopped. What is finished is kept: the same command goes on from here.", file=sys.stderr)
        sys.exit(130)


def measure(args: RobustnessArguments, data_args: ImageSourceArguments) -> None:
    """Put every layer back to everything, and write what that costs."""
    run = Path(args.model_name_or_path)
    output_dir = Path(args.output_dir or f"outputs/reinitialization/{file_name(args.model_name_or_path)}")
    accelerator = Accelerator()
    if accelerator.num_processes > 1:
        raise ValueError(
            f"this recipe runs in one process, and was started in {accelerator.num_processes}: use python."
        )
    classifier = load_classifier(args.model_name_or_path)
    adopt(args, data_args, classifier)
    snapshots = args.snapshots if args.snapshots is not None else [one.path for one in list_snapshots(run)]
    settings = asdict(data_args) | asdict(args)
    settings["weights"] = digest_weights(classifier.model, [_digest(Path(path)) for path in snapshots])
    goes_on = holds_same_run(output_dir, settings, free=FREE_TO_CHANGE, overwrite=args.overwrite_output_dir)
    batches = load_batches(args, data_args, accelerator)
    if int(batches.labels.max()) >= classifier.num_classes:
        raise ValueError(
            f"the images have labels up to {int(batches.labels.max())}, but {args.model_name_or_path} has "
            f"{classifier.num_classes} classes; name the data that it was trained for with --dataset_name."
        )
    claim_output_dir(output_dir, overwrite=args.overwrite_output_dir, resume=goes_on)
    if not goes_on:
        (output_dir / CELLS_FILE).unlink(missing_ok=True)
    write_json(output_dir / RUN_FILE, settings)

    result = reinitialization_robustness(
        classifier.model.to(accelerator.device),
        snapshots,
        Accuracy(batches, args.max_samples),
        layers=args.layers,
        include_1x1=args.include_1x1,
        include_batch_norm=args.include_batch_norm,
        num_random=args.num_random,
        seed=args.seed or 0,
        fresh=classifier.fresh,
        reuse_activations=args.reuse_activations,
        max_cached_bytes=int(args.cached_gigabytes * 2**30),
        finished=Cells(output_dir / CELLS_FILE),
        progress=not args.disable_tqdm,
    )
    report(result, args, output_dir)


def adopt(args: RobustnessArguments, data_args: ImageSourceArguments, classifier: Classifier) -> None:
    """Take what is not said from the run that trained the model, and from the model."""
    noted = Path(args.model_name_or_path) / RUN_FILE
    run = json.loads(noted.read_text(encoding="utf-8")) if noted.is_file() else {}
    for one in fields(data_args):
        if one.name in run and getattr(data_args, one.name) in (one.default, {}):
            setattr(data_args, one.name, run[one.name])
    args.seed = run.get("seed", 0) if args.seed is None else args.seed
    data_args.image_size = data_args.image_size or list(classifier.image_size)
    data_args.num_channels = data_args.num_channels or classifier.num_channels
    data_args.image_mean = data_args.image_mean or classifier.mean
    data_args.image_std = data_args.image_std or classifier.std


def load_batches(args: RobustnessArguments, data_args: ImageSourceArguments, accelerator: Accelerator) -> ImageBatches:
    """Load the images to measure on as the run saw them."""
    if args.split == "eval":  # without the training images, which may be many
        return load_image_split(
            data_args.dataset_name,
            data_args.eval_split,
            mean=data_args.image_mean or [],
            std=data_args.image_std or [],
            config_name=data_args.dataset_config_name,
            image_column=data_args.image_column_name,
            label_column=data_args.label_column_name,
            image_size=data_args.image_size,
            num_channels=data_args.num_channels,
            max_samples=data_args.max_eval_samples,
            shuffled_pixels=data_args.shuffled_pixels,
            sample_classes=data_args.sample_classes,
            corruption_seed=data_args.corruption_seed,
            skip_corrupt=data_args.skip_corrupt_images,
            cache_dir=data_args.cache_dir,
            num_workers=data_args.dataloader_num_workers,
            batch_size=args.batch_size,
            device=accelerator.device,
            seed=args.seed or 0,
            progress=not args.disable_tqdm,
        ).batches
    sizes = {"per_device_train_batch_size": args.batch_size, "per_device_eval_batch_size": args.batch_size}
    training = TrainingArguments(output_dir="", seed=args.seed or 0, disable_tqdm=args.disable_tqdm, **sizes)
    data = load_data(CLASSIFICATION, ImageDataArguments(**asdict(data_args)), training, accelerator)
    if args.split == "validation" and data.validation is None:
        raise ValueError("no images were held out: --validation_fraction is 0. Choose --split eval or train.")
    return data.train if data.validation is None or args.split == "train" else data.validation


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
        max_samples: Only so many of them; all if None.
    """

    def __init__(self, batches: ImageBatches, max_samples: int | None) -> None:
        self.batches = batches
        self.max_samples = max_samples

    @torch.inference_mode()
    def __call__(self, model: nn.Module) -> float:
        """Measure a model that is in eval mode."""
        right: Any = 0
        seen = 0
        for batch in self.batches.epoch(augment=False):
            left = None if self.max_samples is None else self.max_samples - seen
            labels = batch["labels"][:left]
            output = model(batch["pixel_values"][:left])
            logits = output.logits if hasattr(output, "logits") else output
            right += (logits.argmax(-1) == labels).sum()
            seen += len(labels)
            if seen == self.max_samples:
                break
        return int(right) / seen


class Cells(MutableMapping[str, float]):
    """Accuracies by name, kept in a file line by line, so that a stopped run goes on.

    Args:
        path: A file of JSON lines; read if it is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, float] = {}
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # a kill may have cut the last line
            for line in whole.splitlines():
                self.known |= json.loads(line)
            if whole != text:
                path.write_text(whole, encoding="utf-8")

    def __getitem__(self, name: str) -> float:
        return self.known[name]

    def __setitem__(self, name: str, value: float) -> None:
        self.known[name] = value
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: value}) + "\n")

    def __delitem__(self, name: str) -> None:
        raise TypeError("what has been measured is not forgotten")

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)


def report(result: ReinitializationRobustness, args: RobustnessArguments, output_dir: Path) -> None:
    """Print, write and draw."""
    print(result.table(args.drop))
    result.save(output_dir / "reinitialization.json")
    critical = result.critical_layers(args.drop)
    summary = {"model": args.model_name_or_path, "split": args.split, "accuracy": result.accuracy}
    write_json(output_dir / RESULTS_FILE, summary | {"drop": args.drop, "critical_layers": critical})
    try:
        for suffix in (".png", ".svg"):
            title = Path(args.model_name_or_path).name
            plot_reinitialization(result.to_dict(), title=title, path=output_dir / f"reinitialization{suffix}")
    except ImportError as error:
        print(f"no picture: {error}")
    print(f"\nResults in {output_dir}")


if __name__ == "__main__":
    run_recipe(main)
