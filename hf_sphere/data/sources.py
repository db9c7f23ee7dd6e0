"""Sources of image data sets: the Hub, a folder, or the data bundled with the library."""

import difflib
from collections.abc import Callable
from functools import cache

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image

from hf_sphere.utils.loading import load_dataset

# Column names used on the Hub, the most common one first; fine labels before coarse ones.
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label", "labels", "coarse_label")
VALUE_COLUMNS = ("value", "target", "year", "creation_year", "age", "regression_label")


def load_splits(name: str, config_name: str | None = None) -> DatasetDict:
    """Load all splits of an image data set.

    Args:
        name: `digits` or `two_clusters` (bundled), Hub id, or folder of parquet files or images.
        config_name: Configuration, for a data set with several.
    """
    if name in BUNDLED:
        return DatasetDict(BUNDLED[name]())
    splits = load_dataset(name, config_name)
    if not isinstance(splits, DatasetDict):
        raise ValueError(f"data set {name!r} does not load as named splits; got {type(splits).__name__}.")
    return splits


def find_column(
    dataset: Dataset, given: str | None, candidates: tuple[str, ...], what: str, *, instead: str = ""
) -> str:
    """Return the requested column, or the first candidate that exists.

    Args:
        dataset: The split.
        given: Name of the column; None for the first candidate.
        candidates: Usual names.
        what: Content of the column, for error messages.
        instead: An alternative to such a column, for the end of the error message.

    Raises:
        ValueError: If there is no such column; the message lists the columns.
    """
    option = f"--{what}_column_name"
    if given is not None and given not in dataset.column_names:
        close = difflib.get_close_matches(given, dataset.column_names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"no {what} column {given!r}; the data has the columns {dataset.column_names}.{hint}")
    found = given or next((name for name in candidates if name in dataset.column_names), None)
    if found is None:
        raise ValueError(
            f"found no {what} column: none of {list(candidates)} is in {dataset.column_names}. "
            f"Name it with {option}{instead}."
        )
    return found


def choose_eval_split(splits: DatasetDict, name: str | None) -> str:
    """Return the name of the evaluation split: `name`, else `test`, else `validation`."""
    return name or next((split for split in ("test", "validation", "valid") if split in splits), "test")


def find_split(splits: DatasetDict, name: str, option: str) -> Dataset:
    """Return a split; raise an error that lists the splits if it does not exist or is empty."""
    if name not in splits:
        raise ValueError(f"no split {name!r}; the data has {', '.join(splits)}. Choose one with {option}.")
    if len(splits[name]) == 0:
        raise ValueError(f"split {name!r} is empty; choose another one with {option}.")
    return splits[name]


@cache
def _digits() -> DatasetDict:
    """The 1,797 handwritten 8x8 digits of scikit-learn; every fifth image of each class is in the test split."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    rank_in_class = np.empty(len(images), dtype=int)
    for label in range(10):
        members = digits.target == label
        rank_in_class[members] = np.arange(members.sum())
    held_out = rank_in_class % 5 == 4
    return _as_splits(
        {"train": (images[~held_out], digits.target[~held_out]), "test": (images[held_out], digits.target[held_out])},
        [str(digit) for digit in range(10)],
    )


@cache
def _two_clusters() -> DatasetDict:
    """Toy task: two clusters of 100 points around (0, 0) and (1, 1), +-0.05.

    A point is an image of 1 x 2 pixels, whose gray values map -0.05 to 0 and 1.05 to 255.
    """
    splits = {}
    for split, seed in (("train", 0), ("test", 1)):
        labels = np.repeat([0, 1], 100)
        points = labels[:, None] + np.random.default_rng(seed).uniform(-0.05, 0.05, size=(200, 2))
        pixels = np.round((points + 0.05) * (255 / 1.1)).astype(np.uint8)
        splits[split] = (pixels[:, None, :], labels)
    return _as_splits(splits, ["near (0, 0)", "near (1, 1)"])


def _as_splits(splits: dict[str, tuple[np.ndarray, np.ndarray]], names: list[str]) -> DatasetDict:
    from PIL.Image import fromarray

    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    return DatasetDict(
        {
            split: Dataset.from_dict(
                {"image": [fromarray(image) for image in images], "label": labels.tolist()}, features=features
            )
            for split, (images, labels) in splits.items()
        }
    )


BUNDLED: dict[str, Callable[[], DatasetDict]] = {"digits": _digits, "two_clusters": _two_clusters}
"""Data sets that need no network."""
