"""Label checks without device synchronization."""

import torch
from torch import Tensor

from hf_sphere.geometry.coordinates import is_batched

IGNORED = -100
"""Label of examples that the loss ignores, as in torch and transformers."""


def is_readable(tensor: Tensor) -> bool:
    """Whether values can be read without a device synchronization: on the CPU, outside of compilation and vmap."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not is_batched(tensor)


def check_labels(labels: Tensor, num_classes: int, *, owner: str, advice: str) -> None:
    """Raise an error for labels outside 0..K-1 if they can be read without a device synchronization.

    Args:
        labels: Class indices of any shape, or -100 for examples to ignore.
        num_classes: Number of classes K.
        owner: Noun in the message for what has these classes.
        advice: Last sentence of the message.

    Raises:
        ValueError: If a label is out of range.
    """
    if not is_readable(labels):
        return
    labels = labels[labels != IGNORED]
    if labels.numel() == 0:
        return
    low, high = labels.aminmax()
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"labels run from {low} to {high}, but the {owner} has {num_classes} classes (0 to {num_classes - 1}). "
            f"{advice}"
        )
