"""Batches of images on the training device: indexed, augmented and normalized as tensors."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from hf_sphere.data.augmentation import Augmentation, mix_images
from hf_sphere.data.decoding import EncodedImages, load_batches
from hf_sphere.data.sampling import Episodes, EpisodeSampler, SharedExamples
from hf_sphere.utils.checks import check_integer
from hf_sphere.utils.modules import to_device
from hf_sphere.utils.seeds import mix_seed


@dataclass(eq=False, repr=False)
class ImageBatches(SharedExamples, IterableDataset):
    """Batches `{"pixel_values", "labels"}` of one split; the base class for data in memory and on disk.

    Iteration yields the batches of the epoch of `set_epoch`, also through `DataLoader(batches, batch_size=None)`. The
    Trainer of transformers takes them as datasets with `data_collator=ImageBatches.collate` and
    `per_device_train_batch_size=1`; it divides them among processes, so `num_processes` must be 1. `SphereTrainer`
    takes them as they are.

    Batches of images with two targets also have `regression_labels`, mixed ones `mixed_labels` and `mixed_share`.

    Order and augmentation are determined by (`seed`, epoch, batch), so that every batch can be reproduced and a run can
    resume in the middle of an epoch. Where workers augment images, the place in the epoch takes the place of the batch,
    so that the result is the same for any number of processes. Processes get interleaved parts of the same order. In
    training the parts are equally long: if the number of images is not a multiple of the number of processes, a few
    images are repeated. In evaluation every image occurs once. With episodes, batches consist
    of episodes, which `EpisodeSampler` divides among processes.

    Args:
        labels: (N,) class indices, or real values for regression.
        regression_labels: (N,) real values, in addition to classes.
        rows: (N,) row of the dataset of each image; 0 to N - 1 if None.
        batch_size: Images per batch and process; with episodes, they define it.
        mean: Mean per channel, on the scale from 0 to 1.
        std: Standard deviation per channel, on the scale from 0 to 1.
        device: Device of the batches.
        augmentation: Random augmentation; None for evaluation.
        shuffle: Whether to shuffle in each epoch, as in training.
        balanced: Whether to draw an epoch's images with replacement, each class with the same probability.
        episodes: Form epochs from these episodes, sampled with `seed`, instead of from all images.
        seed: Seed of order and augmentation.
        process_index: Index of this process.
        num_processes: Number of processes that share the data.

    Raises:
        ValueError: If sizes do not match, or episodes cannot be drawn from the labels.
    """

    labels: Tensor
    _: KW_ONLY
    mean: Sequence[float]
    std: Sequence[float]
    regression_labels: Tensor | None = None
    rows: Any = None
    augmentation: Augmentation | None = None
    balanced: bool = False
    episodes: Episodes | None = None

    dealt_together = 1
    """Number of consecutive images that a process gets at a time: those of an episode, or one."""

    _in_workers = False  # whether the processes that decode images do their part of the augmentation
    _sampler = None  # of the episodes
    _fetch: ClassVar[Any]
    """Yields uint8 images (B, C, H, W) on the device for each of some batches of indices; `draws` are for workers."""

    def __post_init__(self) -> None:
        for name in ("regression_labels", "rows"):
            if (beside := getattr(self, name)) is not None and len(beside) != len(self.labels):
                raise ValueError(f"{len(self.labels)} labels need as many {name}; got {len(beside)}.")
        self.device, self.num_examples, self._epoch = torch.device(self.device), len(self.labels), 0
        self._per_batch = self.augmentation
        if self.augmentation is not None and self._in_workers:
            of_workers: Any = {"random_resized_crop": None, "crop_aspect_ratio": 4 / 3, "rand_augment": None}
            self._per_batch = replace(self.augmentation, horizontal_flip=False, **of_workers)
        self.rows = torch.arange(self.num_examples) if self.rows is None else self.rows
        if self.balanced:
            _, inverse, counts = self.labels.cpu().unique(return_inverse=True, return_counts=True)
            self._weights = 1 / counts[inverse].double()
        flips = torch.Generator().manual_seed(mix_seed(self.seed, -1))
        self._flips = torch.randint(2, (self.num_examples,), generator=flips)
        if self.episodes is not None:
            sharing = {"process_index": self.process_index, "num_processes": self.num_processes}
            self._sampler = EpisodeSampler(self.labels, self.episodes, seed=self.seed, **sharing)
            self.batch_size, self.dealt_together = self.episodes.batch_size, self.episodes.size
        for name in ("labels", "regression_labels"):
            if (targets := getattr(self, name)) is not None:
                setattr(self, name, targets.to(self.device))
        spread = torch.tensor(self.std, dtype=torch.float32, device=self.device)
        center = torch.tensor(self.mean, dtype=torch.float32, device=self.device)
        self._scale = (1 / (255 * spread))[:, None, None]
        self._shift = (-center / spread)[:, None, None]

    def __len__(self) -> int:
        """Batches per epoch and process."""
        count = self._num_local()
        # Batch norm cannot train on a single image, so a training batch of one is dropped (unless it is the only one).
        leftover_of_one = self.shuffle and count % self.batch_size == 1 and count > self.batch_size
        return math.ceil(count / self.batch_size) - leftover_of_one

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, as of samplers of torch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if get_worker_info() is not None:  # each worker would make all batches
            raise ValueError("image batches are made on their device by the main process; leave out num_workers.")
        return self.epoch(self._epoch)

    @staticmethod
    def collate(batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Concatenate batches; a data collator for loaders that combine several items."""
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def epoch(self, epoch: int = 0, *, start: int = 0, augment: bool = True) -> Iterator[dict[str, Tensor]]:
        """Yield the batches of an epoch, starting with batch `start`; augmented only if `augment` is set."""
        examples = self._examples(epoch, start, self._draws(epoch, start, augment))
        for step, (images, targets, indices) in enumerate(examples, start):
            generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch, step + 1, self.process_index))
            augmentation = self._per_batch if augment else None
            if augmentation is not None:
                mirrored = (self._flips[indices] + epoch) % 2 == 1 if augmentation.alternating_flip else None
                images = augmentation(images, generator, mirrored)
            batch = {"pixel_values": self._normalize(images), **targets}
            if augmentation is not None and (augmentation.mixup or augmentation.cutmix):
                batch = mix_images(batch, augmentation, generator)
            yield batch

    def epoch_rows(self, epoch: int = 0) -> Tensor:
        """Return the row of the dataset of each image of an epoch, in the order of the batches, int64 on the CPU."""
        return self.rows[self._order(epoch)[: len(self) * self.batch_size]]

    def take(self, indices: Tensor, batch_size: int) -> Iterator[Tensor]:
        """Yield images by index, (N,) on the CPU, without augmentation: float32 (`batch_size`, C, H, W)."""
        plain: Any = itertools.repeat(itertools.repeat((None, 0)))
        if len(indices):
            yield from map(self._normalize, self._fetch(list(indices.split(batch_size)), plain))

    def episode_indices(self, epoch: int = 0) -> Tensor:
        """Return the index of each image in the episodes of an epoch, if any, over all processes, int64 on the CPU.

        Returns:
            (count, classes, examples).
        """
        sampler: Any = self._sampler
        return sampler.indices(epoch, every=True).unflatten(1, (sampler.episodes.classes, -1))

    def _normalize(self, images: Tensor) -> Tensor:
        images = images.to(torch.float32, memory_format=torch.channels_last)
        return images.mul_(self._scale).add_(self._shift)

    def _examples(self, epoch: int, start: int, draws: Iterator[list[Any]]) -> Iterator[tuple[Tensor, dict, Any]]:
        """Yield the uint8 images (B, C, H, W), targets and indices of each batch of an epoch."""
        batches = list(self._order(epoch).split(self.batch_size))[start : len(self)]
        for images, indices in zip(self._fetch(batches, draws), batches, strict=True):
            used = to_device(indices, self.device)
            targets = {"labels": self.labels[used]}
            if self.regression_labels is not None:
                targets["regression_labels"] = self.regression_labels[used]
            yield images, targets, indices

    def _draws(self, epoch: int, start: int, augment: bool) -> Iterator[list[Any]]:
        """Yield what workers do with each image of a batch, and a seed by its place in the epoch of all processes."""
        augmentation, size = self.augmentation if augment and self._in_workers else None, self.dealt_together
        for step in itertools.count(start):
            turns = (divmod(i, size) for i in range(step * self.batch_size, (step + 1) * self.batch_size))
            places = [(turn * self.num_processes + self.process_index) * size + rest + 1 for turn, rest in turns]
            yield [(augmentation, mix_seed(self.seed, epoch, place)) for place in places]

    def _num_local(self) -> int:
        return super()._num_local() if self._sampler is None else self._sampler.num_episodes * self.dealt_together

    def _order(self, epoch: int) -> Tensor:
        return super()._order(epoch) if self._sampler is None else self._sampler.indices(epoch).flatten()


