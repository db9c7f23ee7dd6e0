"""Batches of images on the training device: indexed, augmented and normalized as tensors."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from hf_sphere.data.augmentation import Augmentation
from hf_sphere.data.decoding import EncodedImages, load_batches
from hf_sphere.data.mixing import mix_images
from hf_sphere.data.sampling import Episodes, EpisodeSampler, SharedExamples, log_repetition
from hf_sphere.utils.devices import to_device
from hf_sphere.utils.seeds import mix_seed


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
    images are repeated, and a message is logged. In evaluation every image occurs once. With episodes, batches consist
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

    _in_workers = False  # whether the processes that decode images do their part of the augmentation

    def __init__(
        self,
        labels: Tensor,
        *,
        regression_labels: Tensor | None = None,
        rows: Tensor | None = None,
        batch_size: int | None = None,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device | str = "cpu",
        augmentation: Augmentation | None = None,
        shuffle: bool = False,
        balanced: bool = False,
        episodes: Episodes | None = None,
        seed: int = 0,
        process_index: int = 0,
        num_processes: int = 1,
    ) -> None:
        for name, beside in (("regression_labels", regression_labels), ("rows", rows)):
            if beside is not None and len(beside) != len(labels):
                raise ValueError(f"{len(labels)} labels need as many {name}; got {len(beside)}.")
        size = batch_size if episodes is None else episodes.batch_size
        super().__init__(len(labels), size, device, shuffle, seed, process_index, num_processes)
        self.labels = labels.to(self.device)
        self.regression_labels = None if regression_labels is None else regression_labels.to(self.device)
        self.augmentation = self._per_batch = augmentation
        if augmentation is not None and self._in_workers:
            of_workers: Any = {"random_resized_crop": None, "crop_aspect_ratio": 4 / 3, "rand_augment": None}
            self._per_batch = replace(augmentation, horizontal_flip=False, **of_workers)
        self.balanced = balanced  # which checkpoints record
        self._epoch, self._repeats = 0, shuffle or episodes is not None
        self.rows = torch.arange(len(labels)) if rows is None else rows
        if balanced:
            _, inverse, counts = labels.cpu().unique(return_inverse=True, return_counts=True)
            self._weights = 1 / counts[inverse].double()
        flips = torch.Generator().manual_seed(mix_seed(seed, -1))
        self._flips = torch.randint(2, (len(labels),), generator=flips)
        self._episodes: EpisodeSampler | None = None
        if episodes is not None:
            self._episodes = EpisodeSampler(
                labels, episodes, seed=seed, process_index=process_index, num_processes=num_processes
            )
            if shuffle:
                log_repetition(self._episodes.num_episodes * num_processes, episodes.count, "episodes")
        else:
            log_repetition(self.examples_per_epoch, len(labels), "images")
        spread = torch.tensor(std, dtype=torch.float32, device=self.device)
        center = torch.tensor(mean, dtype=torch.float32, device=self.device)
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
            generator = self._generator(epoch, step)
            if self._per_batch is not None and augment:
                mirrored = (self._flips[indices] + epoch) % 2 == 1 if self._per_batch.alternating_flip else None
                images = self._per_batch(images, generator, mirrored)
            images = self._normalize(images)
            if self._per_batch is not None and augment and self._per_batch.mixes:
                strengths = self._per_batch.mixup, self._per_batch.cutmix
                yield mix_images(images, targets["labels"], *strengths, generator)
            else:
                yield {"pixel_values": images, **targets}

    def epoch_rows(self, epoch: int = 0) -> Tensor:
        """Return the row of the dataset of each image of an epoch, in the order of the batches, int64 on the CPU."""
        return self.rows[self._order(epoch)[: len(self) * self.batch_size]]

    def take(self, indices: Tensor, batch_size: int) -> Iterator[Tensor]:
        """Yield images by index, (N,) on the CPU, without augmentation: float32 (`batch_size`, C, H, W)."""
        plain: Any = itertools.repeat(itertools.repeat((None, 0)))
        if len(indices):
            yield from map(self._normalize, self._fetch(list(indices.split(batch_size)), plain))

    @property
    def episodes(self) -> Episodes | None:
        """The episodes of an epoch, if any."""
        return None if self._episodes is None else self._episodes.episodes

    def episode_indices(self, epoch: int = 0) -> Tensor:
        """Return the index of each image in the episodes of an epoch, if any, over all processes, int64 on the CPU.

        Returns:
            (count, classes, examples).
        """
        sampler: Any = self._episodes
        return sampler.all_indices(epoch).unflatten(1, (sampler.episodes.classes, -1))

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

    def _fetch(self, batches: list[Tensor], draws: Iterator[list[Any]]) -> Iterator[Tensor]:
        """Yield uint8 images (B, C, H, W) on the device for each batch of indices; `draws` are for workers."""
        raise NotImplementedError

    def _draws(self, epoch: int, start: int, augment: bool) -> Iterator[list[Any]]:
        """Yield what workers do with each image of a batch, and a seed by its place in the epoch of all processes."""
        augmentation, size = self.augmentation if augment and self._in_workers else None, self.dealt_together
        for step in itertools.count(start):
            turns = (divmod(i, size) for i in range(step * self.batch_size, (step + 1) * self.batch_size))
            places = [(turn * self.num_processes + self.process_index) * size + rest + 1 for turn, rest in turns]
            yield [(augmentation, mix_seed(self.seed, epoch, place)) for place in places]

    @property
    def dealt_together(self) -> int:
        """Number of consecutive images that a process gets at a time: an episode, or one image."""
        return 1 if self._episodes is None else self._episodes.episodes.size

    def _num_local(self) -> int:
        if self._episodes is not None:
            return self._episodes.num_episodes * self._episodes.episodes.size
        return super()._num_local()

    def _order(self, epoch: int) -> Tensor:
        if self._episodes is not None:
            return self._episodes.indices(epoch).flatten()
        return super()._order(epoch)

    def _generator(self, epoch: int, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(mix_seed(self.seed, epoch, step + 1, self.process_index))


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
