"""Images that are made up for tests, and what batches of them contain."""

from typing import Any

import numpy as np
import pytest
from case_selection import each

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


def marked(count: int, size: tuple[int, int] = SMALL, start: int = 0) -> list[np.ndarray]:
    """Images whose pixels all equal the image index, counted from `start`."""
    return [np.full(size, index, dtype=np.uint8) for index in range(start, start + count)]


def seen(batches, target: str = "labels", epoch: int = 0) -> list[tuple[int, float]]:
    """Mark and target of each image of an epoch, loaded with the statistics `RAW`."""
    pairs = []
    for batch in batches.epoch(epoch):
        marks = (batch["pixel_values"][:, 0, 0, 0] * 255).round().int().tolist()
        pairs += zip(marks, batch[target].tolist(), strict=True)
    return pairs
