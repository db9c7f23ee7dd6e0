"""Splits by class, for evaluation on classes that are not in the training data."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def first_classes(labels: Tensor, count: int) -> Tensor:
    """Return a mask of the images of the first classes, the split of CUB-200-2011 and Cars196 for metric learning.

    Args:
        labels: (N,) class indices.
        count: Number of classes, among those that occur.

    Returns:
        bool, (N,).

    Raises:
        ValueError: If one of the two parts would be empty.
    """
    classes = labels.unique()
    if not 1 <= count < len(classes):
        raise ValueError(
            f"--train_classes {count} does not divide {len(classes)} classes: use at least 1, and at most "
            f"{len(classes) - 1} to leave one for evaluation."
        )
    return labels < classes[count]


def held_out_classes(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """Return a mask of the images of randomly sampled classes.

    Args:
        labels: (N,) class indices.
        fraction: Fraction of the classes that occur, between 0 and 1; rounded to at least one class in each part.
        seed: Seed of the sampling.

    Returns:
        bool, (N,).

    Raises:
        ValueError: If there is a single class.
    """
    classes = labels.unique()
    if len(classes) < 2:
        raise ValueError(
            f"validation_fraction={fraction} holds out whole classes, and needs at least two; the training images have "
            f"{len(classes)}."
        )
    count = min(max(round(fraction * len(classes)), 1), len(classes) - 1)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))
    return torch.isin(labels, classes[order[:count]])


def warn_of_shared_classes(train: Tensor, evaluation: Tensor, what: str = "evaluation") -> None:
    """Warn if two splits with class indices (N,) and (M,) share classes; `what` is the name of the second one."""
    trained, evaluated = train.unique(), evaluation.unique()
    shared = int(torch.isin(evaluated, trained).sum())
    if shared:
        logger.warning(
            "%d of the %d classes of the %s split are trained on, so this is not an open set; --train_classes "
            "makes one by dividing the classes.",
            shared,
            len(evaluated),
            what,
        )


def warn_of_untrained_classes(train: Tensor, evaluation: Tensor, names: Sequence[str]) -> None:
    """Warn if evaluation images, with class indices (M,), have classes without training images, (N,)."""
    trained = set(train.unique().tolist())
    untrained = [names[index] for index in evaluation.unique().tolist() if index not in trained]
    if untrained:
        logger.warning(
            "%d class(es) of the evaluation images have no training image: %s. Slices such as train[:80%%] follow the "
            "order of the data, which is often by class.",
            len(untrained),
            ", ".join(untrained[:10]),
        )
