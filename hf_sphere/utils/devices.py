"""Devices: their dtypes, and copies to them."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

F = TypeVar("F", bound=Callable[..., Any])


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values of a training step to a device without waiting for it, except mps, which may read freed memory."""
    return values.to(device, non_blocking=device.type != "mps")


def widest_dtype(where: Tensor | torch.device) -> torch.dtype:
    """Return float64 if a device, or the device of a tensor, supports it, else float32."""
    device = where.device if isinstance(where, Tensor) else where
    return torch.float64 if device.type in ("cpu", "cuda") or has_float64(device) else torch.float32


def assume_constant_result(function: F) -> F:
    """Mark a function as `torch.compiler.assume_constant_result` does, which imports the compiler: seconds, 150 MB."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_exporting() -> bool:
    """Whether `torch.export` traces; before torch 2.14, torch's own function is also true in `torch.compile`."""
    return torch.compiler._is_exporting_flag


@assume_constant_result
@functools.cache
def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64; Metal does not, nor do some GPUs of Intel."""
    try:
        with _disable_current_modes():  # a fake tensor would not tell
            torch.ones((), dtype=torch.float64, device=device).exp()
    except (TypeError, RuntimeError) as error:
        if "64" in str(error):
            return False
        raise
    return True
