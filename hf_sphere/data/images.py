"""Preparation of image datasets for training: columns, classes, splits, statistics, batches."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from datasets import concatenate_datasets
from torch import Tensor

from hf_sphere.data import sources, splits, streams
from hf_sphere.data.augmentation import Augmentation
from hf_sphere.data.batches import ImageBatches
from hf_sphere.data.decoding import EncodedImages, ImageShape, decode_all, probe_shapes
from hf_sphere.data.options import (
    AugmentationOptions,
    DataTask,
    ImageDataOptions,
    ImageSourceOptions,
    OpenSetOptions,
    ValueOptions,
)
from hf_sphere.data.provenance import DataRecord, fingerprint, identify_rows, resolve_split
from hf_sphere.data.sampling import Episodes
from hf_sphere.data.targets import CHANGED_BY, OPEN_SETS, check_task, has_labels, read_class_names
from hf_sphere.utils.model_sources import name_of, preprocessing_of
from hf_sphere.utils.seeds import mix_seed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageData:
    """The result of `load_image_data`.

    Attributes:
        train: Training batches.
        evaluation: Evaluation batches.
        eval_split: Name of the evaluation split, or `train+test` if both splits were pooled.
        validation: Batches for selecting the best epoch, if requested: a validation split, or images held out of the
            training split. In an open set (retrieval, few-shot) their classes differ, and are numbered from 0.
        class_names: Name of each class, by index; empty for regression. In an open set, of the training images.
        shape: Shape of the images.
        mean: Mean per channel, on the scale from 0 to 1.
        std: Standard deviation per channel, on the scale from 0 to 1.
        value_range: Smallest and largest value of the training images (without held-out ones), for tasks with values.
        eval_class_names: Name of each class of the evaluation images, by index: in an open set those that occur among
            them, else `class_names`.
        rejection: Batches to fit a rejection of unknown images to, held out of the training split, if requested.
        record: The images of each part, to be saved with a model that is trained on them; None for a stream.
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
    rejection: ImageBatches | None = None
    record: DataRecord | None = None


@dataclass(frozen=True)
class ImageSplit:
    """The result of `load_image_split`.

    Attributes:
        batches: Batches in the order of the split; `batches.epoch_rows()` are the dataset's rows of its images.
        class_names: Name of each class, by index; empty, and all labels -1, if the split has no labels.
        num_images: Number of images, over all processes.
        name: Name of the split, or `train+test` if both splits were pooled.
        ids: Identity of each row of the split; see `hf_sphere.data.provenance`.
        recorded: Number of the images in each part of the model's record, `train` and so on; empty for other data.
    """

    batches: ImageBatches
    class_names: list[str]
    num_images: int
    name: str
    ids: Tensor
    recorded: dict[str, int]


