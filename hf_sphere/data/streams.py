"""Images of a streaming dataset of `datasets`: read from its shards as they are needed, and not copied to disk."""

import itertools
import logging
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from datasets import ClassLabel, Image, IterableDataset
from torch import Tensor

from hf_sphere.data import folders, sources
from hf_sphere.data.batches import ImageBatches
from hf_sphere.data.decoding import CorruptImageError, ImageShape, corrupt, decode_image, load_batches
from hf_sphere.data.options import ImageDataOptions
from hf_sphere.data.splits import choose_shape
from hf_sphere.utils.modules import to_device
from hf_sphere.utils.seeds import mix_seed
from hf_sphere.utils.texts import damage

logger = logging.getLogger(__name__)

_REFUSED = (
    *("validation_fraction", "rejection_fraction", "sample_classes", "label_noise", "shuffled_pixels"),
    *("class_balanced_sampling", "alternating_flip"),
)


@dataclass(frozen=True)
class StreamSplit(torch.utils.data.Dataset):
    """A split of a stream; its items, decoded images, are requested by record, description, augmentation and seed."""

    name: str
    rows: IterableDataset
    columns: tuple[str, str]  # of images and labels
    class_names: list[str]
    shape: ImageShape
    count: int  # images per epoch, over all processes
    options: ImageDataOptions
    values: None = None

    def batches(self, num_workers: int | None, **options: Any) -> "ImageStream":
        """Create batches; `options` are those of `ImageBatches`."""
        return ImageStream(self, num_workers=num_workers, **options)

    def read(self, seed: int | None) -> Iterator[tuple[Any, int, str]]:
        """Yield the encoded image, class index and description of each row, shuffled by the seed if there is one."""
        rows, place, (image, label) = self.rows, -1, self.columns
        are_indices = isinstance(rows.features[label], ClassLabel)
        index = {str(i) if are_indices else name: i for i, name in enumerate(self.class_names)}
        name = self.options.dataset_name
        is_checked = os.path.isdir(name) and not self.options.follow_links
        if seed is not None:
            rows = rows.shuffle(seed=seed, buffer_size=self.options.shuffle_buffer_size)
        for place, row in enumerate(itertools.islice(rows, self.count)):
            record = row[image] or {}
            if is_checked and record.get("bytes") is None:
                folders.check_inside(name, [record["path"]])
            known = [record.get("path"), row.get("__key__"), row.get("__url__")]
            described = ", ".join([*filter(None, known), f"number {place} of the epoch in the split {self.name!r}"])
            if (number := index.get(str(row[label]))) is None:
                raise ValueError(f"label {row[label]!r} of an image ({described}) is none of the {len(index)} classes.")
            yield row[image], number, described
        if place + 1 < self.count:
            option = "max_eval_samples" if seed is None else "max_train_samples"
            found = f"the stream of the split {self.name!r} ended after {place + 1} images of {self.count}"
            raise ValueError(f"{found}; set {option} to the number of its images, or less.")

    def __getitems__(self, requests: list[tuple[Any, ...]]) -> list[Any]:
        return [self._decode(*request) for request in requests]

    def _decode(self, record: dict[str, Any] | None, described: str, *draw: Any) -> Tensor | CorruptImageError:
        try:
            return decode_image(record, self.shape, *draw)
        except Exception as error:  # of PIL and its plugins, of many classes
            return corrupt(f"an image ({described})", damage(error))


