"""Images that are made up for tests, and what batches of them contain."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from case_selection import each
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as PILImage
from torch import Tensor

NOT_AN_IMAGE = b"not an image"

SMALL, LARGE = (6, 4), (100, 4)
"""Sizes of images that are kept in memory, and of images that are streamed from disk."""


def both_sizes(function: Any) -> Any:
    """Run a test with images that are kept in memory and with images that are streamed, also by default."""
    return each("size")(pytest.mark.parametrize("size", [SMALL, LARGE])(function))


RAW = {"image_mean": [0.0], "image_std": [1.0]}
"""Statistics with which pixel values are the bytes divided by 255."""

ANIMALS = ["ant", "bee", "cat", "dog", "elk", "fox"]


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def pixels(*shape: int) -> Tensor:
    return torch.from_numpy(noise(*shape))


def marked(count: int, size: tuple[int, int] = SMALL, start: int = 0) -> list[np.ndarray]:
    """Images whose pixels all equal the image index, counted from `start`."""
    return [np.full(size, index, dtype=np.uint8) for index in range(start, start + count)]


def encode(image: np.ndarray | PILImage.Image, file_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture = PILImage.fromarray(image) if isinstance(image, np.ndarray) else image
    picture.save(buffer, file_format, **options)
    return buffer.getvalue()


def make_dataset(
    images: Sequence,
    labels: Sequence | None = None,
    *,
    feature: Any = None,
    image_column: str = "image",
    label_column: str = "label",
) -> Dataset:
    """Make a dataset of images (arrays, PIL images, encoded bytes or None) and labels."""
    labels = [0] * len(images) if labels is None else list(labels)
    feature = feature or ClassLabel(num_classes=max(labels, default=0) + 1)
    plain = [image if isinstance(image, bytes | None) else encode(image) for image in images]
    cells = [None if image is None else {"bytes": image, "path": None} for image in plain]
    features = Features({image_column: Image(), label_column: feature})
    return Dataset.from_dict({image_column: cells, label_column: labels}, features=features)


def seen(batches, target: str = "labels", epoch: int = 0) -> list[tuple[int, float]]:
    """Mark and target of each image of an epoch, loaded with the statistics `RAW`."""
    pairs = []
    for batch in batches.epoch(epoch):
        marks = (batch["pixel_values"][:, 0, 0, 0] * 255).round().int().tolist()
        pairs += zip(marks, batch[target].tolist(), strict=True)
    return pairs