class ImagesInMemory(ImageBatches):
    """Decoded images kept on the training device.

    Args:
        images: uint8, (N, C, H, W).
        labels: (N,) class indices, or real values for regression.
        **options: See `ImageBatches`.

    Example:
        >>> batches = ImagesInMemory(torch.zeros(60, 1, 8, 8), labels, batch_size=16, mean=[0.5], std=[0.5])
        >>> next(batches.epoch())["pixel_values"].shape
        torch.Size([16, 1, 8, 8])
    """

    def __init__(self, images: Tensor, labels: Tensor, **options: Any) -> None:
        super().__init__(labels, **options)
        self.images = images.to(self.device)

    def _fetch(self, batches: list[Tensor], draws: Iterator[list[Any]]) -> Iterator[Tensor]:
        for indices in batches:
            yield self.images[to_device(indices, self.device)]


class ImagesFromDisk(ImageBatches):
    """Images decoded by worker processes during training.

    Args:
        encoded: The images; a corrupt image raises an error when its batch is loaded.
        labels: (N,) class indices, or real values for regression.
        num_workers: Number of decoding processes; None for one per core, but at most 16.
        **options: See `ImageBatches`.

    Example:
        >>> batches = ImagesFromDisk(encoded, labels, batch_size=16, mean=[0.5], std=[0.5])  # doctest: +SKIP
    """

    def __init__(self, encoded: EncodedImages, labels: Tensor, *, num_workers: int | None = 2, **options: Any) -> None:
        # Pixels are shuffled at the size of the model, and before augmentation.
        self._in_workers = encoded.transform is None
        super().__init__(labels, **options)
        self.encoded = encoded
        self.num_workers = num_workers

    def _fetch(self, batches: list[Tensor], draws: Iterator[list[Any]]) -> Iterator[Tensor]:
        drawn = (zip(indices.tolist(), each, strict=False) for indices, each in zip(batches, draws, strict=False))
        requests = ([(index, *draw) for index, draw in batch] for batch in drawn)
        for _, images, error in load_batches(self.encoded, requests, self.num_workers, pin=self.device.type == "cuda"):
            if error is not None:
                raise error
            yield to_device(images, self.device)


