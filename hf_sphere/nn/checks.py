"""Checks of inputs and labels without device synchronization."""

import torch
from torch import Tensor

from hf_sphere.geometry.checks import to_tensor
from hf_sphere.geometry.coordinates import is_readable

IGNORED = -100
"""Label of examples that the loss ignores, as in torch and transformers."""


def check_tensors(**values: object) -> None:
    """Raise a TypeError unless each of the named values is a tensor or None."""
    for name, value in values.items():
        if value is not None and not isinstance(value, Tensor):
            if name == "labels":
                to_tensor("labels", value, "integers")  # raises an error for names
            raise TypeError(f"{name} must be a tensor; got {type(value).__name__}. Convert it with torch.as_tensor().")


def check_labels(labels: Tensor, num_classes: int, *, owner: str, advice: str) -> None:
    """Raise an error for labels that are no integers, or outside 0..K-1, except -100, if they can be read.

    The message names the `owner` of the classes and ends with the `advice`.
    """
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers; got {labels.dtype}. Convert them with .long().")
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
