r"""Find the critical layers of a trained network: re-initialize each and measure the drop in accuracy.

hf-sphere reinitialize --model_name_or_path outputs/hyperplanes/cifar10-vgg11
hf-sphere reinitialize --model_name_or_path outputs/random-labels --split train --max_samples 1000
hf-sphere reinitialize --model_name_or_path timm:resnet18.a1_in1k --dataset_name <folder> --num_random 3
hf-sphere reinitialize --model_name_or_path outputs/hyperplanes/cifar100-vgg11 --top_k 5 \
    --heat_map relative_drop --output_dir outputs/reinitialization/cifar100-vgg11-top5

One layer at a time is reset to its weights in each snapshot of the training run, and to new random weights, while the
others stay trained. Data settings and snapshots are read from the folder of the training run. Other models are named
as for `hf-sphere projections`; their layers are reset to random weights only, and images are resized to their input
size without cropping.
Writes `reinitialization.json`, `all_results.json` and the heat map as PNG and SVG. After Ctrl-C, the same command
resumes.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from hf_sphere import data, hyperplanes, visualization
from hf_sphere.data.options import ImageSourceOptions
from hf_sphere.training import output_dir
from hf_sphere.utils.arguments import SEED, Arguments, argument, given_arguments, parse_arguments
from hf_sphere.utils.files import JsonLines, digest_file, write_json

CELLS_FILE, TABLE_FILE = "cells.jsonl", "reinitialization.json"
PLOTS = ("reinitialization.png", "reinitialization.svg")
FILES = (CELLS_FILE, TABLE_FILE, *PLOTS, "all_results.json", "run.json")
FREE_TO_CHANGE = {
    *("output_dir", "overwrite_output_dir", "drop", "heat_map", "batch_size"),
    *("disable_tqdm", "cache_dir", "dataloader_num_workers"),
}
"""Arguments that may differ when a run resumes, since no accuracy depends on them."""


@dataclass
class RobustnessArguments(Arguments):
    """Model, layers and weights."""

    model_name_or_path: str = argument(
        help="An image classifier: folder of a training run, other saved model, Hub repository, or timm:<name>."
    )
    output_dir: str | None = argument(None, "Output folder; default: outputs/reinitialization/<name of the model>.")
    overwrite_output_dir: bool = argument(False, "Replace the results in output_dir.")
    split: Literal["eval", "train", "validation"] = argument(
        "eval",
        "Images to measure on: the evaluation images, the training images with the labels of the training run, or the "
        "held-out images.",
    )
    max_samples: int | None = argument(None, "Measure on at most this many images, sampled at random.", ge=1)
    layers: Literal["conv", "linear", "all"] = argument("all", "Kinds of layers.")
    include_1x1: bool = argument(True, "Include pointwise (1x1) convolutions.")
    include_batch_norm: bool = argument(True, "Reset the batch norm after a layer with it.")
    snapshots: list[str] | None = argument(None, "Snapshot files; default: those in the folder of the training run.")
    num_random: int = argument(1, "Number of random initializations per layer.", ge=0)
    seed: int = argument(0, "Seed of initializations and, without a training run, of the sample of images.", **SEED)
    top_k: int = argument(1, "Top-k accuracy: fraction of images whose class is among the k largest logits.", ge=1)
    heat_map: Literal["accuracy", "relative_drop"] = argument(
        "accuracy", "Quantity of the heat map: the accuracy, or its relative drop, (trained - accuracy) / trained."
    )
    drop: float = argument(0.05, "A layer is critical if its reset reduces the accuracy by more than this.", ge=0, le=1)
    batch_size: int = argument(250, "Images per batch.", ge=1)
    disable_tqdm: bool = argument(False, "Disable the progress bar.")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the accuracies, print them, and write files and plots."""
    args, data_args = parse_arguments((RobustnessArguments, ImageSourceOptions), argv, __doc__)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    from hf_sphere.training.run import start_accelerator
    from hf_sphere.utils.model_sources import file_name, load_classifier
    from hf_sphere.utils.modules import check_input_shape, digest_weights
    from hf_sphere.utils.snapshots import list_snapshots

    name, overwrite = args.model_name_or_path, args.overwrite_output_dir
    output = Path(args.output_dir or f"outputs/reinitialization/{file_name(name)}")
    output_dir.check_results_dir(output, overwrite=overwrite, resume=True)
    accelerator, classifier = start_accelerator(), load_classifier(name)
    path = Path(name)  # the run may be in the parent of `best` or a checkpoint
    run = next((folder for folder in (path, path.parent) if path.exists() and (folder / "run.json").is_file()), None)
    data_seed = adopt_settings(args, data_args, run, classifier, given_arguments(argv))
    folder = run or path
    snapshots: list[Any] = args.snapshots or (list_snapshots(folder) if folder.is_dir() else [])
    settings = asdict(data_args) | asdict(args) | {"data_seed": data_seed}
    digests = [digest_file(Path(getattr(one, "path", one))) or "" for one in snapshots]
    settings["weights"] = digest_weights(classifier.model, digests)
    resume = output_dir.can_resume_results(output, settings, ignored=FREE_TO_CHANGE, overwrite=overwrite)
    batches = load_batches(args, data_args, data_seed, accelerator, classifier.model)
    lowest, highest = int(batches.labels.min()), int(batches.labels.max())
    if lowest < 0 or highest >= classifier.num_classes:
        problem = f"the images have labels from {lowest} to {highest}, but {name} has {classifier.num_classes} classes"
        raise ValueError(f"{problem}; set the dataset that it was trained on with --dataset_name.")
    if args.top_k >= classifier.num_classes:
        limit = f"below the number of classes, {classifier.num_classes}"
        raise ValueError(f"--top_k {args.top_k} must be {limit}; otherwise every image counts as correct.")
    check_input_shape(classifier.model, [data_args.num_channels, data_args.image_size[0], data_args.image_size[-1]])
    num_images = min(args.max_samples or batches.examples_per_epoch, batches.examples_per_epoch)
    images = f"{num_images:,} images of {data_args.dataset_name}, {args.split}"
    print(f"measuring on {images}")
    with ExitStack() as locking:

        def prepare() -> None:
            locking.enter_context(output_dir.results_dir(output, FILES, overwrite=overwrite, resume=resume))
            output_dir.write_settings(output, settings)

        options = ("layers", "include_1x1", "include_batch_norm", "num_random", "seed")
        result = hyperplanes.reinitialization_robustness(
            classifier.model.to(accelerator.device),
            snapshots,
            lambda model: accuracy(model, batches, num_images, args.top_k),
            **{option: getattr(args, option) for option in options},
            fresh=classifier.fresh,
            finished=JsonLines(output / CELLS_FILE, read=resume, prepare=prepare),
            progress=not args.disable_tqdm,
        )
        print(result.table(args.drop))
        result.save(output / TABLE_FILE)
        critical = result.critical_layers(args.drop)
        metric = "accuracy" if args.top_k == 1 else f"top-{args.top_k} accuracy"
        summary = {"model": name, "images": images, "metric": metric, "accuracy": result.accuracy}
        summary |= {"drop": args.drop, "num_critical_layers": len(critical), "critical_layers": critical}
        write_json(output / "all_results.json", summary)
        drawing: Any = {"quantity": args.heat_map, "metric": metric, "title": path.name}
        try:
            for plot in PLOTS:
                visualization.plot_reinitialization(result.to_dict(), path=output / plot, **drawing)
        except ImportError as error:
            print(f"no plots: {error}")
        print(f"\nResults in {output}")


