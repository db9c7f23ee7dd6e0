"""An image data set made ready for training: found columns, classes, splits, statistics, batches."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_sphere.data.augmentation import Augmentation
from hf_sphere.data.batches import ImageBatches
from hf_sphere.data.computed_values import CHANGED_BY, COMPUTED_VALUES
from hf_sphere.data.corruption import Corruption, PixelShuffling
from hf_sphere.data.decoding import ImageShape
from hf_sphere.data.episodes import Episodes, check_episodes
from hf_sphere.data.open_set import first_classes, warn_of_shared_classes
from hf_sphere.data.sources import IMAGE_COLUMNS, LABEL_COLUMNS, choose_eval_split, find_column, find_split, load_splits
from hf_sphere.data.splits import (
    Split,
    check_computable,
    choose_shape,
    find_range,
    hold_out,
    hold_out_classes,
    measure_pixels,
    open_split,
    per_channel,
    put_together,
    read_images,
)
from hf_sphere.data.targets import (
    OPEN_SETS,
    Task,
    check_task,
    find_value_column,
    read_class_names,
    read_labels,
    read_values,
)
from hf_sphere.utils.seeds import mix_seed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageData:
    """What `load_image_data` returns.

    Attributes:
        train: Training batches.
        evaluation: Batches of the split that results are reported on.
        eval_split: Name of that split; of both, as `train+test`, where their images were put together.
        validation: Batches for choosing epochs, if asked for: of a split of their own, or held out of the training
            split; in an open set (retrieval, few-shot) of classes of their own, numbered from 0 on.
        class_names: Name of each class, by index; empty for regression. In an open set those of the training images.
        shape: Shape of the images.
        mean: Mean a channel, on the scale from 0 to 1.
        std: Standard deviation a channel, on the scale from 0 to 1.
        value_range: Smallest and largest real number to learn among the training images (a held-out part left out);
            None for classification.
        eval_class_names: Name of each class of the evaluation images, by index: in an open set those that occur among
            them, else `class_names`.
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
    eval_class_names: list[str] = field(default_factory=list)


