"""Which layers a module has, and the filters of a layer as rows.

A filter is what one output of a layer is computed with: a row of a linear layer, a kernel of a convolution over all the
channels that it reads. As a vector it is the normal of a hyperplane.
"""

import inspect
import math
from collections import Counter
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy
from transformers.pytorch_utils import Conv1D

LayerKind = Literal["conv", "linear"]
LayerSelection = Literal["conv", "linear", "all"]

NAMES = {"conv": "convolution", "linear": "linear layer"}


def layer_kind(module: nn.Module) -> LayerKind | None:
    """Tell whether a module is a layer, by its class or a base class of it.

    Returns:
        `conv` for convolutions of one to three dimensions, also transposed ones; `linear` for `nn.Linear` and the
        `Conv1D` of transformers, which is a linear layer despite its name; None for what has no filters.
    """
    if isinstance(module, _ConvNd):
        return "conv"
    return "linear" if isinstance(module, nn.Linear | Conv1D) else None


def find_layers(model: nn.Module, layers: LayerSelection = "conv", include_1x1: bool = False) -> dict[str, nn.Module]:
    """Find the layers of a model.

    Args:
        model: Any module.
        layers: Which kinds; `all` are both.
        include_1x1: Also convolutions whose kernel is a single point. They are left out by default, as Gamba et al. do.

    Returns:
        The modules by their path, in the order in which they were defined; one whose weight an earlier one shares is
        left out. A model that is itself a layer has the path "".

    Raises:
        TypeError: If `model` is no module.
        ValueError: If there is no such selection, the model has no such layer, or one of them is quantised to a module
            of its own kind.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"layers are looked for in a torch.nn.Module; got {type(model).__name__}.")
    check_selection(layers)
    found: dict[str, nn.Module] = {}
    left_out: Counter[str] = Counter()
    seen: set[int] = set()
    for name, module in model.named_modules():
        kind = layer_kind(module)
        if kind is None:
            _refuse_packed(name, module, layers)
            continue
        weight = module._parameters.get("weight")  # a parametrised weight is made anew at every access, and not shared
        identity = id(module if weight is None else weight)
        if identity in seen:
            continue
        seen.add(identity)
        pointwise = kind == "conv" and math.prod(module.kernel_size) == 1
        if is_selected(kind, pointwise, layers, include_1x1):
            found[name] = module
        else:
            left_out[describe(kind, pointwise)] += 1
    if not found:
        raise ValueError(no_such_layer(f"the model, a {type(model).__name__},", layers, include_1x1, left_out))
    return found


def filters(module: nn.Module, name: str = "") -> Tensor:
    """Return the filters of a layer as rows, detached, on its device and of its dtype; a view where that is possible.

    Args:
        module: A layer, see `layer_kind`.
        name: Its path, for the message of an error.

    Returns:
        (F, N), F outputs, each a weighted sum of N inputs: N = C/g k k for a convolution of C input channels in g
        groups. For a transposed convolution it is the kernel that one output channel is painted with.

    Raises:
        ValueError: If the module is no layer, or its weights are not at hand as numbers: quantised, offloaded, sharded
            or not yet initialised.
    """
    kind = layer_kind(module)
    if kind is None:
        raise ValueError(f"{name or type(module).__name__} is neither a convolution nor a linear layer.")
    weight = readable(cast(Tensor, module.weight), kind, name or type(module).__name__)
    if isinstance(module, _ConvTransposeNd):  # (in, out / groups, ...)
        grouped = weight.unflatten(0, (module.groups, -1)).transpose(1, 2)
        return grouped.reshape(module.out_channels, -1)
    if isinstance(module, Conv1D):
        return weight.T
    return weight.flatten(1)


def check_selection(layers: str) -> None:
    """Refuse a selection that there is not."""
    if layers not in get_args(LayerSelection):
        raise ValueError(f"layers must be one of {', '.join(get_args(LayerSelection))}; got {layers!r}.")


def is_selected(kind: LayerKind, pointwise: bool, layers: LayerSelection, include_1x1: bool) -> bool:
    """Tell whether a layer belongs to a selection; `pointwise`: a convolution whose kernel is one point."""
    return layers in (kind, "all") and (include_1x1 or not pointwise)


def describe(kind: LayerKind, pointwise: bool) -> str:
    """Name a kind of layer for a message."""
    return f"{NAMES[kind]} of one point" if pointwise else NAMES[kind]


def no_such_layer(owner: str, layers: LayerSelection, include_1x1: bool, present: Counter[str]) -> str:
    """Say that nothing was found and what there is instead."""
    wanted = " or ".join(NAMES[kind] for kind in NAMES if layers in (kind, "all"))
    if layers != "linear" and not include_1x1:
        wanted += " (those of one point left out)"
    advice = []
    if present[describe("conv", True)] and layers != "linear":
        advice.append("include_1x1=True")
    advice += [f"layers={kind!r}" for kind in NAMES if present[NAMES[kind]] and layers not in (kind, "all")]
    has = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in sorted(present.items()))
    has = has.replace("convolution of one points", "convolutions of one point")
    return f"{owner} has no {wanted}; it has {has or 'neither kind'}." + (
        f" Choose {' or '.join(advice)}." if advice else ""
    )


def readable(weight: Tensor, kind: LayerKind, name: str) -> Tensor:
    """Return a weight, detached, if it can be computed with.

    Raises:
        ValueError: If it is lazy, quantised, on the meta device, or a part of a sharded one.
    """
    if is_lazy(weight):
        raise ValueError(f"the weight of {name} has no shape yet: the module is lazy. Run the model once.")
    if hasattr(weight, "full_tensor"):  # DTensor; the class itself is not there in builds without torch.distributed
        raise ValueError(
            f"the weight of {name} is a shard of a distributed tensor. Gather the full state dict first, by "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True, and give that."
        )
    if type(weight).__module__.startswith("torchao"):
        raise ValueError(quantised(name, f"a {type(weight).__name__}"))
    check_weight_dtype(name, weight.dtype)
    if weight.is_meta:
        raise ValueError(
            f"the weight of {name} is on the meta device: it is offloaded, or was never loaded. Load the model without "
            "device_map, or give the path of its safetensors files, which are read without a model."
        )
    if weight.ndim < 2 or (kind == "linear") != (weight.ndim == 2):
        raise ValueError(
            f"the weight of {name}, a {NAMES[kind]}, has the shape {tuple(weight.shape)}: it is packed or a shard of a "
            "distributed model. Gather the full state dict first and give that."
        )
    return weight.detach()


def check_weight_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuse a tensor whose numbers need a scale that is stored elsewhere.

    Raises:
        ValueError: If it is of integers or of eight bits.
    """
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(quantised(name, str(dtype)))


def quantised(name: str, what: str) -> str:
    """Say that weights are quantised and what to do."""
    return (
        f"{name} is quantised ({what}); its filters are not at hand as numbers. Give the model or the files before "
        "quantisation, or dequantise it, `model.dequantize()` in transformers."
    )


def _refuse_packed(name: str, module: nn.Module, layers: LayerSelection) -> None:
    """Refuse quantised modules that are no subclass of the layer that they stand for (torch.ao, GPTQ, AWQ)."""
    if inspect.ismethod(getattr(module, "weight", None)) or hasattr(module, "qweight"):
        kind = "conv" if "conv" in type(module).__name__.lower() else "linear"
        if layers in (kind, "all"):
            raise ValueError(quantised(name, f"a {type(module).__module__}.{type(module).__qualname__}"))
