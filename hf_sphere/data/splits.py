"""Images and targets of one split, before they are converted to batches."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from hf_sphere.data.batches import ImageBatches, ImagesFromDisk, ImagesInMemory
from hf_sphere.data.computed_values import COMPUTED_VALUES
from hf_sphere.data.corruption import Corruption
from hf_sphere.data.decoding import (
    CorruptImageError,
    EncodedImages,
    ImageShape,
    decode_all,
    find_good,
    probe_shape,
    stack_images,
)
from hf_sphere.data.open_set import held_out_classes
from hf_sphere.data.options import ImageSourceOptions
from hf_sphere.data.split_names import draw_held_out

LARGEST_SIDE_IN_MEMORY = 96
"""Images with sides up to this length are decoded once and kept on the device; larger ones are read from disk."""


@dataclass
class Split:
    """Images and targets of a split.

    Attributes:
        name: Name of the split.
        num_rows: Rows of the data set.
        images: Encoded, or decoded as uint8 (N, C, H, W).
        rows: (N,) row of the data set of each image.
        classes: (N,) class indices, for tasks with classes.
        values: (N,) real values, for tasks with values.
    """

    name: str
    num_rows: int
    images: Tensor | EncodedImages
    rows: Tensor
    classes: Tensor | None = None
    values: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def known_classes(self) -> Tensor:
        """Class indices, (N,), for tasks with classes."""
        assert self.classes is not None  # checked by `check_task`
        return self.classes

    def select(self, indices: Tensor) -> "Split":
        """Select images by index or by mask."""
        images = self.images[indices] if isinstance(self.images, Tensor) else self.images.select(indices)
        return self._with_images(images, indices)

    def sample(self, count: int | None, seed: int) -> "Split":
        """Select `count` random images, or all of them if `count` is None."""
        if count is None or count >= len(self):
            return self
        if count < 1:
            raise ValueError(f"a subset must have at least one image; got {count}.")
        drawn = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:count]
        return self.select(drawn.sort().values)

    def keep_classes(self, kept: Tensor, names: Sequence[str]) -> "Split":
        """Select the images of some classes, (K,) in increasing order, and number these classes from 0."""
        part = self.select(torch.isin(self.known_classes, kept))
        if len(part) == 0:
            chosen = ", ".join(names[index] for index in kept[:10])
            raise ValueError(
                f"split {self.name!r} has no image of the {len(kept)} selected classes ({chosen}). Use more classes; "
                "those of --sample_classes are drawn with --corruption_seed."
            )
        part.classes = torch.searchsorted(kept, part.known_classes)
        return part

    def number_classes(self, names: Sequence[str]) -> list[str]:
        """Renumber the classes that occur from 0, and return their names."""
        classes, self.classes = self.known_classes.unique(return_inverse=True)
        return [names[index] for index in classes.tolist()]

    def read(self, options: ImageSourceOptions, *, progress: bool) -> "Split":
        """Decode images that are kept in memory; of other images, drop corrupt ones if requested."""
        encoded = self.images
        assert isinstance(encoded, EncodedImages)  # a split is read once
        skip, workers = options.skip_corrupt_images, options.dataloader_num_workers
        if stays_in_memory(encoded.shape):
            images, good = decode_all(
                encoded, skip_corrupt=skip, cache_dir=options.cache_dir, num_workers=workers, progress=progress
            )
            return self._with_images(images, good)
        return self.select(find_good(encoded, num_workers=workers, progress=progress)) if skip else self

    def batches(self, num_workers: int | None, **options: Any) -> ImageBatches:
        """Create batches; `options` are those of `ImageBatches`."""
        labels = self.values if self.classes is None else self.classes
        assert labels is not None  # every task has targets
        options["rows"] = self.rows
        if self.classes is not None:
            options["regression_labels"] = self.values
        if isinstance(self.images, Tensor):
            return ImagesInMemory(self.images, labels, **options)
        workers = min(os.cpu_count() or 1, 16) if num_workers is None else num_workers
        return ImagesFromDisk(self.images, labels, num_workers=workers, **options)

    def _with_images(self, images: Tensor | EncodedImages, indices: Tensor) -> "Split":
        classes, values = (None if part is None else part[indices] for part in (self.classes, self.values))
        return replace(self, images=images, rows=self.rows[indices], classes=classes, values=values)


def prepare_images(
    split: Split,
    options: ImageSourceOptions,
    corruption: Corruption,
    *,
    max_samples: int | None,
    computed_value: str | None = None,
    seed: int,
    progress: bool,
) -> Split:
    """Sample and read images, compute their values if requested, and shuffle their pixels."""
    split = split.sample(max_samples, seed).read(options, progress=progress)
    images = split.images
    if computed_value is not None and isinstance(images, Tensor):  # `check_computable` rejects the others
        split.values = COMPUTED_VALUES[computed_value](images)
    split.images = corruption.shuffle(images, split.rows, split.name)
    return split


def hold_out(split: Split, fraction: float, seed: int, *, by_class: bool) -> tuple[Split, Split]:
    """Hold out a fraction of the classes or images (stratified by class, if any); return rest and held-out part."""
    if by_class:
        chosen = held_out_classes(split.known_classes, fraction, seed)
        return split.select(~chosen), split.select(chosen)
    drawn = draw_held_out(len(split), fraction, seed, split.classes)
    return split.select(~drawn), split.select(drawn)


def find_range(values: Tensor) -> tuple[float, float]:
    """Return the smallest and largest of the training values, (N,), which must differ."""
    smallest, largest = values.min().item(), values.max().item()
    if smallest == largest:
        raise ValueError(
            f"all values of the {len(values)} training images are {smallest:g}; there is nothing to learn."
        )
    return smallest, largest


def stays_in_memory(shape: ImageShape) -> bool:
    """Whether images of this shape are decoded once and kept in memory."""
    return max(shape.height, shape.width) <= LARGEST_SIDE_IN_MEMORY


def check_computable(value: str, shape: ImageShape) -> None:
    """Raise an error if a value cannot be computed from images of this shape, since they are read from disk."""
    if not stays_in_memory(shape):
        raise ValueError(
            f"--computed_value {value} is for images of up to {LARGEST_SIDE_IN_MEMORY} pixels a side, which are kept "
            f"in memory; these have {shape.height} x {shape.width} and are read from disk. Resize them with "
            "--image_size, or name a column of values with --value_column_name."
        )


def choose_shape(rows: Dataset, column: str, options: ImageSourceOptions) -> ImageShape:
    """Return the shape set by the options, by default that of the first image."""
    found = probe_shape(rows, column)
    if options.num_channels not in (None, 1, 3):
        raise ValueError(f"num_channels must be 1 or 3; got {options.num_channels}.")
    height, width = found.height, found.width
    if (size := options.image_size) is not None:
        if len(size) not in (1, 2) or min(size) < 1:
            raise ValueError(f"image_size must be a side in pixels or (height, width); got {size}.")
        height, width = size[0], size[-1]
    return ImageShape(options.num_channels or found.channels, height, width, options.crop_pct)


def measure_pixels(images: Tensor | EncodedImages, sample: int = 2000) -> tuple[list[float], list[float]]:
    """Measure mean and standard deviation per channel, on the scale from 0 to 1; on a sample for images on disk."""
    if not isinstance(images, Tensor):
        chosen = torch.linspace(0, len(images) - 1, min(sample, len(images))).long().unique().tolist()
        _, stacked, error = stack_images(images.__getitems__(chosen))
        if error is not None or stacked is None:
            raise error or CorruptImageError("no image can be decoded.")
        images = stacked
    # Counting the 256 values per channel is exact and needs no floating-point copy of the data.
    values = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in images.unbind(1):
        weights = torch.bincount(channel.reshape(-1), minlength=256).double()
        weights /= weights.sum()
        center = (weights * values).sum()
        mean.append(center.item())
        std.append((weights * (values - center).square()).sum().sqrt().clamp_min(1 / 255).item())
    return mean, std


def find_statistics(
    images: Tensor | EncodedImages, shape: ImageShape, options: ImageSourceOptions
) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel: those of the options, else measured."""
    mean, std = options.image_mean, options.image_std
    if mean is None or std is None:
        measured_mean, measured_std = measure_pixels(images)
        mean, std = mean or measured_mean, std or measured_std
    return _per_channel(mean, shape, "mean"), _per_channel(std, shape, "std")


def _per_channel(values: Sequence[float], shape: ImageShape, what: str) -> list[float]:
    """Repeat a single statistic for all channels."""
    if len(values) not in (1, shape.channels):
        raise ValueError(f"{what} needs one value or {shape.channels} (one per channel); got {list(values)}.")
    if what == "std" and min(values) <= 0:
        raise ValueError(f"std must be positive; got {list(values)}.")
    return [float(value) for value in values] * (shape.channels // len(values))
