"""Batches of images on the training device: drawn, augmented and normalised as tensors."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hf_sphere.data.augmentation import Augmentation
from hf_sphere.data.decoding import EncodedImages, stack_images


class ImageBatches:
    """Batches `{"pixel_values", "labels"}` of one split, the same interface for data in memory and on disk.

    With two targets an image, they have `regression_labels` besides.

    Order and augmentation follow from (`seed`, epoch, batch), so any batch can be made again by itself: that is what
    lets a run resume in the middle of an epoch. Several processes get interleaved parts of the same order, of equal
    length in training; in evaluation every image is seen once.

    Args:
        labels: (N,) class indices, or real numbers for regression.
        regression_labels: (N,) real numbers to learn beside the classes.
        batch_size: Images a batch and process.
        mean: Mean a channel, on the scale from 0 to 1.
        std: Standard deviation a channel, on the scale from 0 to 1.
        device: Where batches are made.
        augmentation: Random changes; None for evaluation.
        shuffle: Whether each epoch has an order of its own, as in training.
        seed: Seed of order and augmentation.
        process_index: Which of the processes this is.
        num_processes: How many processes share the data.
    """

    def __init__(
        self,
        labels: Tensor,
        *,
        regression_labels: Tensor | None = None,
        batch_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device | str = "cpu",
        augmentation: Augmentation | None = None,
        shuffle: bool = False,
        seed: int = 0,
        process_index: int = 0,
        num_processes: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"the batch size must be at least 1; got {batch_size}.")
        if regression_labels is not None and len(regression_labels) != len(labels):
            raise ValueError(f"{len(labels)} labels need as many regression_labels; got {len(regression_labels)}.")
        self.device = torch.device(device)
        self.labels = labels.to(self.device)
        self.regression_labels = None if regression_labels is None else regression_labels.to(self.device)
        self.batch_size = batch_size
        self.augmentation = augmentation
        self.shuffle = shuffle
        self.seed = seed
        self.process_index = process_index
        self.num_processes = num_processes
        spread = torch.tensor(std, dtype=torch.float32, device=self.device)
        center = torch.tensor(mean, dtype=torch.float32, device=self.device)
        self._scale = (1 / (255 * spread))[:, None, None]
        self._shift = (-center / spread)[:, None, None]

    def __len__(self) -> int:
        """Batches an epoch and process."""
        count = self._share()
        # Batch norm cannot train on a single image, so a training batch of one is left out (if it is not the only).
        leftover_of_one = self.shuffle and count % self.batch_size == 1 and count > self.batch_size
        return math.ceil(count / self.batch_size) - leftover_of_one

    @property
    def num_examples(self) -> int:
        """Images in the split, over all processes."""
        return len(self.labels)

    def epoch(self, epoch: int = 0, *, start: int = 0, augment: bool = True) -> Iterator[dict[str, Tensor]]:
        """Yield the batches of an epoch from batch `start` on, with the augmentation there is or as they are."""
        batches = list(self._order(epoch).split(self.batch_size))[start : len(self)]
        for number, (images, indices) in enumerate(zip(self._fetch(batches), batches, strict=True), start):
            if self.augmentation is not None and augment:
                images = self.augmentation(images, self._generator(epoch, number))
            pixels = images.to(torch.float32).mul_(self._scale).add_(self._shift)
            used = indices.to(self.device)
            batch = {"pixel_values": pixels, "labels": self.labels[used]}
            if self.regression_labels is not None:
                batch["regression_labels"] = self.regression_labels[used]
            yield batch

    def _fetch(self, batches: list[Tensor]) -> Iterator[Tensor]:
        """Yield uint8 images (B, C, H, W) on the device for each batch of indices."""
        raise NotImplementedError

    def _share(self) -> int:
        if self.shuffle:
            return math.ceil(len(self.labels) / self.num_processes)
        return len(range(self.process_index, len(self.labels), self.num_processes))

    def _order(self, epoch: int) -> Tensor:
        order = torch.arange(len(self.labels))
        if self.shuffle:
            generator = torch.Generator().manual_seed(_mix(self.seed, epoch))
            order = torch.randperm(len(order), generator=generator)
            total = self._share() * self.num_processes
            order = order.repeat(math.ceil(total / len(order)))[:total]
        return order[self.process_index :: self.num_processes]

    def _generator(self, epoch: int, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(_mix(self.seed, epoch, number + 1, self.process_index))


class ImagesInMemory(ImageBatches):
    """Decoded images kept on the training device.

    Args:
        images: uint8, (N, C, H, W).
        labels: (N,) class indices, or real numbers for regression.
        **options: See `ImageBatches`.
    """

    def __init__(self, images: Tensor, labels: Tensor, **options: Any) -> None:
        super().__init__(labels, **options)
        self.images = images.to(self.device)

    def _fetch(self, batches: list[Tensor]) -> Iterator[Tensor]:
        for indices in batches:
            yield self.images[indices.to(self.device)]


class ImagesFromDisk(ImageBatches):
    """Images decoded by worker processes while training goes on.

    Args:
        encoded: The images; a corrupt one is an error when its batch comes.
        labels: (N,) class indices, or real numbers for regression.
        num_workers: Decoding processes.
        **options: See `ImageBatches`.
    """

    def __init__(self, encoded: EncodedImages, labels: Tensor, *, num_workers: int = 2, **options: Any) -> None:
        super().__init__(labels, **options)
        self.encoded = encoded
        self.num_workers = num_workers

    def _fetch(self, batches: list[Tensor]) -> Iterator[Tensor]:
        loader: DataLoader = DataLoader(
            self.encoded,
            batch_sampler=[indices.tolist() for indices in batches],
            num_workers=self.num_workers,
            collate_fn=stack_images,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # a loader draws a seed, and that must not touch the model's random numbers
        )
        for _, images, error in loader:
            if error is not None:
                raise error
            yield images.to(self.device, non_blocking=True)


def _mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers, different for every combination that occurs (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
