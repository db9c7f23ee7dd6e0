"""Checks of inputs and labels without device synchronization."""

from itertools import chain

import torch
from torch import Tensor, nn

from hf_sphere.geometry.checks import check_floating, to_tensor
from hf_sphere.geometry.coordinates import is_readable
from hf_sphere.utils.devices import check_devices

IGNORED = -100
"""Label of examples that the loss ignores, as in torch and transformers."""


def check_input(module: nn.Module, x: object) -> None:
    """Raise an error unless the input of a module is of a floating-point dtype and on the device of its weights."""
    check_floating("the input", x)
    check_tensors(module, **{"the input": x})


def check_tensors(module: nn.Module | None = None, /, **values: object) -> None:
    """Raise an error unless the named values are tensors or None, on one device, that of the module's weights."""
    for name, value in values.items():
        if value is not None and not isinstance(value, Tensor):
            if name == "labels":
                to_tensor("labels", value, "integers")  # raises an error for names
            raise TypeError(f"{name} must be a tensor; got {type(value).__name__}. Convert it with torch.as_tensor().")
    if module is not None:
        weight = next(chain(module.parameters(), module.buffers()), None)
        values = {**values, f"the weights of {type(module).__name__}": weight}
    check_devices(**values)


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
