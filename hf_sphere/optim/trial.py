"""A copy of a model for the numerical check: in training mode, with negligible epsilons and perturbed weights."""

import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

_EPSILONS = ("eps", "epsilon", "variance_epsilon")
_CHECKPOINTING = ("gradient_checkpointing", "grad_checkpointing")


def make_trial(model: nn.Module) -> nn.Module:
    """Copy a model for the numerical check.

    The epsilons of norms, which break the invariance slightly, become negligible. A model in evaluation mode is
    switched to training mode; in a model in training mode, the modes of its modules are kept. The copy computes in
    float32 or better, without activation checkpointing.

    Raises:
        ValueError: If the model is sharded, on the meta device, or cannot be copied.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name} is sharded; find the groups before the model is sharded.")
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device; the numerical check needs real weights.")
    try:
        trial = copy.deepcopy(model)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{type(model).__name__} cannot be copied for the numerical check ({error}); pass parameter "
            "groups with channel_dims instead."
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
    """Compute in full float32, without autocast and TF32."""
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
    """Perturb every parameter at random by a tenth of its root mean square.

    Initial values of zero or nearly zero (layer scales, class tokens) hide dependences; those are perturbed by 0.1.
    """
    for parameter in trial.parameters():
        if parameter.is_floating_point() and parameter.numel():
            size = parameter.square().mean().sqrt()
            least = 1e-4 if parameter.ndim > 1 else 1e-2
            parameter.add_(0.1 * torch.where(size > least, size, 1.0) * torch.randn_like(parameter))


def call(trial: nn.Module, batch: Any) -> Any:
    """Call a model with keyword arguments (a mapping), arguments (a tuple or list) or one argument, in its dtype."""
    dtype = next((p.dtype for p in trial.parameters() if p.is_floating_point()), torch.float32)
    batch = tree_map_only(Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, batch)
    if isinstance(batch, Mapping):
        return trial(**batch)
    return trial(*batch) if isinstance(batch, (tuple, list)) else trial(batch)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disable log messages up to warnings: those of a trial would be misunderstood as those of the training."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
