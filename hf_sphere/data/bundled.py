"""Bundled image datasets, which need no network."""

from collections.abc import Callable
from functools import cache

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image


@cache
def _digits() -> DatasetDict:
    """The 1,797 handwritten 8x8 digits of scikit-learn; every fifth image of each class is in the test split."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    is_test = np.zeros(len(images), dtype=bool)
    for label in range(10):
        is_test[np.flatnonzero(digits.target == label)[4::5]] = True
    masks = {"train": ~is_test, "test": is_test}
    splits = {split: (images[mask], digits.target[mask]) for split, mask in masks.items()}
    return _as_splits(splits, [str(digit) for digit in range(10)])


@cache
def _two_clusters() -> DatasetDict:
    """Two clusters of 100 points near (0, 0) and (1, 1), as images of 1 x 2 pixels: -0.05 is 0, and 1.05 is 255."""
    splits = {}
    for split, seed in (("train", 0), ("test", 1)):
        labels = np.repeat([0, 1], 100)
        points = labels[:, None] + np.random.default_rng(seed).uniform(-0.05, 0.05, size=(200, 2))
        pixels = np.round((points + 0.05) * (255 / 1.1)).astype(np.uint8)
        splits[split] = (pixels[:, None, :], labels)
    return _as_splits(splits, ["near (0, 0)", "near (1, 1)"])


def _as_splits(splits: dict[str, tuple[np.ndarray, np.ndarray]], names: list[str]) -> DatasetDict:
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    columns = {split: {"image": list(images), "label": labels.tolist()} for split, (images, labels) in splits.items()}
    return DatasetDict({split: Dataset.from_dict(cells, features) for split, cells in columns.items()})


BUNDLED: dict[str, Callable[[], DatasetDict]] = {"digits": _digits, "two_clusters": _two_clusters}
"""Functions that return the splits, by name."""
