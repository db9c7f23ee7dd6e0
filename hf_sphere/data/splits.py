"""Images and targets of one split, before they are converted to batches; splits by class."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from datasets import Dataset, DatasetDict, concatenate_datasets
from torch import Tensor

from hf_sphere.data import sources
from hf_sphere.data.batches import ImageBatches, ImagesFromDisk, ImagesInMemory
from hf_sphere.data.decoding import EncodedImages, ImageShape, check_files, decode_all, probe_shapes, stack_images
from hf_sphere.data.options import ImageSourceOptions, ValueOptions
from hf_sphere.data.sampling import draw_subset
from hf_sphere.data.targets import COMPUTED_VALUES, OPEN_SETS, read_class_names, read_labels, read_values
from hf_sphere.utils.pixels import WHITE
from hf_sphere.utils.seeds import mix_seed

logger = logging.getLogger(__name__)

LARGEST_SIDE_IN_MEMORY = 96
"""Images with sides up to this length are by default decoded once and kept on the device; others are read from disk."""

# Mixed with the seed, so that the draws are independent of each other.
_CLASSES, _NOISE, _PIXELS = 1, 2, 3


@dataclass
class Corruption:
    """Corruption of the images and labels of a dataset: random labels, shuffled pixels, fewer classes.

    From Zhang et al., "Understanding deep learning requires rethinking generalization", ICLR 2017, arXiv:1611.03530.
    The corruption of an image is determined by a seed and by its row in the dataset, so that it is the same after a run
    resumes, in every process, and for any choice of held-out images.
    """

    options: ImageSourceOptions
    seed: int  # unless the options have one

    def __post_init__(self) -> None:
        self.seed = self.seed if self.options.corruption_seed is None else self.options.corruption_seed

    def draw_classes(self, count: int) -> Tensor:
        """Return the indices of the `sample_classes` classes to keep of `count`, in increasing order."""
        kept: Any = self.options.sample_classes
        if kept > count:
            raise ValueError(f"--sample_classes {kept} is more than the data has: {count} classes.")
        return torch.randperm(count, generator=self._generator(_CLASSES))[:kept].sort().values

    def replace_labels(self, labels: Tensor, rows: Tensor, *, num_rows: int, num_classes: int) -> Tensor:
        """Replace round(`label_noise` * N) labels, in an order and by classes drawn for all rows of the dataset."""
        count = round(self.options.label_noise * len(labels))
        order, drawn = torch.rand(2, num_rows, dtype=torch.float64, generator=self._generator(_NOISE))
        replaced = order[rows].argsort(stable=True)[:count]
        noisy = labels.clone()
        noisy[replaced] = (drawn[rows[replaced]] * num_classes).long()
        wrong = int((noisy != labels).sum())
        logger.info("Redrew %d of %d training labels; %d are now wrong.", count, len(labels), wrong)
        return noisy

    def shuffle(self, images: Tensor | EncodedImages, rows: Tensor, split: str) -> Tensor | EncodedImages:
        """Permute the pixels of each image, by its row of the split; encoded images when they are decoded."""
        if self.options.shuffled_pixels is None:
            return images
        if isinstance(images, EncodedImages):
            return replace(images, transform=partial(self.shuffle, split=split))
        pixels, shuffled = images.flatten(2), torch.empty_like(images)
        generator, of_split = self._generator(_PIXELS), mix_seed(self.seed, _PIXELS, *split.encode())
        order = torch.randperm(pixels.shape[2], generator=generator)
        for index, row in enumerate(rows.tolist()):
            if self.options.shuffled_pixels == "per_image":
                order = torch.randperm(len(order), generator=generator.manual_seed(mix_seed(of_split, row)))
            shuffled.flatten(2)[index] = pixels[index][:, order]
        return shuffled

    def _generator(self, draw: int) -> torch.Generator:
        return torch.Generator().manual_seed(mix_seed(self.seed, draw))


@dataclass
class Split:
    """Images and targets of a split."""

    name: str
    num_rows: int  # of the dataset
    images: Tensor | EncodedImages  # encoded, or decoded as uint8 (N, C, H, W)
    rows: Tensor  # (N,) row of the dataset of each image
    classes: Any = None  # (N,) class indices, for tasks with classes
    class_names: list[str] = field(default_factory=list)
    values: Tensor | None = None  # (N,) real values, for tasks with values

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Tensor, images: Tensor | EncodedImages | None = None) -> "Split":
        """Select images by index or by mask; `images` are the selected ones if they have been decoded."""
        if images is None:
            images = self.images[indices] if isinstance(self.images, Tensor) else self.images.select(indices)
        classes = None if self.classes is None else self.classes[indices]
        values = None if self.values is None else self.values[indices]
        return replace(self, images=images, rows=self.rows[indices], classes=classes, values=values)

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
        cls, name: str, rows: Dataset, columns: Mapping[str, Any], shape: ImageShape, class_names: list[str]
    ) -> "Split":
        """Open all images of a split, encoded, with their targets, by the columns `image`, `label` and `value`."""
        label, value = columns.get("label"), columns.get("value")
        classes = None if label is None else read_labels(rows, label, class_names, name)
        values = None if value is None else read_values(rows, value, name)
        images = EncodedImages(rows, columns["image"], shape)
        return cls(name, len(rows), images, torch.arange(len(rows)), classes, class_names, values)

    def prepare(
        self, options: Any, corruption: Corruption, limit: int | None, value: str | None, seed: int, progress: bool
    ) -> "Split":
        """Sample images, decode or check them by the options, compute a value if requested, and shuffle pixels."""
        split = self if limit is None else self.select(draw_subset(len(self), limit, seed))
        encoded, reading = split.images, {"skip_corrupt": options.skip_invalid, "progress": progress}
        assert isinstance(encoded, EncodedImages)
        if value is not None or stays_in_memory(encoded.shape, len(split), options.keep_in_memory):
            reading |= {"cache_dir": options.cache_dir, "num_workers": options.dataloader_num_workers}
            images, good = decode_all(encoded, **reading)
            split = split.select(good, images)
        else:
            split = split.select(check_files(encoded, **reading))
        if value is not None:
            decoded: Any = split.images
            split.values = COMPUTED_VALUES[value](decoded)
        return replace(split, images=corruption.shuffle(split.images, split.rows, split.name))

    def batches(self, num_workers: int | None, **options: Any) -> ImageBatches:
        """Create batches; `options` are those of `ImageBatches`."""
        labels: Any = self.values if self.classes is None else self.classes
        options |= {"rows": self.rows, "regression_labels": None if self.classes is None else self.values}
        if isinstance(self.images, Tensor):
            return ImagesInMemory(self.images, labels, **options)
        return ImagesFromDisk(self.images, labels, num_workers=num_workers, **options)


def open_parts(
    splits: DatasetDict,
    options: ImageSourceOptions,
    task: str,
    values: ValueOptions,
    train_classes: int | None,
    corruption: Corruption,
) -> tuple[dict[str, Split], ImageShape]:
    """Return the parts `train`, `eval` and possibly `validation`, and the image shape.

    Without an evaluation split, a part of the training split is held out, in an open set by its classes.
    """
    train = options.train_split
    names = {"train": train, "eval": sources.choose_eval_split(splits, options.eval_split, train) or train}
    is_held_out = options.eval_split is None and names["eval"] == train
    by_class = train_classes is not None or (task in OPEN_SETS and names["eval"] == train)
    fraction, label_column, value_column, class_names = options.held_out_fraction, None, None, []
    text = "The data has no evaluation split: %g %% of the %s are held out, %s."
    if options.eval_fraction is not None and (train_classes is not None or not is_held_out):
        reason = f"with the evaluation split {names['eval']}" if train_classes is None else "with train_classes"
        raise ValueError(f"eval_fraction {options.eval_fraction} has no effect {reason}; leave it out.")
    if (name := options.validation_split) is not None:
        if by_class:
            raise ValueError(f"all classes are divided, also those of --validation_split {name}; hold out a fraction.")
        sources.check_validation_split(name, names)
        names["validation"] = name
    stratified = None if task == "regression" else sources.stratifying_column(splits, options.label_column_name)
    if is_held_out and not by_class:
        names["train"], names["eval"] = sources.held_out_names(train, fraction, options.eval_seed)
        how = f"{'stratified by class, ' if stratified else ''}with seed {options.eval_seed}, as {names['eval']}"
        logger.info(text, 100 * fraction, f"images of {train}", how)
    tables = {key: sources.find_split(splits, name, f"--{key}_split", stratified) for key, name in names.items()}
    image_column = sources.common_column(tables, options.image_column_name, sources.IMAGE_COLUMNS, "image")
    if task != "regression":
        label_column = sources.common_column(tables, options.label_column_name, sources.LABEL_COLUMNS, "label")
        with_classes = tables["train"]
        if task in OPEN_SETS:
            named = dict(zip(names.values(), tables.values(), strict=True))
            pooled, with_classes = pool(named, image_column, label_column)
        class_names = read_class_names(with_classes, label_column)
        if by_class:
            names, tables = dict.fromkeys(names, pooled), dict.fromkeys(names, with_classes)
        if by_class and train_classes is None:
            count = len(with_classes.unique(label_column))
            train_classes = count - max(round(fraction * count), 2 if count > 3 else 1)
            how = f"the last ones; --train_classes {train_classes}"
            logger.info(text, 100 * fraction, f"{count} classes", how)
    if task in ("regression", "joint") and values.computed_value is None:
        instead = f", or compute a value with --computed_value ({', '.join(COMPUTED_VALUES)})"
        value_column = sources.common_column(tables, values.value_column_name, sources.VALUE_COLUMNS, "value", instead)
    shape = choose_shape(tables["train"], image_column, options)
    columns = {"image": image_column, "label": label_column, "value": value_column}
    opened = {key: Split.of(name, tables[key], columns, shape, class_names) for key, name in names.items()}
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


def pool(rows: dict[str, Dataset], *columns: str) -> tuple[str, Dataset]:
    """Return the joined names and the concatenation of splits."""
    return "+".join(rows), concatenate_datasets([split.select_columns([*columns]) for split in rows.values()])


def stays_in_memory(shape: ImageShape, count: int, keep: str) -> bool:
    """Whether `count` images of this shape are decoded once and kept in memory, by `keep_in_memory`."""
    size, free = count * shape.channels * shape.height * shape.width, psutil.virtual_memory().available
    is_small = max(shape.height, shape.width) <= LARGEST_SIDE_IN_MEMORY
    if keep == "auto" and is_small and 2 * size > free:
        text = "%d decoded images need %.1f of %.1f GB of free memory: they stay on disk, unless --keep_in_memory yes."
        logger.warning(text, count, size / 1e9, free / 1e9)
    return keep == "yes" or (keep == "auto" and is_small and 2 * size <= free)


def choose_shape(rows: Dataset, column: str, options: ImageSourceOptions) -> ImageShape:
    """Return the shape set by the options, by default that of all images, and three channels if some have colors."""
    size, channels = options.image_size, int(options.num_channels or 0)
    shapes = [] if size and channels else probe_shapes(rows, column)
    if size is None:
        sizes = sorted({(shape.height, shape.width) for shape in shapes})
        if len(sizes) > 1:
            least, most = (f"{height} x {width}" for height, width in (sizes[0], sizes[-1]))
            raise ValueError(f"the images have several sizes, such as {least} and {most}. Set image_size, such as 64.")
        size = [*sizes[0]]
    channels = channels or max(shape.channels for shape in shapes)
    resizing = options.crop_pct, options.interpolation or "bilinear", tuple(options.background_color or WHITE)
    return ImageShape(channels, size[0], size[-1], *resizing)


def measure_pixels(images: Tensor | EncodedImages, sample: int = 2000) -> tuple[list[float], list[float]]:
    """Measure mean and standard deviation per channel, on the scale from 0 to 1; on a sample for images on disk."""
    if not isinstance(images, Tensor):
        indices = torch.linspace(0, len(images) - 1, min(sample, len(images))).long().unique().tolist()
        stacked: Any = stack_images(images.__getitems__(indices))[1]
        return measure_pixels(stacked)
    # Counting the 256 values per channel is exact and needs no floating-point copy of the data.
    values = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([channel.reshape(-1).bincount(minlength=256) for channel in images.unbind(1)]).double()
    weights = counts / counts.sum(1, keepdim=True)
    mean = (weights * values).sum(1)
    std = (weights * (values - mean[:, None]).square()).sum(1).sqrt().clamp_min(1 / 255)
    return mean.tolist(), std.tolist()


def find_statistics(
    images: Tensor | EncodedImages, shape: ImageShape, options: ImageSourceOptions
) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel: those of the options, else measured."""
    mean, std = options.image_mean, options.image_std
    if mean is None or std is None:
        measured = measure_pixels(images)
        mean, std = mean or measured[0], std or measured[1]
    mean = np.broadcast_to(np.array(mean, float), shape.channels).tolist()
    return mean, np.broadcast_to(np.array(std, float), shape.channels).tolist()


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
