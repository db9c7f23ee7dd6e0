"""An image data set made ready for training: found columns, classes, splits, statistics, batches."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import ClassLabel, Dataset
from sklearn.model_selection import StratifiedShuffleSplit
from torch import Tensor

from hf_sphere.data.batches import Augmentation, ImageBatches, ImagesFromDisk, ImagesInMemory
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
        class_names: Name of each class, by index.
        shape: Shape of the images.
        mean: Mean a channel, on the scale from 0 to 1.
        std: Standard deviation a channel, on the scale from 0 to 1.
    """

    train: ImageBatches
    evaluation: ImageBatches
    eval_split: str
    validation: ImageBatches | None
    class_names: list[str]
    shape: ImageShape
    mean: list[float]
    std: list[float]


@dataclass
class _Split:
    """Images and labels between loading and batching."""

    images: Tensor | EncodedImages
    labels: Tensor

    def select(self, indices: Tensor) -> "_Split":
        images = self.images[indices] if isinstance(self.images, Tensor) else self.images.select(indices)
        return _Split(images, self.labels[indices])


def load_image_data(
    name: str,
    *,
    config_name: str | None = None,
    train_split: str = "train",
    eval_split: str | None = None,
    validation_fraction: float = 0.0,
    image_column: str | None = None,
    label_column: str | None = None,
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
        config_name: Configuration of a data set that has several.
        train_split: Split to train on.
        eval_split: Split to report results on; None takes `test`, else `validation`.
        validation_fraction: Share of the training split, stratified by class, held out for choosing epochs.
        image_column: Column of the images; found by its usual names if None.
        label_column: Column of the labels; found by its usual names if None.
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
        ValueError: If a split, column, size or share is not possible, a label is outside the classes, or an image is
            corrupt; the message says what there is.
    """
    splits = load_splits(name, config_name)
    eval_name = eval_split or next((s for s in ("test", "validation", "valid") if s in splits), "test")
    rows = {
        "train": find_split(splits, train_split, "--train_split"),
        "eval": find_split(splits, eval_name, "--eval_split"),
    }
    image_column = find_column(rows["train"], image_column, IMAGE_COLUMNS, "image")
    label_column = find_column(rows["train"], label_column, LABEL_COLUMNS, "label")
    for split in rows:
        find_column(rows[split], image_column, (), "image")
        find_column(rows[split], label_column, (), "label")
    class_names = _class_names(rows["train"], label_column)
    shape = _choose_shape(rows["train"], image_column, image_size, num_channels)
    if augmentation is not None and augmentation.horizontal_flip and _looks_like_text(class_names):
        logger.warning("Mirrored digits are not digits: --horizontal_flip is on for classes named %s.", class_names)

    reading: dict[str, Any] = {"num_workers": num_workers, "progress": progress}
    parts: dict[str, _Split] = {}
    for key, split, count in (("train", train_split, max_train_samples), ("eval", eval_name, max_eval_samples)):
        labels = _labels(rows[key], label_column, class_names, split)
        used = _subset(len(labels), count, seed)
        encoded = EncodedImages(rows[key], image_column, shape, used)
        part = _Split(encoded, labels[used])
        if max(shape.height, shape.width) <= LARGEST_SIDE_IN_MEMORY:
            images, good = decode_all(encoded, skip_corrupt=skip_corrupt, cache_dir=cache_dir, **reading)
            part = _Split(images, part.labels[good])
        elif skip_corrupt:
            part = part.select(find_good(encoded, **reading))
        parts[key] = part
    if validation_fraction:
        parts["train"], parts["validation"] = _hold_out(parts["train"], validation_fraction, seed)
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
    )


def _batches(split: _Split, num_workers: int | None, **options: Any) -> ImageBatches:
    if isinstance(split.images, Tensor):
        return ImagesInMemory(split.images, split.labels, **options)
    workers = min(os.cpu_count() or 1, 16) if num_workers is None else num_workers
    return ImagesFromDisk(split.images, split.labels, num_workers=workers, **options)


def _subset(total: int, count: int | None, seed: int) -> Tensor:
    if count is None or count >= total:
        return torch.arange(total)
    if count < 1:
        raise ValueError(f"a subset must have at least one image; got {count}.")
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def _class_names(rows: Dataset, column: str) -> list[str]:
    feature = rows.features[column]
    if isinstance(feature, ClassLabel):
        return list(feature.names)
    values = set(rows.unique(column)) - {None}
    if any(isinstance(value, (float, list, dict)) for value in values):
        raise ValueError(f"label column {column!r} holds {feature}; class labels are integers or names.")
    return [str(value) for value in sorted(values)]


def _labels(rows: Dataset, column: str, class_names: list[str], split: str) -> Tensor:
    if None in rows.unique(column):
        first = list(rows[column]).index(None)
        raise ValueError(f"label column {column!r} has missing values: image {first} in split {split!r} is the first.")
    values = rows.with_format("numpy")[column][:]
    if isinstance(rows.features[column], ClassLabel):
        labels = torch.as_tensor(values, dtype=torch.int64)
        outside = ((labels < 0) | (labels >= len(class_names))).nonzero()[:, 0]
        if len(outside):
            first = int(outside[0])
            raise ValueError(
                f"label {int(labels[first])} of image {first} in split {split!r} is outside the classes 0 to "
                f"{len(class_names) - 1}. Does this split have labels? Choose another one with --eval_split."
            )
        return labels
    index = {name: i for i, name in enumerate(class_names)}
    unknown = sorted({str(value) for value in values} - set(index))
    if unknown:
        raise ValueError(f"split {split!r} has classes that the training split lacks: {', '.join(unknown[:10])}.")
    return torch.tensor([index[str(value)] for value in values])


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
    splitter = StratifiedShuffleSplit(1, test_size=fraction, random_state=seed)
    labels = split.labels.numpy()
    try:
        kept, held_out = next(splitter.split(labels, labels))
    except ValueError as error:
        raise ValueError(f"validation_fraction={fraction} does not split {len(labels)} images: {error}") from error
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


def _looks_like_text(class_names: list[str]) -> bool:
    return {str(digit) for digit in range(10)} <= set(class_names)
