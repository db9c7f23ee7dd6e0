"""Validation of numeric arguments."""

import math
import operator
from typing import Any

import torch
from torch import Tensor


def check_integer(name: str, value: Any, minimum: int) -> int:
    """Return an integer of at least `minimum` as `int` (numpy integers included), or raise a ValueError."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}; got {value!r}.")
    return number


def check_floating(name: str, value: Any) -> None:
    """Raise a TypeError unless a value is a tensor of a floating-point dtype."""
    is_tensor = isinstance(value, Tensor)
    if not is_tensor or not value.is_floating_point():
        got, how = (value.dtype, ".float()") if is_tensor else (type(value).__name__, "torch.as_tensor()")
        raise TypeError(f"{name} must be a tensor of a floating-point dtype; got {got}. Convert it with {how}.")


def to_labels(labels: Any) -> Tensor:
    """Return labels as a tensor; a TypeError for names says how to number them."""
    try:
        return torch.as_tensor(labels)
    except (TypeError, ValueError) as error:
        how = f"the first is '{next(iter(labels))}'. Number the names: numpy.unique(names, return_inverse=True)[1]"
        raise TypeError(f"labels must be integers; {how}.") from error


def check_positive(name: str, value: float) -> None:
    """Raise a ValueError unless a number is finite and positive."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be finite and positive; got {value}.")