class FewShotBatches:
    """Batches of episodes for models that classify query images by support images; see `training.evaluation.Batches`.

    A batch has E episodes of `way` classes with `shot` support and `query` query images each, without overlap:
    `{"pixel_values" (E, way * query, C, H, W), "support_pixel_values" (E, way, shot, C, H, W), "labels" (E, way *
    query)}`. Labels are the indices 0 to way - 1 of the classes in the support images; queries are ordered by class.

    Args:
        images: Batches of distinct episodes of shot + query images per class.
        shot: Support images per class.
        eval_batch_size: Images per batch of an evaluation, which embeds each image once.

    Raises:
        ValueError: If the batches are not of distinct episodes, or support or query would be empty.

    Example:
        >>> episodes = Episodes(classes=2, examples=4, count=5, distinct=True)
        >>> images = ImagesInMemory(torch.zeros(60, 1, 8, 8), labels, episodes=episodes, mean=[0.5], std=[0.5])
        >>> next(FewShotBatches(images, shot=1).epoch())["support_pixel_values"].shape
        torch.Size([1, 2, 1, 1, 8, 8])
    """

    def __init__(self, images: ImageBatches, shot: int, *, eval_batch_size: int = 512) -> None:
        episodes = images.episodes
        if episodes is None or not episodes.distinct:  # an image would be a query and its own support
            raise ValueError(f"few-shot batches need distinct images: Episodes(..., distinct=True); got {episodes}.")
        check_integer("shot", shot, 1, episodes.examples - 1)
        self.images = images
        self.shot = shot
        self.way, self.query = episodes.classes, episodes.examples - shot
        self.eval_batch_size = eval_batch_size

    def __len__(self) -> int:
        """Batches per epoch and process."""
        return len(self.images)

    @property
    def num_examples(self) -> int:
        """Images in the split, over all processes, including those not used in an epoch."""
        return self.images.num_examples

    @property
    def examples_per_epoch(self) -> int:
        """Images in the episodes of an epoch, over all processes, with repetitions."""
        return self.images.examples_per_epoch

    def epoch(self, epoch: int = 0, *, start: int = 0, augment: bool = True) -> Iterator[dict[str, Tensor]]:
        """Yield the batches of an epoch, starting with batch `start`; augmented only if `augment` is set."""
        for batch in self.images.epoch(epoch, start=start, augment=augment):
            classes = batch["pixel_values"].unflatten(0, (-1, self.way, self.shot + self.query))
            support, query = self.divide(classes)
            yield {"pixel_values": query, "support_pixel_values": support, "labels": self.labels(len(query))}

    def divide(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Divide the images of episodes, or values per image, into support and query.

        Args:
            classes: (E, way, shot + query, ...).

        Returns:
            Support, (E, way, shot, ...), and query, (E, way * query, ...).
        """
        return classes[:, :, : self.shot], classes[:, :, self.shot :].flatten(1, 2)

    def labels(self, count: int) -> Tensor:
        """Return the labels of the queries of `count` episodes, int64 of shape (count, way * query), on the device."""
        classes = torch.arange(self.way, device=self.images.device)
        return classes.repeat_interleave(self.query).repeat(count, 1)


def few_shot_data(data: Any, shot: int, *, eval_batch_size: int = 512) -> Any:
    """Return an `ImageData` that was loaded with distinct episodes, with `FewShotBatches` as its batches.

    `validation` stays None without validation images. For `shot` and `eval_batch_size`, see `FewShotBatches`.
    """
    divide = partial(FewShotBatches, shot=shot, eval_batch_size=eval_batch_size)
    validation = None if data.validation is None else divide(data.validation)
    return replace(data, train=divide(data.train), evaluation=divide(data.evaluation), validation=validation)