def load_image_data(
    options: ImageDataOptions,
    task: DataTask = "classification",
    *,
    dataset: Any = None,
    targets: ValueOptions | OpenSetOptions | None = None,
    episodes: Episodes | None = None,
    validation_episodes: Episodes | None = None,
    eval_episodes: Episodes | None = None,
    batch_size: int = 128,
    eval_batch_size: int = 512,
    seed: int = 0,
    progress: bool = True,
    **sharing: Any,
) -> ImageData:
    """Load a labeled image dataset as batches.

    A validation split has the classes of the training split, except in an open set. `max_train_samples` and
    `max_eval_samples` images are sampled with `seed`. Statistics that are not set are measured on the training images.
    Label noise replaces exactly the requested fraction (rounded to images) of the training labels, after images have
    been held out; the true class may be sampled, so with a fraction of 1 labels are independent of the images.
    Held-out and evaluation images keep their labels, and all images keep their values. Pixels are shuffled in all
    splits, after resizing and the computation of values, and before augmentation, with the channels together.

    Args:
        options: The dataset, its columns and splits, the shape of the images, corruption and augmentation. The
            dataset is a bundled one, an id on the Hub or a folder; see `hf_sphere.data.sources.load_splits`. Without
            evaluation split, `eval_fraction` of the images, or in an open set of the classes, is held out.
        dataset: Use this dataset of `datasets` instead: a `Dataset` (the split `train`), a `DatasetDict`, or a
            streaming one, which is copied to the cache, or with `options.streaming` read as it is needed.
        task: `classification`: `labels` are class indices, int64; `regression`: `labels` are real values, float32;
            `joint`: class indices, with real values as `regression_labels`; `retrieval` and `few_shot`, the open sets:
            class indices, numbered separately for training and evaluation images, whose classes may differ, in the
            order of the data.
        targets: For regression and joint prediction, the source of the values (computed values require images that are
            kept in memory); for an open set, the division of the classes.
        episodes: Form training epochs from these episodes instead of from all images.
        validation_episodes: Likewise for validation, with another seed; every epoch has the same episodes.
        eval_episodes: Likewise for evaluation.
        batch_size: Images per training batch and process; ignored with `episodes`, which define the batch size.
        eval_batch_size: Images per evaluation batch and process.
        seed: Seed of order, augmentation, held-out part and subsets, and of corruption without `corruption_seed`.
        progress: Whether to show progress bars.
        **sharing: `device`, `process_index` and `num_processes` of `ImageBatches`.

    Raises:
        ValueError: If a split, column, size, fraction or number of classes is invalid, a label is outside the
            classes, a value is missing or not finite, or an image is corrupt; the message lists what is available.

    Example:
        >>> data = load_image_data(ImageDataOptions(dataset_name="digits"))
        >>> next(data.train.epoch())["pixel_values"].shape
        torch.Size([128, 1, 8, 8])
    """
    values = targets if isinstance(targets, ValueOptions) else ValueOptions()
    train_classes = targets.train_classes if isinstance(targets, OpenSetOptions) else None
    check_task(task, options, values, train_classes, episodes)
    augmentation = Augmentation(**{each.name: getattr(options, each.name) for each in fields(AugmentationOptions)})
    corruption, is_open = splits.Corruption(options, seed), task in OPEN_SETS
    drawn = {"train": episodes, "validation": validation_episodes, "eval": eval_episodes}
    dataset = _load_splits(options, dataset, streaming=options.streaming)
    if options.streaming:
        opened: Any = streams.open_streams(dataset, options, task, any(drawn.values()))
    else:
        opened = splits.open_parts(dataset, options, task, values, train_classes, corruption)
    loaded, shape = opened
    augmentation.check_size(shape.height, shape.width)
    if changing := [f"--{name}" for name in CHANGED_BY.get(values.computed_value or "", ()) if getattr(options, name)]:
        message = "Values are computed before augmentation, and %s change(s) the %s of an image but not its value."
        logger.warning(message, " and ".join(changing), values.computed_value)
    limits = {"train": options.max_train_samples, "eval": options.max_eval_samples}
    for key, split in loaded.items() if not options.streaming else ():
        loaded[key] = split.prepare(options, corruption, limits.get(key), values.computed_value, seed, progress)
    # Rejection first, so that it does not depend on the validation images.
    for key, fraction in (("rejection", options.rejection_fraction), ("validation", options.validation_fraction)):
        if fraction:
            train = loaded["train"]
            if is_open:
                mask = splits.held_out_classes(train.classes, fraction, seed)
            else:
                mask = sources.draw_held_out(len(train), fraction, seed, train.classes)
            loaded["train"], loaded[key] = train.select(~mask), train.select(mask)
    for split in loaded.values() if is_open else ():
        split.number_classes()
    train = loaded["train"]
    if options.label_noise:
        numbers = {"num_rows": train.num_rows, "num_classes": len(train.class_names)}
        train.classes = corruption.replace_labels(train.classes, train.rows, **numbers)
    mean, std = splits.find_statistics(getattr(train, "images", torch.empty(0)), shape, options)
    augmentation.occlusion_color = [255 * value for value in mean]
    sharing |= {"mean": mean, "std": std}
    batches: dict[str, ImageBatches] = {}
    # With the seed of training, the evaluation episodes would equal the training episodes.
    for number, key in enumerate(("train", "eval", "validation", "rejection")):
        if key in loaded:
            own: dict[str, Any] = {"batch_size": eval_batch_size, "seed": mix_seed(seed, number)}
            if key == "train":
                own = {"augmentation": augmentation, "shuffle": True, "balanced": options.class_balanced_sampling}
                own |= {"batch_size": batch_size, "seed": seed}
            workers = options.dataloader_num_workers
            batches[key] = loaded[key].batches(workers, episodes=drawn.get(key), **sharing, **own)
    record = None
    if not options.streaming:
        by = None if task == "regression" else sources.stratifying_column(dataset, options.label_column_name)
        record = DataRecord.of(dataset, loaded, by)
    return ImageData(
        train=batches["train"],
        evaluation=batches["eval"],
        eval_split=loaded["eval"].name,
        validation=batches.get("validation"),
        class_names=train.class_names,
        shape=shape,
        mean=mean,
        std=std,
        value_range=None if train.values is None else (train.values.min().item(), train.values.max().item()),
        eval_class_names=loaded["eval"].class_names,
        rejection=batches.get("rejection"),
        record=record,
    )


