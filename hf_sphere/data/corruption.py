"""Image data made harder on purpose, as in Zhang et al. 2017: random labels, shuffled pixels, fewer classes.

"Understanding deep learning requires rethinking generalization", ICLR 2017, arXiv:1611.03530. What is drawn follows
from a seed and from where an image stands in its data set, so that the same corruption is made again when a run
resumes, in every process, and when another part of the images is held out.
"""

import logging
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from hf_sphere.data.decoding import CorruptImageError, EncodedImages
from hf_sphere.utils.seeds import mix_seed

logger = logging.getLogger(__name__)

PixelShuffling = Literal["per_image", "shared"]
"""Whether each image has its pixels in a permutation of its own, or all images have them in the same one."""

_PIXELS_AT_A_TIME = 1 << 22
"""Pixels that permutations are held for at once: 32 MB."""

# What else the seed is mixed with, so that one draw says nothing of another.
_CLASSES, _NOISE, _PIXELS = 1, 2, 3


@dataclass(frozen=True)
class Corruption:
    """What is done to the images and labels of a data set.

    Attributes:
        label_noise: Share of the labels that `replace_labels` draws anew.
        shuffled_pixels: How `shuffle` moves pixels; None for not at all.
        sample_classes: How many classes `draw_classes` keeps; None for all.
        seed: Seed of all three.

    Raises:
        ValueError: If a share or a number is not possible, or there is no such way to shuffle.
    """

    label_noise: float = 0.0
    shuffled_pixels: PixelShuffling | None = None
    sample_classes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_noise <= 1.0:
            raise ValueError(
                "--label_noise is the share of the training labels that are drawn anew, from 0 to 1; got "
                f"{self.label_noise}."
            )
        if self.shuffled_pixels is not None and self.shuffled_pixels not in get_args(PixelShuffling):
            raise ValueError(
                "--shuffled_pixels is per_image (a permutation of its own for each image) or shared (one for all); got "
                f"{self.shuffled_pixels!r}."
            )
        if self.sample_classes is not None and self.sample_classes < 2:
            raise ValueError(
                f"--sample_classes keeps so many classes, at least 2; got {self.sample_classes}. Leave it out to keep "
                "all."
            )

    def check_task(self, task: str) -> None:
        """Refuse what does not go with a task of `hf_sphere.data.targets.Task`."""
        if task == "regression" and self.label_noise:
            raise ValueError(
                f"--label_noise {self.label_noise} draws classes, and regression has none: leave it out, or choose "
                "task classification or joint."
            )
        if task == "regression" and self.sample_classes is not None:
            raise ValueError(
                f"--sample_classes {self.sample_classes} keeps classes, and regression has none: leave it out; "
                "--max_train_samples keeps some of the images."
            )
        if task in ("retrieval", "few_shot") and self.sample_classes is not None:
            raise ValueError(
                f"--sample_classes {self.sample_classes} keeps the same classes in both splits, and {task} is "
                "about others: use --train_classes, which trains on some classes and evaluates on the rest."
            )

    def draw_classes(self, count: int) -> Tensor:
        """Draw the classes to keep, whatever images there are of them.

        Args:
            count: Classes there are.

        Returns:
            Their indices in increasing order, int64, (`sample_classes`,); all if that is None.

        Raises:
            ValueError: If more are asked for than there are.
        """
        if self.sample_classes is None:
            return torch.arange(count)
        if self.sample_classes > count:
            raise ValueError(
                f"--sample_classes {self.sample_classes} is more than the data has: {count} classes. Ask for 2 to "
                f"{count}, or leave it out to keep all."
            )
        return torch.randperm(count, generator=self._generator(_CLASSES))[: self.sample_classes].sort().values

    def replace_labels(self, labels: Tensor, rows: Tensor, *, num_rows: int, num_classes: int) -> Tensor:
        """Replace a share of the labels by classes drawn uniformly over all, the true one included.

        With all of them replaced, labels say nothing of the images; a draw among the other classes would say which
        class an image is not. A label is drawn for its row of the data set, and rows are replaced in an order that
        does not depend on the share: a larger share replaces the same labels by the same classes and some besides,
        and another choice of images changes little.

        Args:
            labels: (N,) class indices.
            rows: (N,) row of the data set that each of them belongs to.
            num_rows: Rows of the data set.
            num_classes: Classes to draw from.

        Returns:
            int64, (N,), with exactly round(`label_noise` * N) of them drawn anew.
        """
        count = round(self.label_noise * len(labels))
        if count == 0:
            return labels
        order, drawn = torch.rand(2, num_rows, dtype=torch.float64, generator=self._generator(_NOISE))
        replaced = order[rows].argsort(stable=True)[:count]
        noisy = labels.clone()
        noisy[replaced] = (drawn[rows[replaced]] * num_classes).long()
        logger.info(
            "Drew %d of %d training labels anew; %d are now wrong.", count, len(labels), int((noisy != labels).sum())
        )
        return noisy

    def shuffle(self, images: Tensor | EncodedImages, rows: Tensor, split: str) -> Tensor | EncodedImages:
        """Move the pixels of each image about, the channels of a pixel together.

        Args:
            images: uint8, (N, C, H, W), which are left as they are; or encoded, which are shuffled when decoded.
            rows: (N,) row of the data set that each image is.
            split: Name of the split. Of two that are equal, images of the same row have the same permutation.

        Returns:
            Images of the same kind; those that were given where pixels stay in place.
        """
        if self.shuffled_pixels is None:
            return images
        if isinstance(images, EncodedImages):
            return _ShuffledImages(images, self, split)
        return self._shuffle_decoded(images, rows, split)

    def _shuffle_decoded(self, images: Tensor, rows: Tensor, split: str) -> Tensor:
        num_pixels = images.shape[-2] * images.shape[-1]
        at_a_time = max(_PIXELS_AT_A_TIME // num_pixels, 1)
        flat, shuffled = images.flatten(2), torch.empty_like(images)
        for part, there, into in zip(
            flat.split(at_a_time), rows.split(at_a_time), shuffled.flatten(2).split(at_a_time), strict=True
        ):
            order = self._permutations(there, num_pixels, split).to(images.device)
            torch.gather(part, 2, order[:, None, :].expand_as(part), out=into)
        return shuffled

    def _permutations(self, rows: Tensor, num_pixels: int, split: str) -> Tensor:
        """The place that each pixel comes from, (N, P) or, if they share it, (1, P)."""
        if self.shuffled_pixels == "shared":
            return torch.randperm(num_pixels, generator=self._generator(_PIXELS))[None]
        of_split = mix_seed(self.seed, _PIXELS, *split.encode())
        generator, orders = torch.Generator(), torch.empty(len(rows), num_pixels, dtype=torch.int64)
        for row, order in zip(rows.tolist(), orders, strict=True):
            torch.randperm(num_pixels, generator=generator.manual_seed(mix_seed(of_split, row)), out=order)
        return orders

    def _generator(self, draw: int) -> torch.Generator:
        return torch.Generator().manual_seed(mix_seed(self.seed, draw))


class _ShuffledImages(EncodedImages):
    """Encoded images whose pixels are shuffled as they are decoded."""

    def __init__(self, images: EncodedImages, corruption: Corruption, split: str) -> None:
        super().__init__(images.dataset, images.column, images.shape, images.rows)
        self._corruption = corruption
        self._split = split

    def __getitems__(self, indices: list[int]) -> list[Tensor | CorruptImageError]:
        return [
            self._shuffle(image, row) if isinstance(image, Tensor) else image
            for image, row in zip(super().__getitems__(indices), self.rows[indices], strict=True)
        ]

    def select(self, indices: Tensor) -> EncodedImages:
        """Keep only some of the images."""
        return _ShuffledImages(super().select(indices), self._corruption, self._split)

    def _shuffle(self, image: Tensor, row: Tensor) -> Tensor:
        return self._corruption._shuffle_decoded(image[None], row[None], self._split)[0]
