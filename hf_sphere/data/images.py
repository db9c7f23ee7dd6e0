"""An image data set made ready for training: found columns, classes, splits, statistics, batches."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit
from torch import Tensor

from hf_sphere.data.augmentation import Augmentation
from hf_sphere.data.batches import ImageBatches, ImagesFromDisk, ImagesInMemory
from hf_sphere.data.computed_values import CHANGED_BY, COMPUTED_VALUES
from hf_sphere.data.decoding import (
    CorruptImageError,
    EncodedImages,
    ImageShape,
    decode_all,
    find_good,
    probe_shape,
    stack_images,
)
from hf_sphere.data.sources import IMAGE_COLUMNS, LABEL_COLUMNS, find_column, find_split, load_splits
from hf_sphere.data.targets import Task, check_task, find_value_column, read_class_names, read_labels, read_values

logger = logging.getLogger(__name__)

LARGEST_SIDE_IN_MEMORY = 96
"""Images up to this many pixels a side are decoded once and kept on the device; larger ones stream from disk."""


@dataclass(frozen=True)
class ImageData:
    """What `load_image_data` returns.

    Attributes:
        train: Training batches.
        evaluation: Batches of the split that results are reported on.
        eval_split: Name of that split.
        validation: Batches held out of the training split for choosing epochs, if asked for.
        class_names: Name of each class, by index; empty for regression.
        shape: Shape of the images.
        mean: Mean a channel, on the scale from 0 to 1.
        std: Standard deviation a channel, on the scale from 0 to 1.
        value_range: Smallest and largest real number to learn among the training images (a held-out part left out);
            None for classification.
    """

    train: ImageBatches
    evaluation: ImageBatches
    eval_split: str
    validation: ImageBatches | None
    class_names: list[str]
    shape: ImageShape
    mean: list[float]
    std: list[float]
    value_range: tuple[float, float] | None = None


@dataclass
class _Split:
    """Images and targets between loading and batching; at least one of the targets is there."""

    images: Tensor | EncodedImages
    classes: Tensor | None
    values: Tensor | None

    def select(self, indices: Tensor) -> "_Split":
        images = self.images[indices] if isinstance(self.images, Tensor) else self.images.select(indices)
        return _Split(images, _pick(self.classes, indices), _pick(self.values, indices))


def load_image_data(
    name: str,
    *,
    task: Task = "classification",
    config_name: str | None = None,
    train_split: str = "train",
    eval_split: str | None = None,
    validation_fraction: float = 0.0,
    image_column: str | None = None,
    label_column: str | None = None,
    value_column: str | None = None,
    computed_value: str | None = None,
    image_size: int | Sequence[int] | None = None,
    num_channels: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    augmentation: Augmentation | None = None,
    max_train_samples: int | None = None,
    max_eval_samples: int | None = None,
    skip_corrupt: bool = False,
    cache_dir: str | os.PathLike | None = None,
    num_workers: int | None = None,
    train_batch_size: int = 128,
    eval_batch_size: int = 512,
    device: torch.device | str = "cpu",
    seed: int = 0,
    process_index: int = 0,
    num_processes: int = 1,
    progress: bool = True,
) -> ImageData:
    """Load any labelled image data set and make batches of it.

    Args:
        name: Embedded data set, id on the Hub, or folder; see `hf_sphere.data.sources.load_splits`.
        task: `classification`: `labels` are class indices, int64; `regression`: `labels` are real numbers, float32;
            `joint`: class indices, and real numbers as `regression_labels`.
        config_name: Configuration of a data set that has several.
        train_split: Split to train on.
        eval_split: Split to report results on; None takes `test`, else `validation`.
        validation_fraction: Share of the training split held out for choosing epochs; stratified by class if there
            are classes.
        image_column: Column of the images; found by its usual names if None.
        label_column: Column of the class labels; found by its usual names if None.
        value_column: Column of the real numbers; found by its usual names if None.
        computed_value: Instead of a column: name of a value computed from the pixels, before any augmentation; see
            `hf_sphere.data.computed_values`. Only for images that are kept in memory.
        image_size: Side in pixels, or (height, width), to resize to; None keeps the size of the first image.
        num_channels: 1 or 3; None keeps those of the first image.
        mean: Mean a channel for normalisation; measured on the training images if None.
        std: Standard deviation a channel; measured if None.
        augmentation: Random changes of training images.
        max_train_samples: Use only so many training images, drawn by `seed`.
        max_eval_samples: Use only so many evaluation images, drawn by `seed`.
        skip_corrupt: Leave corrupt images out instead of raising.
        cache_dir: Folder for decoded data.
        num_workers: Decoding processes.
        train_batch_size: Images a training batch and process.
        eval_batch_size: Images an evaluation batch and process.
        device: Where images are kept (if small) and batches are made.
        seed: Seed of order, augmentation, held-out part and subsets.
        process_index: Which of the processes this is.
        num_processes: How many processes share the data.
        progress: Whether to show progress bars.

    Raises:
        ValueError: If a split, column, size or share is not possible, a label is outside the classes, a value is
            missing or not finite, or an image is corrupt; the message says what there is.
    """
    check_task(task, label_column, value_column, computed_value)
    splits = load_splits(name, config_name)
    eval_name = eval_split or next((s for s in ("test", "validation", "valid") if s in splits), "test")
    rows = {
        "train": find_split(splits, train_split, "--train_split"),
        "eval": find_split(splits, eval_name, "--eval_split"),
    }
    image_column = find_column(rows["train"], image_column, IMAGE_COLUMNS, "image")
    find_column(rows["eval"], image_column, (), "image")
    class_names = []
    if task != "regression":
        label_column = find_column(rows["train"], label_column, LABEL_COLUMNS, "label")
        find_column(rows["eval"], label_column, (), "label")
        class_names = read_class_names(rows["train"], label_column)
    if task != "classification" and computed_value is None:
        value_column = find_value_column(rows["train"], value_column)
        find_value_column(rows["eval"], value_column)
    shape = _choose_shape(rows["train"], image_column, image_size, num_channels)
    in_memory = max(shape.height, shape.width) <= LARGEST_SIDE_IN_MEMORY
    if computed_value is not None and not in_memory:
        raise ValueError(
            f"--computed_value {computed_value} is for images of up to {LARGEST_SIDE_IN_MEMORY} pixels a side, which "
            f"are kept in memory; these have {shape.height} x {shape.width} and stream from disk. Make them smaller "
            "with --image_size, or name a column of values with --value_column_name."
        )
    if augmentation is not None:
        _warn_of_augmentation(augmentation, class_names, computed_value)

    reading: dict[str, Any] = {"num_workers": num_workers, "progress": progress}
    parts: dict[str, _Split] = {}
    for key, split, count in (("train", train_split, max_train_samples), ("eval", eval_name, max_eval_samples)):
        classes = read_labels(rows[key], label_column, class_names, split) if label_column is not None else None
        values = read_values(rows[key], value_column, split) if value_column is not None else None
        used = _subset(len(rows[key]), count, seed)
        encoded = EncodedImages(rows[key], image_column, shape, used)
        part = _Split(encoded, _pick(classes, used), _pick(values, used))
        if in_memory:
            images, good = decode_all(encoded, skip_corrupt=skip_corrupt, cache_dir=cache_dir, **reading)
            values = _pick(part.values, good) if computed_value is None else COMPUTED_VALUES[computed_value](images)
            part = _Split(images, _pick(part.classes, good), values)
        elif skip_corrupt:
            part = part.select(find_good(encoded, **reading))
        parts[key] = part
    if validation_fraction:
        parts["train"], parts["validation"] = _hold_out(parts["train"], validation_fraction, seed)
    value_range = _range(parts["train"].values) if parts["train"].values is not None else None
    if mean is None or std is None:
        measured_mean, measured_std = _measure(parts["train"].images)
        mean, std = mean or measured_mean, std or measured_std
    mean, std = _per_channel(mean, shape, "mean"), _per_channel(std, shape, "std")

    common = {"mean": mean, "std": std, "device": device, "seed": seed}
    common |= {"process_index": process_index, "num_processes": num_processes}
    held_out = {"batch_size": eval_batch_size, **common}
    return ImageData(
        train=_batches(
            parts["train"], num_workers, batch_size=train_batch_size, augmentation=augmentation, shuffle=True, **common
        ),
        evaluation=_batches(parts["eval"], num_workers, **held_out),
        eval_split=eval_name,
        validation=_batches(parts["validation"], num_workers, **held_out) if validation_fraction else None,
        class_names=class_names,
        shape=shape,
        mean=list(mean),
        std=list(std),
        value_range=value_range,
    )


def _batches(split: _Split, num_workers: int | None, **options: Any) -> ImageBatches:
    labels = split.values if split.classes is None else split.classes
    assert labels is not None  # every task has targets
    if split.classes is not None:
        options["regression_labels"] = split.values
    if isinstance(split.images, Tensor):
        return ImagesInMemory(split.images, labels, **options)
    workers = min(os.cpu_count() or 1, 16) if num_workers is None else num_workers
    return ImagesFromDisk(split.images, labels, num_workers=workers, **options)


def _pick(targets: Tensor | None, indices: Tensor) -> Tensor | None:
    return None if targets is None else targets[indices]


def _range(values: Tensor) -> tuple[float, float]:
    smallest, largest = values.min().item(), values.max().item()
    if smallest == largest:
        raise ValueError(
            f"all values of the {len(values)} training images are {smallest:g}; there is nothing to learn."
        )
    return smallest, largest


def _subset(total: int, count: int | None, seed: int) -> Tensor:
    if count is None or count >= total:
        return torch.arange(total)
    if count < 1:
        raise ValueError(f"a subset must have at least one image; got {count}.")
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def _choose_shape(
    rows: Dataset, column: str, image_size: int | Sequence[int] | None, num_channels: int | None
) -> ImageShape:
    found = probe_shape(rows, column)
    if num_channels not in (None, 1, 3):
        raise ValueError(f"num_channels must be 1 or 3; got {num_channels}.")
    height, width = found.height, found.width
    if image_size is not None:
        sides = [image_size] if isinstance(image_size, int) else list(image_size)
        if len(sides) not in (1, 2) or min(sides) < 1:
            raise ValueError(f"image_size must be a side in pixels or (height, width); got {image_size}.")
        height, width = sides[0], sides[-1]
    return ImageShape(num_channels or found.channels, height, width)


def _hold_out(split: _Split, fraction: float, seed: int) -> tuple[_Split, _Split]:
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"validation_fraction must lie between 0 and 1; got {fraction}.")
    splitter = (ShuffleSplit if split.classes is None else StratifiedShuffleSplit)(
        1, test_size=fraction, random_state=seed
    )
    count = len(split.images)
    try:
        kept, held_out = next(splitter.split(torch.arange(count).numpy(), split.classes))
    except ValueError as error:
        raise ValueError(f"validation_fraction={fraction} does not split {count} images: {error}") from error
    return split.select(torch.as_tensor(kept).sort().values), split.select(torch.as_tensor(held_out).sort().values)


def _measure(images: Tensor | EncodedImages, sample: int = 2000) -> tuple[list[float], list[float]]:
    """Mean and standard deviation a channel on the scale from 0 to 1; of an even sample if images are on disk."""
    if not isinstance(images, Tensor):
        chosen = torch.linspace(0, len(images) - 1, min(sample, len(images))).long().unique().tolist()
        _, stacked, error = stack_images(images.__getitems__(chosen))
        if error is not None or stacked is None:
            raise error or CorruptImageError("no image can be decoded.")
        images = stacked
    # Counting the 256 values a channel is exact and needs no floating copy of the data.
    values = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in images.unbind(1):
        weights = torch.bincount(channel.reshape(-1), minlength=256).double()
        weights /= weights.sum()
        center = (weights * values).sum()
        mean.append(center.item())
        std.append((weights * (values - center).square()).sum().sqrt().clamp_min(1 / 255).item())
    return mean, std


def _per_channel(values: Sequence[float], shape: ImageShape, what: str) -> list[float]:
    if len(values) not in (1, shape.channels):
        raise ValueError(f"{what} needs one value or {shape.channels} (one a channel); got {list(values)}.")
    if what == "std" and min(values) <= 0:
        raise ValueError(f"std must be positive; got {list(values)}.")
    return [float(value) for value in values] * (shape.channels // len(values))


def _warn_of_augmentation(augmentation: Augmentation, class_names: list[str], computed_value: str | None) -> None:
    if augmentation.horizontal_flip and {str(digit) for digit in range(10)} <= set(class_names):
        logger.warning("Mirrored digits are not digits: --horizontal_flip is on for classes named %s.", class_names)
    changing = [f"--{name}" for name in CHANGED_BY.get(computed_value or "", ()) if getattr(augmentation, name)]
    if changing:
        logger.warning(
            "Values are computed before augmentation, and %s change(s) the %s of an image but not its value.",
            " and ".join(changing),
            computed_value,
        )