def load_image_split(
    source: ImageSourceOptions | str | os.PathLike,
    split: str | None = None,
    *,
    like: Any = None,
    dataset: Any = None,
    record: DataRecord | None = None,
    train_classes: int | None = None,
    select_class: Callable[[str], bool] | None = None,
    max_samples: int | None = None,
    batch_size: int = 512,
    seed: int = 0,
    progress: bool = True,
    **sharing: Any,
) -> ImageSplit:
    """Load one split as in evaluation: in its order and without random changes.

    Args:
        source: A folder or name of a dataset, or options: the dataset, its columns, the shape of the images and the
            corruption, as in training: with the same `seed` or `corruption_seed`, classes and pixels equal
            `load_image_data`. Mean and standard deviation are required, or `like`: the statistics of the split would
            differ from the training. The split may have no labels. Other options are ignored.
        split: Name of the split, or a part of the data, see `hf_sphere.data.sources.read_split`: `all`,
            `train[:80%]`, `held_out(train, 0.2, seed=0)`. None for the evaluation split of
            `load_image_data`, or if a part would be held out of images without labels, for all of them. `training` for
            the images of the record, and `evaluation`, `validation` and `rejection` likewise if there is no split of
            this name.
        like: Prepare the images as for this model: the folder or Hub id of one with an image processor, `timm:<name>`,
            a model loaded from there or by timm, or an image processor. The options must not set its preprocessing.
        record: The images that a model was trained and evaluated on; its evaluation split is then the one of `None`.
            By default the record of the model of `like`.
        dataset: See `load_image_data`.
        train_classes: Instead of the split, load the evaluation images of `load_image_data` for retrieval with this
            option: `options.train_split` and this split, without the first `train_classes` classes.
        select_class: Keep only the images of the classes for whose name this is true.
        max_samples: Use at most this many images, sampled with `seed`.
        batch_size: Images per batch and process.
        seed: Seed of the subset, and of corruption without `corruption_seed`.
        progress: Whether to show progress bars.
        **sharing: `device`, `process_index` and `num_processes` of `ImageBatches`.

    Raises:
        ValueError: If a split, a column, a size or a number of classes is invalid, a label is outside the classes,
            or an image is corrupt; the message lists what is available.

    Example:
        >>> options = ImageSourceOptions(dataset_name="digits", image_mean=[0.5], image_std=[0.5])
        >>> load_image_split(options, "test").batches.labels.shape
        torch.Size([355])
        >>> load_image_split("photos", "all", like="outputs/my-model")  # doctest: +SKIP
    """
    options = source if isinstance(source, ImageSourceOptions) else ImageSourceOptions(os.fspath(source))
    if like is not None:
        options = replace(options, **preprocessing_of(like, options))
        record = DataRecord.read(name) if record is None and (name := name_of(like)) else record
    if options.image_mean is None or options.image_std is None:
        raise ValueError("image_mean and image_std are required to load a split as in evaluation, or a model (like).")
    check_task("classification" if train_classes is None else "retrieval", options, ValueOptions(), train_classes)
    corruption = splits.Corruption(options, seed)
    dataset = _load_splits(options, dataset)
    data, recorded, train = fingerprint(dataset), None, options.train_split
    same_data = record if record is not None and record.data == data else None
    classes = same_data.label_column if same_data else sources.stratifying_column(dataset, options.label_column_name)
    if train_classes is None:
        split, recorded = resolve_split(split, record, dataset, data)
    name = sources.choose_eval_split(dataset, split or options.eval_split, train) or train
    is_divided = name == train and split is options.eval_split is train_classes is None and classes is not None
    if is_divided and has_labels(sources.find_split(dataset, train, "--train_split"), str(classes)):
        name = sources.held_out_names(train, options.held_out_fraction, options.eval_seed)[1]
    rows = with_classes = sources.find_split(dataset, name, "--split", classes)
    image_column = sources.find_column(rows, options.image_column_name, sources.IMAGE_COLUMNS, "image")
    label_column: Any = options.label_column_name or sources.usual_label(rows)
    with_train = train_classes is not None or options.sample_classes is not None
    if with_train or label_column is not None:
        label_column = sources.find_column(rows, label_column, sources.LABEL_COLUMNS, "label")
    if with_train:
        with_classes = sources.find_split(dataset, train, "--train_split")
    elif label_column is not None and not has_labels(rows, label_column):
        label_column = None
    if train_classes is not None:
        name, rows = splits.pool({train: with_classes, name: rows}, image_column, label_column)
        with_classes = rows
    class_names = [] if label_column is None else read_class_names(with_classes, label_column)
    shape = splits.choose_shape(rows, image_column, options)
    images = splits.Split.of(name, rows, {"image": image_column, "label": label_column}, shape, class_names)
    ids = identify_rows(dataset, name, classes, data)
    if recorded is not None:
        images = images.select(torch.isin(ids, recorded))
    if label_column is None:
        images.classes = torch.full((len(images),), -1)
    if train_classes is not None:
        images = images.select(~splits.first_classes(images.classes, train_classes))
    if options.sample_classes is not None:
        images = images.keep_classes(corruption.draw_classes(len(class_names)))
    if select_class is not None:
        kept = [index for index, label in enumerate(images.class_names) if select_class(label)]
        images = images.keep_classes(torch.tensor(kept).long())
    images = images.prepare(options, corruption, max_samples, None, seed, progress)
    if train_classes is not None:
        images.number_classes()
    mean, std = splits.find_statistics(images.images, shape, options)
    batches = images.batches(options.dataloader_num_workers, batch_size=batch_size, mean=mean, std=std, **sharing)
    recorded_ids = same_data.ids if same_data else {}
    used = {key: int(torch.isin(ids[images.rows], of_key).sum()) for key, of_key in recorded_ids.items()}
    return ImageSplit(batches, images.class_names, len(images), images.name, ids, used)


