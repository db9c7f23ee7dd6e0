"""Few-shot episodes: images of a few classes, divided into those that show a class and those to be told apart."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_sphere.data.batches import ImageBatches

if TYPE_CHECKING:
    from hf_sphere.data.images import ImageData


class FewShotBatches:
    """Batches of episodes, for a model that classifies query images by support images; the interface of `ImageBatches`.

    E episodes a batch, each of `way` classes with `shot` support and `query` query images, none of them both:
    `{"pixel_values" (E, way * query, C, H, W), "support_pixel_values" (E, way, shot, C, H, W), "labels" (E, way *
    query)}`. Labels are the places 0 to way - 1 of the classes among the support images; queries of a class stand
    together.

    Args:
        images: Batches of distinct episodes of shot + query images of a class.
        shot: How many of these are support images.
        eval_batch_size: Images to embed at once where each is embedded once; see `each_image`.

    Raises:
        ValueError: If the batches are not of distinct episodes, or leave no image for one of the two parts.
    """

    def __init__(self, images: ImageBatches, shot: int, *, eval_batch_size: int = 512) -> None:
        episodes = images.episodes
        if episodes is None or not episodes.distinct:
            raise ValueError(
                "few-shot batches are made of episodes without a repeated image; make the image batches with "
                f"episodes=Episodes(..., distinct=True). Theirs are: {episodes}."
            )
        if not 1 <= shot < episodes.examples:
            raise ValueError(
                f"of {episodes.examples} images of a class, 1 to {episodes.examples - 1} can be support images; got "
                f"shot={shot}."
            )
        self.images = images
        self.shot = shot
        self.way, self.query = episodes.classes, episodes.examples - shot
        self.eval_batch_size = eval_batch_size

    def __len__(self) -> int:
        """Batches an epoch and process."""
        return len(self.images)

    @property
    def num_examples(self) -> int:
        """Images in the split, over all processes, whatever an epoch takes of them."""
        return self.images.num_examples

    @property
    def examples_per_epoch(self) -> int:
        """Images that the episodes of an epoch hold, over all processes, repeated ones included."""
        return self.images.examples_per_epoch

    def epoch(self, epoch: int = 0, *, start: int = 0, augment: bool = True) -> Iterator[dict[str, Tensor]]:
        """Yield the batches of an epoch from batch `start` on, with the augmentation there is or as they are."""
        for batch in self.images.epoch(epoch, start=start, augment=augment):
            classes = batch["pixel_values"].unflatten(0, (-1, self.way, self.shot + self.query))
            support, query = self.divide(classes)
            yield {"pixel_values": query, "support_pixel_values": support, "labels": self.labels(len(query))}

    def divide(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Divide what belongs to the images of episodes.

        Args:
            classes: (E, way, shot + query, ...).

        Returns:
            That of the support images, (E, way, shot, ...), and that of the query images, (E, way * query, ...).
        """
        return classes[:, :, : self.shot], classes[:, :, self.shot :].flatten(1, 2)

    def labels(self, count: int) -> Tensor:
        """Return the labels of the queries of so many episodes, int64 of shape (count, way * query), on the device."""
        classes = torch.arange(self.way, device=self.images.device)
        return classes.repeat_interleave(self.query).repeat(count, 1)

    def episode_indices(self, epoch: int = 0) -> Tensor:
        """Return the index of each image of all processes' episodes, int64 (count, way, shot + query) on the CPU."""
        return self.images.episode_indices(epoch)

    def each_image(self, indices: Tensor) -> Iterator[Tensor]:
        """Yield images by their index, (N,) on the CPU, without random changes: float32 (eval_batch_size, C, H, W)."""
        yield from self.images.take(indices, self.eval_batch_size)


@dataclass(frozen=True)
class FewShotData:
    """The parts of a data set in few-shot episodes.

    Attributes:
        train: Training episodes.
        evaluation: Episodes of the split that results are reported on.
        eval_split: Name of that split.
        validation: Episodes for choosing epochs, if asked for.
    """

    train: FewShotBatches
    evaluation: FewShotBatches
    eval_split: str
    validation: FewShotBatches | None

    @classmethod
    def of(cls, data: "ImageData", shot: int, *, eval_batch_size: int = 512) -> "FewShotData":
        """Divide the episodes of a data set that was loaded with distinct ones; see `FewShotBatches`."""

        def divide(batches: ImageBatches) -> FewShotBatches:
            return FewShotBatches(batches, shot, eval_batch_size=eval_batch_size)

        validation = None if data.validation is None else divide(data.validation)
        return cls(divide(data.train), divide(data.evaluation), data.eval_split, validation)
