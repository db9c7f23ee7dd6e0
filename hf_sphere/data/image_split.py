"""One split of an image data set, loaded as a trained model is to see it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_sphere.data.batches import ImageBatches
from hf_sphere.data.corruption import Corruption, PixelShuffling
from hf_sphere.data.open_set import first_classes
from hf_sphere.data.sources import IMAGE_COLUMNS, LABEL_COLUMNS, choose_eval_split, find_column, find_split, load_splits
from hf_sphere.data.splits import choose_shape, open_split, per_channel, put_together, read_images
from hf_sphere.data.targets import read_class_names, read_labels


@dataclass(frozen=True)
class ImageSplit:
    """What `load_image_split` returns.

    Attributes:
        batches: Batches in the order of the split; `batches.epoch_rows()` are the rows that its images come from.
        class_names: Name of each class, by index; empty, and all labels -1, if the split has no labels.
        num_images: Images in all, over all processes.
        name: Name of the split; of both, as `train+test`, where their images were put together.
    """

    batches: ImageBatches
    class_names: list[str]
    num_images: int
    name: str


def load_image_split(
    name: str,
    split: str | None,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    config_name: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    train_classes: int | None = None,
    train_split: str = "train",
    image_size: int | Sequence[int] | None = None,
    num_channels: int | None = None,
    max_samples: int | None = None,
    shuffled_pixels: PixelShuffling | None = None,
    sample_classes: int | None = None,
    corruption_seed: int | None = None,
    skip_corrupt: bool = False,
    cache_dir: str | os.PathLike | None = None,
    num_workers: int | None = None,
    batch_size: int = 512,
    device: torch.device | str = "cpu",
    seed: int = 0,
    process_index: int = 0,
    num_processes: int = 1,
    progress: bool = True,
) -> ImageSplit:
    """Load one split as a trained model is to see it, in its order and without random changes.

    Args:
        name: Embedded data set, id on the Hub, or folder; see `hf_sphere.data.sources.load_splits`.
        split: Name of the split; None for the one that `load_image_data` evaluates on.
        mean: Mean a channel, as in training; the model's image processor has it.
        std: Standard deviation a channel, likewise.
        config_name: Configuration of a data set that has several.
        image_column: Column of the images; found by its usual names if None.
        label_column: Column of the class labels; if None, found by its usual names or else there are no labels.
        train_classes: Instead of the split, load what retrieval by `load_image_data` evaluates on with this number: the
            images of the training split and of this one, but for the first so many classes, and number their classes.
        train_split: The split trained on, put before the other one for `train_classes`, and the one that classes are
            drawn from for `sample_classes`.
        image_size: Side in pixels, or (height, width), to resize to; None keeps the size of the first image.
        num_channels: 1 or 3; None keeps those of the first image.
        max_samples: Use only so many images, drawn by `seed`.
        shuffled_pixels: As in the training by `load_image_data`; gives the same images as it does.
        sample_classes: Likewise; the same classes.
        corruption_seed: Likewise; `seed` if None.
        skip_corrupt: Leave corrupt images out instead of raising.
        cache_dir: Folder for decoded data.
        num_workers: Decoding processes.
        batch_size: Images a batch and process.
        device: Where images are kept (if small) and batches are made.
        seed: Seed of the subset.
        process_index: Which of the processes this is.
        num_processes: How many processes share the data.
        progress: Whether to show progress bars.

    Raises:
        ValueError: If a split, a column, a size or a number of classes is not possible, a label is outside the classes,
            or an image is corrupt; the message says what there is.
    """
    corruption = Corruption(0.0, shuffled_pixels, sample_classes, seed if corruption_seed is None else corruption_seed)
    corruption.check_task("classification" if train_classes is None else "retrieval")
    splits = load_splits(name, config_name)
    split = choose_eval_split(splits, split)
    rows = find_split(splits, split, "--split")
    image_column = find_column(rows, image_column, IMAGE_COLUMNS, "image")
    class_names, classes = [], torch.full((len(rows),), -1)
    wants_labels = label_column is not None or train_classes is not None or sample_classes is not None
    if wants_labels or not set(LABEL_COLUMNS).isdisjoint(rows.column_names):
        label_column = find_column(rows, label_column, LABEL_COLUMNS, "label")
        if train_classes is not None:
            both = {"train": find_split(splits, train_split, "--train_split"), "eval": rows}
            find_column(both["train"], image_column, (), "image")
            find_column(both["train"], label_column, (), "label")
            rows, split = put_together(both, {"train": train_split, "eval": split}, [image_column, label_column])
        with_classes = rows
        if sample_classes is not None:
            with_classes = find_split(splits, train_split, "--train_split")
            find_column(with_classes, label_column, (), "label")
        class_names = read_class_names(with_classes, label_column)
        classes = read_labels(rows, label_column, class_names, split)
    shape = choose_shape(rows, image_column, image_size, num_channels)
    part = open_split(rows, image_column, shape, classes)
    if train_classes is not None:
        part = part.select(~first_classes(classes, train_classes))
    if sample_classes is not None:
        kept = corruption.draw_classes(len(class_names))
        part = part.keep_classes(kept, class_names, split)
        class_names = [class_names[index] for index in kept]
    part = read_images(
        part.sample(max_samples, seed),
        skip_corrupt=skip_corrupt,
        cache_dir=cache_dir,
        num_workers=num_workers,
        progress=progress,
    )
    part.images = corruption.shuffle(part.images, part.rows, split)
    if train_classes is not None:
        class_names = part.number_classes(class_names)
    batches = part.batches(
        num_workers=num_workers,
        batch_size=batch_size,
        mean=per_channel(mean, shape, "mean"),
        std=per_channel(std, shape, "std"),
        device=device,
        process_index=process_index,
        num_processes=num_processes,
    )
    return ImageSplit(batches, class_names, len(part), split)
