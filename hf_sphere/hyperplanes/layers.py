"""The convolutions and linear layers of a module, and the filters of a layer as rows.

A filter holds the weights of one output of a layer: a row of a linear layer, or a kernel of a convolution over all its
input channels. As a vector it is the normal of a hyperplane.
"""

import inspect
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from transformers.pytorch_utils import Conv1D

from hf_sphere.utils.modules import eval_mode

LayerKind = Literal["conv", "linear"]
LayerSelection = Literal["conv", "linear", "all"]

POINTWISE = "1x1 conv"
ADAPTER = re.compile(r"(.*\.)?(lora([_.].*)?|base_layer|(original_module|modules_to_save)(\..*)?)")
"""Names of layers of PEFT."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FORWARDS = {one.forward for one in (nn.Linear, Conv1D, *_CONVOLUTIONS, *_TRANSPOSED)}
_CONVOLVE = {None, *(one._conv_forward for one in (_ConvNd, *_CONVOLUTIONS))}


def layer_kind(module: nn.Module) -> LayerKind | None:
    """Return the kind of a layer; None for modules without filters. The `Conv1D` of transformers is `linear`."""
    if isinstance(module, _ConvNd):
        return "conv"
    return "linear" if isinstance(module, nn.Linear | Conv1D) else None


def find_layers(model: nn.Module, layers: LayerSelection = "conv", include_1x1: bool = False) -> dict[str, nn.Module]:
    """Return the layers of a model by path, in order; those that share the weight of an earlier one are left out."""
    kinds: dict[str, str] = {}
    seen: set[int] = set()
    packed: set[str] = set()  # layers of torch.ao, GPTQ and AWQ do not subclass the layer they replace
    for name, module in model.named_modules():
        kind = layer_kind(module)
        if kind is None and (inspect.ismethod(getattr(module, "weight", None)) or hasattr(module, "qweight")):
            kind = "conv" if "conv" in type(module).__name__.lower() else "linear"
            packed.add(name)
        if kind is None:
            continue
        weight = module._parameters.get("weight")  # a parametrized weight is computed at every access, and not shared
        identity = id(module if weight is None else weight)
        if identity not in seen:
            kinds[name] = POINTWISE if math.prod(getattr(module, "kernel_size", (0,))) == 1 else kind
        seen.add(identity)
    selected = select_layers(kinds, layers, include_1x1, f"the model, a {type(model).__name__},")
    if quantized := packed.intersection(selected):
        raise ValueError(f"{min(quantized)} is quantized. Pass the model before quantization.")
    return {name: model.get_submodule(name) for name in selected}


def select_layers(kinds: Mapping[str, str], layers: LayerSelection, include_1x1: bool, owner: str) -> list[str]:
    """Select layers by kind, `conv`, `linear` or `POINTWISE`; none is an error, and so is one of an adapter."""
    wanted = {"conv", "linear"} if layers == "all" else {layers}
    wanted |= {POINTWISE} if include_1x1 and layers != "linear" else set()
    selected = [name for name, kind in kinds.items() if kind in wanted]
    if not selected:
        raise ValueError(
            f"{owner} has no layer with layers={layers!r} and include_1x1={include_1x1}; it has "
            f"{', '.join(f'{count} {kind}' for kind, count in sorted(Counter(kinds.values()).items())) or 'neither'}. "
            "Choose layers='conv', 'linear' or 'all', or include_1x1=True."
        )
    if adapters := [name for name in selected if ADAPTER.fullmatch(name)]:
        raise ValueError(
            f"{adapters[0]} belongs to an adapter, so it is not the whole weight of a layer. Merge adapters first: "
            "model.merge_and_unload() of PEFT returns the model without them."
        )
    return selected


def filters(module: nn.Module, name: str = "") -> Tensor:
    """Return the filters of a layer as rows (F, N), as evaluation mode uses them, detached; a view where possible.

    Those of a transposed convolution are the kernels that contribute to one output channel.
    """
    weight = _weight_in_use(module, name)
    if isinstance(module, _ConvTransposeNd):  # (in, out / groups, ...)
        grouped = weight.unflatten(0, (module.groups, -1)).transpose(1, 2)
        return grouped.reshape(module.out_channels, -1)
    return weight.T if isinstance(module, Conv1D) else weight.flatten(1)


def _weight_in_use(module: nn.Module, name: str) -> Tensor:
    """Return the weight of a layer in evaluation mode."""
    convolve = getattr(type(module), "_conv_forward", None)
    if getattr(module.forward, "__func__", None) not in _FORWARDS or convolve not in _CONVOLVE:
        raise ValueError(
            f"{name or 'the model'}, a {type(module).__name__}, has its own forward pass, which may change its weight. "
            "To analyze stored weights instead, pass the state dict of the model."
        )
    if (stored := module._parameters.get("weight")) is not None:
        return stored.detach()
    # Normalization and pruning by hooks set the attribute before a forward pass; until then it may be outdated.
    with eval_mode(module), torch.no_grad():
        for hook in module._forward_pre_hooks.values():
            hook(module, ())
        weight: Any = module.weight
        return weight.detach()
