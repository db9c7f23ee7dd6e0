"""Label checks without device synchronization."""

import torch
from torch import Tensor

from hf_sphere.geometry.coordinates import is_batched


def is_readable(tensor: Tensor) -> bool:
    """Whether values can be read without a device synchronization: on the CPU, outside of compilation and vmap."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not is_batched(tensor)


def check_labels(labels: Tensor, num_classes: int, *, owner: str, advice: str) -> None:
    """Raise an error for labels outside 0..K-1 if they can be read without a device synchronization.

    Args:
        labels: Class indices of any shape.
        num_classes: Number of classes K.
        owner: Noun in the message for what has these classes.
        advice: Last sentence of the message.

    Raises:
        ValueError: If a label is out of range.
    """
    if labels.numel() == 0 or not is_readable(labels):
        return
    low, high = labels.aminmax()
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"labels run from {low} to {high}, but the {owner} has {num_classes} classes (0 to {num_classes - 1}). "
            f"{advice}"
        )