class ImageStream(ImageBatches):
    """Batches of a streaming dataset, whose rows the main process reads and worker processes decode.

    In training, each epoch shuffles the shards, and their rows by a buffer. Every process reads all rows, and decodes
    one of `num_processes` in turn: no image is lost or repeated, whatever the number and sizes of the shards, and the
    order is the same for any number of processes and workers. Resuming in the middle of an epoch reads earlier rows
    again. `labels` are -1, and `epoch_rows` is an error. Batches are smaller if unreadable images are skipped.

    Args:
        split: The images and labels.
        num_workers: Number of decoding processes; None for one per core, but at most 16.
        **options: See `ImageBatches`; class-balanced sampling, episodes and alternating flips are impossible.

    Example:
        >>> options = ImageDataOptions("photos", streaming=True, max_train_samples=1_281_167)  # doctest: +SKIP
        >>> load_image_data(options).train  # doctest: +SKIP
    """

    _in_workers = True

    def __init__(self, split: StreamSplit, *, num_workers: int | None = 2, **options: Any) -> None:
        super().__init__(torch.full((split.count,), -1), **options)
        self.split, self.num_workers = split, num_workers
        self.rows = None  # known only when images are read, so `epoch_rows` is an error

    def _examples(self, epoch: int, start: int, draws: Iterator[list[Any]]) -> Iterator[tuple[Tensor, dict, Any]]:
        labels: deque[list[int]] = deque()  # of the batches that are being decoded
        rows = self.split.read(mix_seed(self.seed, epoch) if self.shuffle else None)
        missing = -self.split.count % self.num_processes if self.shuffle else 0  # repeated, as in other training
        first = list(itertools.islice(rows, min(missing, self.split.count)))
        ordered = itertools.chain(first, rows, itertools.islice(itertools.cycle(first), missing))
        mine = itertools.islice(ordered, self.process_index, None, self.num_processes)
        mine = itertools.islice(mine, start * self.batch_size, min(len(self) * self.batch_size, self._num_local()))

        def requests() -> Iterator[list[Any]]:
            while batch := list(itertools.islice(mine, self.batch_size)):
                labels.append([label for _, label, _ in batch])
                yield [(record, text, *draw) for (record, _, text), draw in zip(batch, next(draws), strict=False)]

        pin = self.device.type == "cuda"
        for mask, images, error in load_batches(self.split, requests(), self.num_workers, pin=pin):
            classes = torch.tensor(labels.popleft())[mask]
            if error is not None and (images is None or not self.split.options.skip_invalid):
                raise error
            if error is not None:
                logger.warning("Left out %d image(s) of a batch: %s", int((~mask).sum()), error)
            yield to_device(images, self.device), {"labels": to_device(classes, self.device)}, None


def open_streams(
    splits: Any, options: ImageDataOptions, task: str, has_episodes: bool
) -> tuple[dict[str, StreamSplit], ImageShape]:
    """Return the parts and the image shape; what neither the dataset nor an option states is an error."""
    refused = [f"{name} {value}" for name in _REFUSED if (value := getattr(options, name))]
    refused += ["episodes"] * has_episodes + [f"task {task}"] * (task != "classification")
    refused += ["keep_in_memory yes"] * (options.keep_in_memory == "yes")
    if refused:
        raise ValueError(f"{refused[0]} needs all images or labels before training; leave it or streaming out.")
    splits = splits if isinstance(splits, dict) else {"train": splits}
    evaluation = sources.choose_eval_split(splits, options.eval_split, options.train_split)
    names = {"train": options.train_split, "eval": evaluation, "validation": options.validation_split}
    needed = ("image_size", "num_channels", "image_mean", "image_std")
    missing = [name for name in needed if getattr(options, name) is None]
    missing += ["eval_split (no images can be held out)"] * (evaluation is None)
    class_names: Any = options.class_names
    opened: dict[str, Any] = {}
    for key, name in names.items():
        if name is None:
            continue
        if name not in splits:
            raise ValueError(f"a stream has whole splits, {', '.join(splits)}, but no {name!r}; choose --{key}_split.")
        rows = splits[name].with_format(None)
        rows = rows if rows.features is not None else rows._resolve_features()  # reads the first rows
        image = sources.find_column(rows, options.image_column_name, sources.IMAGE_COLUMNS, "image")
        sources.encoded_images(rows, image)  # checks the column
        label = sources.find_column(rows, options.label_column_name, sources.LABEL_COLUMNS, "label")
        class_names = class_names or getattr(rows.features[label], "names", None)
        if (own := getattr(rows.features[label], "names", class_names)) != class_names:
            raise ValueError(f"split {name!r} has the classes {own[:10]}, but others are expected.")
        stated = (rows.info.splits or {}).get(name)
        option = "max_train_samples" if key == "train" else "max_eval_samples"
        counts = [count for count in (stated and stated.num_examples, getattr(options, option)) if count]
        missing += [] if counts else [f"{option} (the number of images of {name!r})"]
        rows = rows.cast_column(image, Image(decode=False))
        opened[key] = {"name": name, "rows": rows, "columns": (image, label), "count": min(counts, default=0)}
    if class_names is None or len({*class_names}) < len(class_names):
        missing.append("class_names (different ones, which the labels do not list)")
    if missing:
        raise ValueError(f"a stream is not read before training, so set {', '.join(missing)}.")
    logger.info("The images of a stream are not recorded: evaluation images that were trained on are not noticed.")
    shape = choose_shape(opened["train"]["rows"], opened["train"]["columns"][0], options)
    shared: Any = {"class_names": class_names, "shape": shape, "options": options}
    return {key: StreamSplit(**each, **shared) for key, each in opened.items()}, shape
