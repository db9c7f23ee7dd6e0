"""The convolutions and linear layers of a module, and the filters of a layer as rows.

A filter holds the weights of one output of a layer: a row of a linear layer, or a kernel of a convolution over all its
input channels. As a vector it is the normal of a hyperplane.
"""

import inspect
import math
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
OF_ADAPTER = (
    "belongs to an adapter, so it is not the whole weight of a layer. Merge adapters first: "
    "model.merge_and_unload() of PEFT returns the model without them."
)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FORWARDS = {one.forward for one in (nn.Linear, Conv1D, *_CONVOLUTIONS, *_TRANSPOSED)}
_CONVOLVE = {None, *(one._conv_forward for one in (_ConvNd, *_CONVOLUTIONS))}


def layer_kind(module: nn.Module) -> LayerKind | None:
    """Return the kind of a layer, determined by its class or a base class; None for modules without filters.

    Transposed convolutions are `conv`; the `Conv1D` of transformers is `linear` despite its name.
    """
    if isinstance(module, _ConvNd):
        return "conv"
    return "linear" if isinstance(module, nn.Linear | Conv1D) else None


def find_layers(model: nn.Module, layers: LayerSelection = "conv", include_1x1: bool = False) -> dict[str, nn.Module]:
    """Return the layers of a model by path, in the order of definition; `all` means both kinds.

    Layers that share the weight of an earlier one are left out, and pointwise (1x1) convolutions unless `include_1x1`,
    as in Gamba et al. The path of a model that is itself a layer is "". A model without such a layer, or with one that
    is quantized or has an adapter of PEFT, is an error.
    """
    kinds: dict[str, str] = {}
    seen: set[int] = set()
    packed: set[str] = set()
    adapters: list[str] = []
    for name, module in model.named_modules():
        kind = layer_kind(module)
        if isinstance(getattr(module, "disable_adapters", None), bool):  # as in layers of PEFT
            adapters.append(name and f"{name}.")
        if kind is None and (inspect.ismethod(getattr(module, "weight", None)) or hasattr(module, "qweight")):
            # Layers of torch.ao, GPTQ and AWQ do not subclass the layer they replace.
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
    found = {name: model.get_submodule(name) for name in selected}
    for name, module in found.items():
        if f"{name}.".startswith(tuple(adapters)):
            raise ValueError(f"{name} {OF_ADAPTER}")
        check_not_quantized(name, None if name in packed else module._parameters.get("weight"), name in packed)
    return found


def select_layers(kinds: Mapping[str, str], layers: LayerSelection, include_1x1: bool, owner: str) -> list[str]:
    """Select layers by kind, `conv`, `linear` or `POINTWISE`; `owner` is named in the error if there are none."""
    wanted = {"conv", "linear"} if layers == "all" else {layers}
    wanted |= {POINTWISE} if include_1x1 and layers != "linear" else set()
    if selected := [name for name, kind in kinds.items() if kind in wanted]:
        return selected
    has = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(kinds.values()).items())) or "neither kind"
    raise ValueError(
        f"{owner} has no layer with layers={layers!r} and include_1x1={include_1x1}; it has {has}. Choose "
        "layers='conv', 'linear' or 'all', or include_1x1=True."
    )


def check_not_quantized(name: str, weight: Tensor | None, is_packed: bool = False) -> None:
    """Raise a ValueError for a weight whose numbers are codes of quantized ones."""
    is_subclass = type(weight).__module__.startswith("torchao")
    is_code = weight is not None and (not weight.dtype.is_floating_point or weight.dtype.itemsize < 2)
    if is_packed or is_subclass or is_code:
        raise ValueError(
            f"{name or 'the layer'} is quantized, so the values of its filters are not available. Pass the model or "
            "the files before quantization, or dequantize the model with `model.dequantize()` of transformers."
        )


def filters(module: nn.Module, name: str = "") -> Tensor:
    """Return the filters of a layer as rows, detached, on its device; a view of its weight where possible.

    They are (F, N), F outputs, each a weighted sum of N inputs: N = C/g k k for a convolution of C input channels in g
    groups. For a transposed convolution, they are the kernels that contribute to one output channel. The weight is the
    one of evaluation mode; a layer whose forward pass may change it is an error.
    """
    weight = _weight_in_use(module, name)
    if isinstance(module, _ConvTransposeNd):  # (in, out / groups, ...)
        grouped = weight.unflatten(0, (module.groups, -1)).transpose(1, 2)
        return grouped.reshape(module.out_channels, -1)
    return weight.T if isinstance(module, Conv1D) else weight.flatten(1)


def _weight_in_use(module: nn.Module, name: str) -> Tensor:
    """Return the weight of a layer in evaluation mode; the layer is unchanged.

    Weight and spectral normalization and pruning compute it in a parametrization, or in a hook before the forward pass,
    which leaves the attribute outdated when a state dict is loaded.
    """
    is_plain = "forward" not in vars(module) and type(module).forward in _FORWARDS
    if not is_plain or getattr(type(module), "_conv_forward", None) not in _CONVOLVE:
        what = (
            f"{name or 'the model'}, a {type(module).__name__}, has its own forward pass, which may change its weight"
        )
        raise ValueError(f"{what}. To analyze stored weights instead, pass the state dict of the model.")
    if (stored := module._parameters.get("weight")) is not None:
        return stored.detach()
    before = dict(vars(module))
    try:
        with eval_mode(module), torch.no_grad():
            for hook in module._forward_pre_hooks.values():
                hook(module, ())
            weight: Any = module.weight
            return weight.detach()
    finally:
        vars(module).clear()
        vars(module).update(before)
