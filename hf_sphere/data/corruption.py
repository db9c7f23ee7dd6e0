"""Corruption of image datasets: random labels, shuffled pixels, fewer classes.

From Zhang et al., "Understanding deep learning requires rethinking generalization", ICLR 2017, arXiv:1611.03530. The
corruption of an image is determined by a seed and by its row in the dataset, so that it is the same after a run
resumes, in every process, and for any choice of held-out images.
"""

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_sphere.data.decoding import EncodedImages
from hf_sphere.utils.seeds import mix_seed

logger = logging.getLogger(__name__)

# Mixed with the seed, so that the draws are independent of each other.
_CLASSES, _NOISE, _PIXELS = 1, 2, 3


@dataclass(frozen=True)
class Corruption:
    """Corruption of the images and labels of a dataset."""

    label_noise: float = 0.0  # fraction of the labels that `replace_labels` replaces
    shuffled_pixels: str | None = None  # how `shuffle` permutes pixels, `per_image` or `shared`; None: it does not
    sample_classes: int | None = None  # number of classes that `draw_classes` keeps; None for all
    seed: int = 0  # of all three

    def draw_classes(self, count: int) -> Tensor:
        """Return the indices of the classes to keep of `count`, in increasing order: `sample_classes`, or all."""
        if self.sample_classes is None:
            return torch.arange(count)
        if self.sample_classes > count:
            raise ValueError(f"--sample_classes {self.sample_classes} is more than the data has: {count} classes.")
        return torch.randperm(count, generator=self._generator(_CLASSES))[: self.sample_classes].sort().values

    def replace_labels(self, labels: Tensor, rows: Tensor, *, num_rows: int, num_classes: int) -> Tensor:
        """Replace round(`label_noise` * N) labels, in an order and by classes drawn for all rows of the dataset."""
        count = round(self.label_noise * len(labels))
        order, drawn = torch.rand(2, num_rows, dtype=torch.float64, generator=self._generator(_NOISE))
        replaced = order[rows].argsort(stable=True)[:count]
        noisy = labels.clone()
        noisy[replaced] = (drawn[rows[replaced]] * num_classes).long()
        wrong = int((noisy != labels).sum())
        logger.info("Redrew %d of %d training labels; %d are now wrong.", count, len(labels), wrong)
        return noisy

    def shuffle(self, images: Tensor | EncodedImages, rows: Tensor, split: str) -> Tensor | EncodedImages:
        """Permute the pixels of each image, by its row of the split; encoded images when they are decoded."""
        if self.shuffled_pixels is None:
            return images
        if isinstance(images, EncodedImages):
            shuffle = partial(self._shuffle_one, split)
            return EncodedImages(images.dataset, images.column, images.shape, images.rows, shuffle)
        pixels, shuffled = images.flatten(2), torch.empty_like(images)
        generator, of_split = self._generator(_PIXELS), mix_seed(self.seed, _PIXELS, *split.encode())
        order = torch.randperm(pixels.shape[2], generator=generator)
        for index, row in enumerate(rows.tolist()):
            if self.shuffled_pixels == "per_image":
                order = torch.randperm(len(order), generator=generator.manual_seed(mix_seed(of_split, row)))
            shuffled.flatten(2)[index] = pixels[index][:, order]
        return shuffled

    def _shuffle_one(self, split: str, image: Tensor, row: Tensor) -> Any:
        return self.shuffle(image[None], row[None], split)[0]

    def _generator(self, draw: int) -> torch.Generator:
        return torch.Generator().manual_seed(mix_seed(self.seed, draw))
