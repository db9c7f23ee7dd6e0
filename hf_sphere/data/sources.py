"""Sources of image data sets: the Hub, a folder, or the data bundled with the library."""

import difflib
import logging
from collections.abc import Callable
from functools import cache

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image

from hf_sphere.data.options import ImageSourceOptions
from hf_sphere.data.split_names import held_out_names, read_split
from hf_sphere.data.targets import OPEN_SETS
from hf_sphere.utils.loading import load_dataset

logger = logging.getLogger(__name__)

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


def choose_eval_split(splits: DatasetDict, name: str | None) -> str | None:
    """Return the name of the evaluation split: `name`, else `test`, else `validation`, else None."""
    return name or next((split for split in ("test", "validation", "valid") if split in splits), None)


def find_split(splits: DatasetDict, name: str, option: str, label_column: str | None = None) -> Dataset:
    """Return a split or a part of the data; raise an error that lists the splits if it does not exist or is empty.

    Args:
        splits: All splits.
        name: See `hf_sphere.data.split_names.read_split`.
        option: Option that chooses it, for error messages.
        label_column: Column of the classes, for parts that are held out.
    """
    try:
        rows = read_split(splits, name, label_column)
    except KeyError:
        raise ValueError(f"no split {name!r}; the data has {', '.join(splits)}. Choose one with {option}.") from None
    except (ValueError, AssertionError) as error:  # `datasets` asserts
        raise ValueError(f"split {name!r} of {', '.join(splits)} ({option}) cannot be read: {error}") from error
    if len(rows) == 0:
        raise ValueError(f"split {name!r} is empty; choose another one with {option}.")
    return rows


def choose_splits(
    splits: DatasetDict, options: ImageSourceOptions, task: str, train_classes: int | None
) -> dict[str, tuple[str, Dataset]]:
    """Return the name and rows of the splits `train`, `eval` and possibly `validation`.

    Without an evaluation split, a part of the training split is held out; in an open set, whose classes are to be
    divided, `eval` is then the training split.
    """
    train = options.train_split
    names = {"train": train, "eval": choose_eval_split(splits, options.eval_split) or train}
    label_column = None if task == "regression" else options.label_column_name or usual_label_column(splits)
    is_divided = names["eval"] == train and options.eval_split is None
    by_class = train_classes is not None or (is_divided and task in OPEN_SETS)
    if is_divided and not by_class:
        find_split(splits, train, "--train_split")
        names["train"], names["eval"] = held_out_names(train, options.eval_fraction, options.eval_seed)
        logger.info(
            "The data has no evaluation split: %g %% of the split %s is held out%s with seed %d, as the split '%s'.",
            100 * options.eval_fraction,
            train,
            ", stratified by class," if label_column else "",
            options.eval_seed,
            names["eval"],
        )
    if (name := options.validation_split) is not None:
        if options.validation_fraction:
            raise ValueError(
                f"--validation_split {name} and --validation_fraction {options.validation_fraction} are two sources of "
                "images to select the epoch on; use only one of them."
            )
        if by_class:
            raise ValueError(
                f"--train_classes divides the classes of all images, and --validation_split {name} would contain "
                "classes of both sides; hold out training classes with --validation_fraction instead."
            )
        for key, other in names.items():
            if other == name:
                raise ValueError(
                    f"--validation_split {name} is also the split of --{key}_split, so the epoch would not be "
                    "selected on separate images; name another one, or hold out training images with "
                    "--validation_fraction."
                )
        names["validation"] = name
    return {key: (name, find_split(splits, name, f"--{key}_split", label_column)) for key, name in names.items()}


def common_column(
    rows: dict[str, tuple[str, Dataset]], given: str | None, candidates: tuple[str, ...], what: str, instead: str = ""
) -> str:
    """Find a column in the training split, and check that the other splits have it."""
    found = find_column(rows["train"][1], given, candidates, what, instead=instead)
    for _, part_rows in rows.values():
        find_column(part_rows, found, (), what)
    return found


def usual_label_column(splits: DatasetDict) -> str | None:
    """Return the label column that is detected by name, or None."""
    columns = next(iter(splits.values())).column_names
    return next((name for name in LABEL_COLUMNS if name in columns), None)


def count_training_classes(rows: Dataset, label_column: str, options: ImageSourceOptions) -> int:
    """Return the number of classes to train on, the first ones, if `eval_fraction` of the classes is held out."""
    count = len(rows.unique(label_column))
    train_classes = count - max(round(options.eval_fraction * count), 1)
    logger.info(
        "The data has no evaluation split: %g %% of the %d classes are held out, the last ones; --train_classes %d.",
        100 * options.eval_fraction,
        count,
        train_classes,
    )
    return train_classes


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
