"""Classes that are not trained on: what embeddings are judged by when they are compared with each other."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def first_classes(labels: Tensor, count: int) -> Tensor:
    """Mark the images of the first classes, as CUB-200-2011 and Cars196 are divided for metric learning.

    Args:
        labels: (N,) class indices, of which not all have to occur.
        count: How many of the classes that occur.

    Returns:
        bool, (N,).

    Raises:
        ValueError: If that leaves no class on one of the two sides.
    """
    classes = labels.unique()
    if not 1 <= count < len(classes):
        raise ValueError(
            f"--train_classes {count} does not divide {len(classes)} classes: at least 1 is trained on, and at most "
            f"{len(classes) - 1}, so that one is left to evaluate on."
        )
    return labels < classes[count]


def held_out_classes(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """Mark the images of classes drawn at random.

    Args:
        labels: (N,) class indices.
        fraction: Share of the classes that occur, between 0 and 1; rounded, at least one is drawn and one is not.
        seed: Seed of the draw.

    Returns:
        bool, (N,).

    Raises:
        ValueError: If there is a single class.
    """
    classes = labels.unique()
    if len(classes) < 2:
        raise ValueError(
            f"validation_fraction={fraction} holds out whole classes, for which two are needed; the training images "
            f"have {len(classes)}."
        )
    count = min(max(round(fraction * len(classes)), 1), len(classes) - 1)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))
    return torch.isin(labels, classes[order[:count]])


def number_classes(labels: Tensor, names: Sequence[str]) -> tuple[Tensor, list[str]]:
    """Number the classes that occur from 0 on, in the order there is.

    Args:
        labels: (N,) indices into `names`.
        names: Name of each class.

    Returns:
        Indices into the names that are left, int64 of shape (N,), and these names.
    """
    classes, numbered = labels.unique(return_inverse=True)
    return numbered, [names[index] for index in classes.tolist()]


def warn_of_shared_classes(train: Tensor, evaluation: Tensor, what: str = "evaluation") -> None:
    """Say if class indices of two splits, (N,) and (M,), have some in common; `what` names the second one."""
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