def adopt_settings(
    args: RobustnessArguments, data_args: ImageSourceOptions, run: Path | None, classifier: Any, passed: set[str]
) -> int:
    """Fill in data arguments that were not passed, from the training run or the model; return the data seed."""
    if run is None and "dataset_name" not in passed:
        raise ValueError("the model is not in the folder of a training run; set its dataset with --dataset_name.")
    settings: dict[str, Any] = {} if run is None else output_dir.read_settings(run) or {}
    if "train_classes" in settings or "value_column_name" in settings:
        raise ValueError(f"{run} is not a run of hf-sphere train classification; other tasks have no accuracy.")
    for one in fields(data_args):
        if one.name in settings and one.name not in passed | {"cache_dir"}:  # which may be a folder of another machine
            setattr(data_args, one.name, settings[one.name])
    data_args.fill(classifier.preprocessing)
    return settings.get("seed", args.seed)


def load_batches(
    args: RobustnessArguments, data_args: ImageSourceOptions, seed: int, accelerator: Any, model: Any = None
) -> "data.ImageBatches":
    """Load the images to measure on, with the settings and the seed of the training run, and the classes of a model."""
    from hf_sphere.ood.outputs import class_indices

    common = {"device": accelerator.device, "seed": seed, "progress": not args.disable_tqdm}
    if args.split == "eval":  # without loading the training images
        # A smaller sample with the same seed is a subset of a larger one.
        limit = min(filter(None, (args.max_samples, data_args.max_eval_samples)), default=None)
        images = data.load_image_split(data_args, max_samples=limit, batch_size=args.batch_size, **common)
        indices = class_indices(model, images.class_names or [])  # the split may lack classes of the training
        if indices is not None:
            images.batches.labels = indices.to(accelerator.device)[images.batches.labels]
        return images.batches
    options = data.ImageDataOptions(**asdict(data_args))
    splits = data.load_image_data(options, batch_size=args.batch_size, eval_batch_size=args.batch_size, **common)
    if args.split == "train":
        return splits.train
    if splits.validation is None:
        raise ValueError("no images were held out, since --validation_fraction is 0. Choose --split eval or train.")
    if args.max_samples is not None:
        raise ValueError("--max_samples is for --split eval and train; validation uses all held-out images.")
    return splits.validation


def accuracy(model: Any, batches: "data.ImageBatches", num_images: int, top_k: int = 1) -> float:
    """Return the top-k accuracy of a model in eval mode on the first images of the first epoch."""
    import torch

    correct, seen = 0, 0
    with torch.inference_mode():
        for batch in batches.epoch(augment=False):
            labels = batch["labels"][: num_images - seen]
            output = model(batch["pixel_values"][: num_images - seen])
            logits = getattr(output, "logits", output)
            best = logits.sort(descending=True, stable=True).indices[:, :top_k]  # of equal ones, the first
            correct += int((best == labels[:, None]).sum())
            seen += len(labels)
            if seen == num_images:
                break
    return correct / seen
