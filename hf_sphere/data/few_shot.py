"""Few-shot episodes of images: batches of support images and queries."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sphere.data.batches import ImageBatches
from hf_sphere.data.images import ImageData


class FewShotBatches:
    """Batches of episodes for models that classify query images by support images; see `training.evaluation.Batches`.

    A batch has E episodes of `way` classes with `shot` support and `query` query images each, without overlap:
    `{"pixel_values" (E, way * query, C, H, W), "support_pixel_values" (E, way, shot, C, H, W), "labels" (E, way *
    query)}`. Labels are the indices 0 to way - 1 of the classes in the support images; queries are ordered by class.

    Args:
        images: Batches of distinct episodes of shot + query images per class.
        shot: Support images per class.
        eval_batch_size: Images per batch of `each_image`.

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
        if episodes is None or not episodes.distinct:
            needed = "all episodes must be given, as Episodes(..., distinct=True)"
            raise ValueError(f"few-shot batches need distinct images: {needed}; got {episodes}.")
        if not 1 <= shot < episodes.examples:
            raise ValueError(f"shot must be at least 1 and less than the {episodes.examples} images; got {shot}.")
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

    def episode_indices(self, epoch: int = 0) -> Tensor:
        """Return the index of each image in the episodes of all processes, int64 (count, way, shot + query), on CPU."""
        return self.images.episode_indices(epoch)

    def each_image(self, indices: Tensor) -> Iterator[Tensor]:
        """Yield images by index, (N,) on the CPU, without augmentation: float32 (eval_batch_size, C, H, W)."""
        yield from self.images.take(indices, self.eval_batch_size)


@dataclass(frozen=True)
class FewShotData:
    """The splits of a dataset as few-shot episodes.

    Attributes:
        train: Training episodes.
        evaluation: Evaluation episodes.
        eval_split: Name of the evaluation split.
        validation: Episodes for selecting the best epoch, if requested.
    """

    train: FewShotBatches
    evaluation: FewShotBatches
    eval_split: str
    validation: FewShotBatches | None

    @classmethod
    def of(cls, data: ImageData, shot: int, *, eval_batch_size: int = 512) -> "FewShotData":
        """Create them from a dataset that was loaded with distinct episodes; see `FewShotBatches`."""
        divide = functools.partial(FewShotBatches, shot=shot, eval_batch_size=eval_batch_size)
        validation = None if data.validation is None else divide(data.validation)
        return cls(divide(data.train), divide(data.evaluation), data.eval_split, validation)
