"""A copy of a model for the numerical check, in training mode with perturbed weights, and inputs generated for it."""

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
_SIDES = (32, 28, 64, 84, 96, 128, 224, 299, 16, 8)
_BATCH = 4  # batch norm over a 1 x 1 map has one value per image, and has no gradient for two values


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


def example_inputs(model: nn.Module) -> Iterator[Any]:
    """Yield inputs that the model may accept, the most likely first.

    Models of transformers have `main_input_name` and a configuration, models of timm `pretrained_cfg`; for others the
    first layer with weights determines the number of channels or features, and several sizes are tried.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    config = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    if name is not None and config is not None:
        yield from _for_transformers(name, config, device)
    size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
    if size:
        yield torch.randn(_BATCH, *size, device=device)
    yield from _for_first_layer(model, device)


def _for_transformers(name: str, config: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if name == "input_ids":
        ids = torch.randint(0, getattr(text, "vocab_size", 100), (2, 16), device=device)
        yield {"input_ids": ids}
        yield {"input_ids": ids, "decoder_input_ids": ids}
    elif name == "pixel_values":
        side = getattr(config, "image_size", 224)
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        yield {name: torch.randn(_BATCH, getattr(config, "num_channels", 3), height, width, device=device)}
    elif name == "input_values":
        yield {name: torch.randn(2, 16000, device=device)}


def _for_first_layer(model: nn.Module, device: torch.device) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            spatial = len(module.kernel_size)
            for side in _SIDES:
                yield torch.randn(_BATCH, module.in_channels, *[side] * spatial, device=device)
        elif isinstance(module, nn.Linear):
            yield torch.randn(_BATCH, module.in_features, device=device)
            yield torch.randn(_BATCH, 5, module.in_features, device=device)
            for side in _SIDES:
                for channels in (1, 3):  # images that the model flattens
                    if channels * side * side == module.in_features:
                        yield torch.randn(_BATCH, channels, side, side, device=device)
        elif isinstance(module, nn.Embedding):
            yield torch.randint(0, module.num_embeddings, (2, 16), device=device)
        else:
            continue
        return
