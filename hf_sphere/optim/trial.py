"""A copy of a model to try things on: in training mode, with epsilons that do not count, moved off initial values."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

_EPSILONS = ("eps", "epsilon", "variance_epsilon")
_CHECKPOINTING = ("gradient_checkpointing", "grad_checkpointing")


def make_trial(model: nn.Module) -> nn.Module:
    """Copy a model for the proof.

    The epsilons of norms, which break the invariance a little, become too small to count. A model in evaluation is
    switched to training, one in training keeps the modules that are frozen. The copy computes in float32 or better, and
    without activation checkpointing.

    Raises:
        ValueError: If the model is sharded, on the meta device, or cannot be copied.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name} is sharded; find the groups before the model is sharded.")
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device; the proof needs real weights.")
    try:
        trial = copy.deepcopy(model)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{type(model).__name__} cannot be copied to try the weights on ({error}); pass channel_dims by hand, in "
            "parameter groups."
        ) from error
    if not any(parameter.dtype == torch.float64 for parameter in trial.parameters()):
        trial.to(torch.float32)
    if not model.training:
        trial.train()
    for module in trial.modules():
        for name in _EPSILONS:
            if isinstance(getattr(module, name, None), float) or (name == "eps" and isinstance(module, nn.RMSNorm)):
                setattr(module, name, 1e-20)
        for name in _CHECKPOINTING:
            if getattr(module, name, False) is True:
                setattr(module, name, False)
    return trial


@contextlib.contextmanager
def exact(devices: Iterable[torch.device]) -> Iterator[None]:
    """Compute in full float32, whatever autocast and TF32 say outside."""
    kinds = {device.type for device in devices} - {"meta"}
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        if "cuda" in kinds:
            cudnn = torch.backends.cudnn
            keep = {"enabled": cudnn.enabled, "benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic}
            stack.enter_context(cudnn.flags(**keep, allow_tf32=False))
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        yield


@torch.no_grad()
def move(trial: nn.Module) -> None:
    """Move every parameter at random by a tenth of its size.

    Zeros (biases, last gains, layer scales of nearly nothing) and ones hide dependences; they move by a tenth of 1.
    """
    for parameter in trial.parameters():
        if parameter.is_floating_point() and parameter.numel():
            size = parameter.square().mean().sqrt()
            least = 0.0 if parameter.ndim > 1 else 1e-2
            parameter.add_(0.1 * torch.where(size > least, size, 1.0) * torch.randn_like(parameter))


def call(trial: nn.Module, batch: Any) -> Any:
    """Call a model with keywords (a mapping), arguments (a tuple or list) or one argument, floats in its own dtype."""
    dtype = next((p.dtype for p in trial.parameters() if p.is_floating_point()), torch.float32)

    def fit(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    batch = tree_map(fit, batch)
    if isinstance(batch, Mapping):
        return trial(**batch)
    return trial(*batch) if isinstance(batch, (tuple, list)) else trial(batch)
