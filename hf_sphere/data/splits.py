"""Images and targets of one split, before they are converted to batches; splits by class."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch
from datasets import Dataset, DatasetDict, concatenate_datasets
from torch import Tensor

from hf_sphere.data import decoding, sources
from hf_sphere.data.batches import ImageBatches, ImagesFromDisk, ImagesInMemory
from hf_sphere.data.corruption import Corruption
from hf_sphere.data.options import ImageSourceOptions, ValueOptions
from hf_sphere.data.sampling import draw_subset
from hf_sphere.data.targets import COMPUTED_VALUES, OPEN_SETS, read_class_names, read_labels, read_values
from hf_sphere.utils.pixels import WHITE

logger = logging.getLogger(__name__)

LARGEST_SIDE_IN_MEMORY = 96
"""Images with sides up to this length are by default decoded once and kept on the device; others are read from disk."""


@dataclass
class Split:
    """Images and targets of a split."""

    name: str
    num_rows: int  # of the dataset
    images: Tensor | decoding.EncodedImages  # encoded, or decoded as uint8 (N, C, H, W)
    rows: Tensor  # (N,) row of the dataset of each image
    classes: Any = None  # (N,) class indices, for tasks with classes
    class_names: list[str] = field(default_factory=list)
    values: Tensor | None = None  # (N,) real values, for tasks with values
    num_transparent: int = 0  # images with an alpha channel or a transparent color

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Tensor) -> "Split":
        """Select images by index or by mask."""
        images = self.images[indices] if isinstance(self.images, Tensor) else self.images.select(indices)
        return self._with_images(images, indices)

    def keep_classes(self, kept: Tensor) -> "Split":
        """Select the images of some classes, (K,) in increasing order, and number these classes from 0."""
        split = self.select(torch.isin(self.classes, kept))
        split.class_names = [self.class_names[index] for index in kept]
        if len(split) == 0:
            what = f"no image of the {len(kept)} selected classes ({', '.join(split.class_names[:10])})"
            raise ValueError(f"split {self.name!r} has {what}; use more classes, or another --corruption_seed.")
        split.classes = torch.searchsorted(kept, split.classes)
        return split

    def number_classes(self) -> None:
        """Renumber the classes that occur from 0."""
        classes, self.classes = self.classes.unique(return_inverse=True)
        self.class_names = [self.class_names[index] for index in classes.tolist()]

    @classmethod
    def of(
        cls, name: str, rows: Dataset, columns: Mapping[str, Any], shape: decoding.ImageShape, class_names: list[str]
    ) -> "Split":
        """Open all images of a split, encoded, with their targets, by the columns `image`, `label` and `value`."""
        label, value = columns.get("label"), columns.get("value")
        classes = None if label is None else read_labels(rows, label, class_names, name)
        values = None if value is None else read_values(rows, value, name)
        images = decoding.EncodedImages(rows, columns["image"], shape)
        return cls(name, len(rows), images, torch.arange(len(rows)), classes, class_names, values)

    def prepare(
        self, options: Any, corruption: Corruption, limit: int | None, value: str | None, seed: int, progress: bool
    ) -> "Split":
        """Sample images, decode or check them by the options, compute a value if requested, and shuffle pixels."""
        is_whole = limit is None or limit >= len(self)
        split = self if is_whole else self.select(draw_subset(len(self), limit or 0, seed))
        encoded, reading = split.images, {"skip_corrupt": options.skip_unreadable_images, "progress": progress}
        assert isinstance(encoded, decoding.EncodedImages)
        if stays_in_memory(encoded.shape, len(split), options.keep_in_memory):
            reading |= {"cache_dir": options.cache_dir, "num_workers": options.dataloader_num_workers}
            split = split._with_images(*decoding.decode_all(encoded, **reading))
        else:
            good = decoding.check_files(encoded, **reading)
            decoding.report_left_out(encoded, good)
            split = split.select(good)
        if value is not None:
            if not isinstance(split.images, Tensor):
                size = f"{encoded.shape.height} x {encoded.shape.width}"
                how = f"images in memory; these are {size}: set --image_size or --keep_in_memory yes"
                raise ValueError(f"--computed_value {value} needs {how}.")
            split.values = COMPUTED_VALUES[value](split.images)
        images = corruption.shuffle(split.images, split.rows, split.name)
        return replace(split, images=images, num_transparent=encoded.num_transparent)

    def batches(self, num_workers: int | None, **options: Any) -> ImageBatches:
        """Create batches; `options` are those of `ImageBatches`."""
        labels: Any = self.values if self.classes is None else self.classes
        options |= {"rows": self.rows, "regression_labels": None if self.classes is None else self.values}
        if isinstance(self.images, Tensor):
            return ImagesInMemory(self.images, labels, **options)
        return ImagesFromDisk(self.images, labels, num_workers=num_workers, **options)

    def _with_images(self, images: Tensor | decoding.EncodedImages, indices: Tensor) -> "Split":
        classes, values = (None if targets is None else targets[indices] for targets in (self.classes, self.values))
        return replace(self, images=images, rows=self.rows[indices], classes=classes, values=values)


def open_parts(
    splits: DatasetDict,
    options: ImageSourceOptions,
    task: str,
    values: ValueOptions,
    train_classes: int | None,
    corruption: Corruption,
) -> tuple[dict[str, Split], decoding.ImageShape]:
    """Return the parts `train`, `eval` and possibly `validation`, and the image shape."""
    rows = sources.choose_splits(splits, options, task, train_classes)
    tables = {key: split for key, (_, split) in rows.items()}
    image_column = sources.common_column(tables, options.image_column_name, sources.IMAGE_COLUMNS, "image")
    label_column, value_column, class_names = None, None, []
    if task != "regression":
        label_column = sources.common_column(tables, options.label_column_name, sources.LABEL_COLUMNS, "label")
        with_classes = tables["train"]
        if task in OPEN_SETS:
            pooled = pool(dict(rows.values()), [image_column, label_column])
            with_classes = pooled[1]
            if train_classes is None and rows["eval"][0] == rows["train"][0]:  # there is no evaluation split
                train_classes = sources.count_training_classes(with_classes, label_column, options)
            rows = rows if train_classes is None else dict.fromkeys(rows, pooled)
        class_names = read_class_names(with_classes, label_column)
    if task in ("regression", "joint") and values.computed_value is None:
        instead = f", or compute a value with --computed_value ({', '.join(COMPUTED_VALUES)})"
        value_column = sources.common_column(tables, values.value_column_name, sources.VALUE_COLUMNS, "value", instead)
    shape = choose_shape(tables["train"], image_column, options)
    columns = {"image": image_column, "label": label_column, "value": value_column}
    opened = {key: Split.of(name, table, columns, shape, class_names) for key, (name, table) in rows.items()}
    if train_classes is not None:
        trained = first_classes(opened["train"].classes, train_classes)
        opened = {"train": opened["train"].select(trained), "eval": opened["eval"].select(~trained)}
        if task == "retrieval" and len(opened["eval"].classes.unique()) == 1:
            logger.warning("All evaluation images are of one class, so retrieval scores are 100 %; use more classes.")
    elif label_column is not None:
        warn_of_classes(opened, task in OPEN_SETS)
    if options.sample_classes is not None:
        kept = corruption.draw_classes(len(class_names))
        opened = {key: split.keep_classes(kept) for key, split in opened.items()}
    return opened, shape


def pool(rows: dict[str, Dataset], columns: list[str]) -> tuple[str, Dataset]:
    """Return the joined names and the concatenation of splits."""
    return "+".join(rows), concatenate_datasets([split.select_columns(columns) for split in rows.values()])


def stays_in_memory(shape: decoding.ImageShape, count: int, keep: str) -> bool:
    """Whether `count` images of this shape are decoded once and kept in memory, by `keep_in_memory`."""
    size, free = count * shape.channels * shape.height * shape.width, psutil.virtual_memory().available
    is_small = max(shape.height, shape.width) <= LARGEST_SIDE_IN_MEMORY
    if keep == "auto" and is_small and 2 * size > free:
        text = "%d decoded images need %.1f of %.1f GB of free memory: they stay on disk, unless --keep_in_memory yes."
        logger.warning(text, count, size / 1e9, free / 1e9)
    return keep == "yes" or (keep == "auto" and is_small and 2 * size <= free)


def choose_shape(rows: Dataset, column: str, options: ImageSourceOptions) -> decoding.ImageShape:
    """Return the shape set by the options, by default that of all images, and three channels if some have colors."""
    size, channels = options.image_size, int(options.num_channels or 0)
    shapes = [] if size and channels else decoding.probe_shapes(rows, column)
    if size is None:
        sizes = sorted({(shape.height, shape.width) for shape in shapes})
        how = "Set image_size, such as --image_size 224, or 64 for small networks."
        if len(sizes) > 1:
            least, most = (f"{height} x {width}" for height, width in (sizes[0], sizes[-1]))
            raise ValueError(f"the images have several sizes, such as {least} and {most}. {how}")
        if max(sizes[0]) > 256:
            logger.warning("No image_size is set, so the images keep their size, %d x %d. %s", *sizes[0], how)
        size = [*sizes[0]]
    channels = channels or max(shape.channels for shape in shapes)
    resizing = options.crop_pct, options.interpolation or "bilinear", tuple(options.background_color or WHITE)
    return decoding.ImageShape(channels, size[0], size[-1], *resizing)


def measure_pixels(images: Tensor | decoding.EncodedImages, sample: int = 2000) -> tuple[list[float], list[float]]:
    """Measure mean and standard deviation per channel, on the scale from 0 to 1; on a sample for images on disk."""
    if not isinstance(images, Tensor):
        indices = torch.linspace(0, len(images) - 1, min(sample, len(images))).long().unique().tolist()
        _, stacked, error = decoding.stack_images(images.__getitems__(indices))
        if error is not None or stacked is None:
            raise error or decoding.CorruptImageError("no image can be decoded.")
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
    images: Tensor | decoding.EncodedImages, shape: decoding.ImageShape, options: ImageSourceOptions
) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel: those of the options, else measured."""
    mean, std = options.image_mean, options.image_std
    if mean is None or std is None:
        measured = measure_pixels(images)
        mean, std = mean or measured[0], std or measured[1]
    for values in (mean, std):
        if len(values) not in (1, shape.channels):
            raise ValueError(f"mean and std need one value or {shape.channels} (one per channel); got {[*values]}.")
    mean, std = ([float(value) for value in values] * (shape.channels // len(values)) for values in (mean, std))
    return mean, std


def first_classes(labels: Tensor, count: int) -> Tensor:
    """Return a mask of the images of the first `count` of the classes (N,) that occur, which must leave others."""
    classes = labels.unique()
    if not 1 <= count < len(classes):
        how = f"use at least 1 and at most {len(classes) - 1}, or name a split of other classes by --eval_split"
        raise ValueError(f"--train_classes {count} does not divide {len(classes)} classes: {how}.")
    return labels < classes[count]


def held_out_classes(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """Return a mask of the images of a random fraction of the classes (N,) that occur: at least one in each part."""
    classes = labels.unique()
    if len(classes) < 2:
        raise ValueError(f"validation_fraction={fraction} holds out whole classes; there must be at least two.")
    count = min(max(round(fraction * len(classes)), 1), len(classes) - 1)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))
    return torch.isin(labels, classes[order[:count]])


def warn_of_classes(parts: dict[str, Split], is_open: bool) -> None:
    """Warn of an open set whose parts share classes with training, or else of evaluation classes without training."""
    trained, names = parts["train"].classes.unique(), parts["train"].class_names
    for key, split in list(parts.items())[1:]:
        evaluated = split.classes.unique()
        is_trained = torch.isin(evaluated, trained)
        if is_open and is_trained.any():
            text = "%d of the %d classes of the %s split are trained on, so this is not an open set; "
            text += "--train_classes makes one."
            logger.warning(text, int(is_trained.sum()), len(evaluated), "evaluation" if key == "eval" else key)
        elif not is_open and key == "eval" and not is_trained.all():
            untrained = [names[index] for index in evaluated[~is_trained].tolist()]
            text = "%d class(es) of the evaluation images have no training image: %s. Slices follow the order of data."
            logger.warning(text, len(untrained), ", ".join(untrained[:10]))