def load_image_data(
    name: str,
    *,
    task: Task = "classification",
    config_name: str | None = None,
    train_split: str = "train",
    eval_split: str | None = None,
    validation_split: str | None = None,
    validation_fraction: float = 0.0,
    image_column: str | None = None,
    label_column: str | None = None,
    train_classes: int | None = None,
    value_column: str | None = None,
    computed_value: str | None = None,
    image_size: int | Sequence[int] | None = None,
    num_channels: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    augmentation: Augmentation | None = None,
    episodes: Episodes | None = None,
    validation_episodes: Episodes | None = None,
    eval_episodes: Episodes | None = None,
    max_train_samples: int | None = None,
    max_eval_samples: int | None = None,
    label_noise: float = 0.0,
    shuffled_pixels: PixelShuffling | None = None,
    sample_classes: int | None = None,
    corruption_seed: int | None = None,
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
            `joint`: class indices, and real numbers as `regression_labels`; `retrieval` and `few_shot`, the open sets:
            class indices, where the evaluation images may be of other classes than the training images, and each side
            numbers those that it has, in the order of the data.
        config_name: Configuration of a data set that has several.
        train_split: Split to train on.
        eval_split: Split to report results on; None takes `test`, else `validation`.
        validation_split: Split for choosing epochs. Its classes are those of the training split, or in an open set
            its own.
        validation_fraction: Instead, the share of the training split held out for that; stratified by class if there
            are classes. In an open set it is a share of the classes, with all of their images.
        image_column: Column of the images; found by its usual names if None.
        label_column: Column of the class labels; found by its usual names if None.
        train_classes: In an open set: put the images of both splits together, to train on those of the first so many
            classes and evaluate on all others. None keeps the splits.
        value_column: Column of the real numbers; found by its usual names if None.
        computed_value: Instead of a column: name of a value computed from the pixels, before any augmentation; see
            `hf_sphere.data.computed_values`. Only for images that are kept in memory.
        image_size: Side in pixels, or (height, width), to resize to; None keeps the size of the first image.
        num_channels: 1 or 3; None keeps those of the first image.
        mean: Mean a channel for normalisation; measured on the training images if None.
        std: Standard deviation a channel; measured if None.
        augmentation: Random changes of training images.
        episodes: Make training epochs of these episodes instead of passing over all images.
        validation_episodes: The same for the images that choose the epoch; the same episodes each time, drawn by seeds
            of their own.
        eval_episodes: The same for the images that results are reported on.
        max_train_samples: Use only so many training images, drawn by `seed`.
        max_eval_samples: Use only so many evaluation images, drawn by `seed`.
        label_noise: Share of the training labels, from 0 to 1, that are replaced by a class drawn uniformly over all
            classes, so that at 1 they say nothing of the images. Exactly this share (rounded to whole images) of the
            images trained on; those held out and those evaluated on keep their labels, and all keep their values.
        shuffled_pixels: `per_image` puts the pixels of each image in an order of its own, `shared` those of all images
            in one order, in training, validation and evaluation alike; the channels of a pixel stay together. After
            resizing and after values are computed, before augmentation.
        sample_classes: Keep only so many of the classes in both splits, drawn, and number them in the order of the
            data. In an open set there is `train_classes` instead.
        corruption_seed: Seed of the last three, for the same corruption whatever the seed of training; `seed` if None.
        skip_corrupt: Leave corrupt images out instead of raising.
        cache_dir: Folder for decoded data.
        num_workers: Decoding processes.
        train_batch_size: Images a training batch and process where there are no episodes, which have their own size.
        eval_batch_size: Images an evaluation batch and process.
        device: Where images are kept (if small) and batches are made.
        seed: Seed of order, augmentation, held-out part and subsets.
        process_index: Which of the processes this is.
        num_processes: How many processes share the data.
        progress: Whether to show progress bars.

    Raises:
        ValueError: If a split, column, size, share or number of classes is not possible, a label is outside the
            classes, a value is missing or not finite, or an image is corrupt; the message says what there is.
    """
    check_task(task, label_column, value_column, computed_value, train_classes, episodes)
    corruption = Corruption(
        label_noise, shuffled_pixels, sample_classes, seed if corruption_seed is None else corruption_seed
    )
    corruption.check_task(task)
    splits = load_splits(name, config_name)
    eval_name = choose_eval_split(splits, eval_split)
    split_names = {"train": train_split, "eval": eval_name}
    if validation_split is not None:
        _check_validation_split(validation_split, split_names, validation_fraction, train_classes)
        split_names["validation"] = validation_split
    rows = {key: find_split(splits, split, f"--{key}_split") for key, split in split_names.items()}
    image_column = find_column(rows["train"], image_column, IMAGE_COLUMNS, "image")
    for part_rows in rows.values():
        find_column(part_rows, image_column, (), "image")
    class_names = []
    if task != "regression":
        label_column = find_column(rows["train"], label_column, LABEL_COLUMNS, "label")
        for part_rows in rows.values():
            find_column(part_rows, label_column, (), "label")
        with_classes = rows["train"]
        if task in OPEN_SETS:
            with_classes, together = put_together(rows, split_names, [image_column, label_column])
        class_names = read_class_names(with_classes, label_column)
        if train_classes is not None:
            rows = dict.fromkeys(rows, with_classes)
            split_names = dict.fromkeys(rows, together)
    if task in ("regression", "joint") and computed_value is None:
        value_column = find_value_column(rows["train"], value_column)
        for part_rows in rows.values():
            find_value_column(part_rows, value_column)
    shape = choose_shape(rows["train"], image_column, image_size, num_channels)
    if computed_value is not None:
        check_computable(computed_value, shape)
    if augmentation is not None:
        _warn_of_augmentation(augmentation, class_names, computed_value)

    parts: dict[str, Split] = {}
    for key, split in split_names.items():
        classes = read_labels(rows[key], label_column, class_names, split) if label_column is not None else None
        values = read_values(rows[key], value_column, split) if value_column is not None else None
        parts[key] = open_split(rows[key], image_column, shape, classes, values)
    if train_classes is not None:
        trained = first_classes(parts["train"].known_classes, train_classes)
        parts = {"train": parts["train"].select(trained), "eval": parts["eval"].select(~trained)}
    elif task in OPEN_SETS:
        for key in [key for key in parts if key != "train"]:
            which = {"eval": "evaluation"}.get(key, key)
            warn_of_shared_classes(parts["train"].known_classes, parts[key].known_classes, which)
    if sample_classes is not None:
        kept = corruption.draw_classes(len(class_names))
        parts = {key: part.keep_classes(kept, class_names, split_names[key]) for key, part in parts.items()}
        class_names = [class_names[index] for index in kept]
    most = {"train": max_train_samples, "eval": max_eval_samples}
    for key in parts:
        parts[key] = read_images(
            parts[key].sample(most.get(key), seed),
            skip_corrupt=skip_corrupt,
            cache_dir=cache_dir,
            num_workers=num_workers,
            progress=progress,
        )
        images = parts[key].images
        if computed_value is not None and isinstance(images, Tensor):  # others have been refused
            parts[key].values = COMPUTED_VALUES[computed_value](images)
        parts[key].images = corruption.shuffle(images, parts[key].rows, split_names[key])
    if validation_fraction:
        divide = hold_out_classes if task in OPEN_SETS else hold_out
        parts["train"], parts["validation"] = divide(parts["train"], validation_fraction, seed)
    names = dict.fromkeys(parts, class_names)
    if task in OPEN_SETS:
        names = {key: part.number_classes(class_names) for key, part in parts.items()}
    if label_noise:
        train = parts["train"]
        sizes = {"num_rows": len(rows["train"]), "num_classes": len(names["train"])}
        train.classes = corruption.replace_labels(train.known_classes, train.rows, **sizes)
    value_range = find_range(parts["train"].values) if parts["train"].values is not None else None
    if mean is None or std is None:
        measured_mean, measured_std = measure_pixels(parts["train"].images)
        mean, std = mean or measured_mean, std or measured_std
    mean, std = per_channel(mean, shape, "mean"), per_channel(std, shape, "std")

    drawn = {"train": episodes, "validation": validation_episodes, "eval": eval_episodes}
    for key, part in parts.items():
        if (asked := drawn[key]) is not None:
            what = {"train": "a training", "eval": "an evaluation"}.get(key, f"a {key}")
            check_episodes(part.known_classes, asked, names[key], what)
    common: dict[str, Any] = {"num_workers": num_workers, "mean": mean, "std": std, "device": device}
    common |= {"process_index": process_index, "num_processes": num_processes}

    def held_out(key: str, number: int) -> ImageBatches:
        # Episodes have seeds of their own, or those of the evaluation would follow those of the training.
        size = eval_batch_size if drawn[key] is None else None
        return parts[key].batches(batch_size=size, episodes=drawn[key], seed=mix_seed(seed, number), **common)

    return ImageData(
        train=parts["train"].batches(
            batch_size=train_batch_size if episodes is None else None,
            augmentation=augmentation,
            shuffle=True,
            episodes=episodes,
            seed=seed,
            **common,
        ),
        evaluation=held_out("eval", 1),
        eval_split=split_names["eval"],
        validation=held_out("validation", 2) if "validation" in parts else None,
        class_names=names["train"],
        shape=shape,
        mean=list(mean),
        std=list(std),
        value_range=value_range,
        eval_class_names=names["eval"],
    )


def _check_validation_split(
    name: str, others: Mapping[str, str], validation_fraction: float, train_classes: int | None
) -> None:
    """Refuse a split for choosing epochs that has another part to play, or is one of two such parts."""
    if validation_fraction:
        raise ValueError(
            f"--validation_split {name} and --validation_fraction {validation_fraction} are two sources of images to "
            "choose the epoch on; give one of them."
        )
    if train_classes is not None:
        raise ValueError(
            f"--train_classes {train_classes} divides the classes of all images, and --validation_split {name} would "
            "have some of both sides; hold out training classes with --validation_fraction instead."
        )
    for part, split in others.items():
        if split == name:
            raise ValueError(
                f"--validation_split {name} is the split of --{part}_split too, so the epoch would not be chosen on "
                "images of its own; name another one, or hold out training images with --validation_fraction."
            )


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