def _load_splits(options: ImageSourceOptions, dataset: Any, *, streaming: bool = False) -> Any:
    if dataset is not None:
        return dataset if streaming else sources.as_splits(dataset)
    named: Any = {"config_name": options.dataset_config_name, "follow_links": options.follow_links}
    return sources.load_splits(options.dataset_name, streaming=streaming, **named)


def load_thumbnails(
    name: str,
    splits: Sequence[str],
    rows: Tensor,
    *,
    config_name: str | None = None,
    image_column: str | None = None,
    side: int = 32,
    cache_dir: str | os.PathLike | None = None,
    progress: bool = True,
) -> Tensor:
    """Load the images of some rows (N,) of a split, or of several, concatenated: uint8, (N, channels, height, width).

    All have the aspect ratio of the first image, and a longest side of at most `side` pixels. An image that cannot be
    decoded is black; it is an error if none can. For `name` see `hf_sphere.data.sources.load_splits`, and for the image
    column, the configuration and the cache folder `ImageSourceOptions`.
    """
    loaded = sources.load_splits(name, config_name)
    parts = [sources.find_split(loaded, split, "--split") for split in splits]
    column = sources.find_column(parts[0], image_column, sources.IMAGE_COLUMNS, "image")
    images = concatenate_datasets([part.select_columns([column]) for part in parts])
    first, *others = probe_shapes(images, column)
    scale = min(1.0, side / max(first.height, first.width))
    channels = max(each.channels for each in (first, *others))
    shape = ImageShape(channels, max(1, round(scale * first.height)), max(1, round(scale * first.width)))
    encoded = EncodedImages(images.select(rows.tolist()), column, shape)
    decoded, good = decode_all(encoded, skip_corrupt=True, cache_dir=cache_dir, progress=progress)
    thumbnails = torch.zeros((len(rows), *decoded.shape[1:]), dtype=torch.uint8)
    thumbnails[good] = decoded
    return thumbnails
