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


def to_shares(weights: Any, points: Tensor) -> Tensor:
    """Return valid weights (..., n) of points (..., n, d), equal if None, in their dtype and divided by their sums."""
    weights = points.new_ones(points.shape[-2]) if weights is None else weights
    if not isinstance(weights, Tensor):
        raise TypeError(f"weights must be a tensor; got {type(weights).__name__}. Convert it with torch.as_tensor().")
    *batch, count = points.shape[:-1]
    try:
        torch.broadcast_shapes(weights.shape[:-1], batch)
        fits = weights.shape[-1:] == (count,)
    except RuntimeError:
        fits = False
    if not fits:
        shapes = f"{tuple(weights.shape)} for points of shape {tuple(points.shape)}"
        raise ValueError(f"weights must have the shape (..., n), one for each of the points (..., n, d); got {shapes}.")
    weights = weights.to(points.dtype)
    total = weights.sum(-1, keepdim=True)
    if not ((weights >= 0).all() and ((total > 0) & total.isfinite()).all()):
        raise ValueError("weights must be finite and nonnegative with a positive sum that does not overflow.")
    return weights / total


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
