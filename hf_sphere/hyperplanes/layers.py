"""The layers of a module, the filters of a layer as rows, and the stages of a network.

A filter holds the weights of one output of a layer: a row of a linear layer, or a kernel of a convolution over all its
input channels. As a vector it is the normal of a hyperplane.

Gamba et al. group their results by stages. They start a stage at each max-pooling, which is right for LeNet and VGG,
but results in only two stages of a ResNet. If the module paths number stages, those are used here.
"""

import inspect
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.nn.modules import pooling
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy
from transformers.pytorch_utils import Conv1D

from hf_sphere.hyperplanes.effective_weights import effective_weight

LayerKind = Literal["conv", "linear"]
LayerSelection = Literal["conv", "linear", "all"]

Kinds = dict[str, tuple[LayerKind, bool]]
"""Kind of each layer by name, and whether it is a pointwise convolution."""

OF_ADAPTER = (
    "belongs to an adapter, so it is not the whole weight of a layer. Merge adapters first: "
    "model.merge_and_unload() of PEFT returns the model without them."
)
GATHER = (
    "Gather the full state dict first, with torch.distributed.checkpoint.state_dict.get_model_state_dict and "
    "full_state_dict=True, and pass that."
)
NAMES = {"conv": "convolution", "linear": "linear layer"}

NUMBERED = re.compile(
    r"(?:^|\.)(?:"
    r"(?:layer|stage|denseblock|transition)_?(?P<from_one>\d+)\."
    r"|stages[._](\d+)\.|layers\.(\d+)\.(?:blocks|downsample)\.|blocks\.(\d+)\.\d+\."
    r")"
)
"""`layer1.0.conv1`, `model.backbone.stage2.x`, `features.denseblock1.x`, `resnet.encoder.stages.0.layers.1.x`, Swin's
`layers.0.blocks.1.x` and `layers.1.downsample.x`, EfficientNet's `blocks.0.1.x`; not `encoder.layer.0.x` nor
`blocks.0.x`, which number layers of one kind. A module named `layer1` itself is a layer, not a stage."""

_ADAPTIVE = (pooling._AdaptiveAvgPoolNd, pooling._AdaptiveMaxPoolNd)
_WINDOWED = (pooling._MaxPoolNd, pooling._AvgPoolNd)


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
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    kinds: Kinds = {}
    seen: set[int] = set()
    adapters: list[str] = []
    for name, module in model.named_modules():
        kind = layer_kind(module)
        if isinstance(getattr(module, "disable_adapters", None), bool):  # as in layers of PEFT
            adapters.append(name and f"{name}.")
        if kind is None:
            _refuse_packed(name, module, layers)
            continue
        weight = module._parameters.get("weight")  # a parametrized weight is computed at every access, and not shared
        identity = id(module if weight is None else weight)
        if identity not in seen:
            kinds[name] = (kind, kind == "conv" and math.prod(module.kernel_size) == 1)
        seen.add(identity)
    selected = select_layers(kinds, layers, include_1x1, f"the model, a {type(model).__name__},")
    if inside := [name for name in selected if f"{name}.".startswith(tuple(adapters))]:
        raise ValueError(f"{inside[0]} {OF_ADAPTER}")
    return {name: model.get_submodule(name) for name in selected}


def select_layers(kinds: Kinds, layers: LayerSelection, include_1x1: bool, owner: str) -> list[str]:
    """Select layers by kind from those of a model or checkpoint, which `owner` names in error messages.

    The error if no layer is selected names the kinds that exist.
    """
    if layers not in get_args(LayerSelection):
        raise ValueError(f"layers must be one of {', '.join(get_args(LayerSelection))}; got {layers!r}.")
    of_kind = {name: pointwise for name, (kind, pointwise) in kinds.items() if layers in (kind, "all")}
    if selected := [name for name, pointwise in of_kind.items() if include_1x1 or not pointwise]:
        return selected
    counts = Counter(f"pointwise {NAMES[kind]}" if pointwise else NAMES[kind] for kind, pointwise in kinds.values())
    has = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in sorted(counts.items()))
    advice = [f"layers={kind!r}" for kind, name in NAMES.items() if counts[name] and layers not in (kind, "all")]
    if counts["pointwise convolution"] and layers != "linear":
        advice.insert(0, "include_1x1=True")
    raise ValueError(
        f"{owner} has no layer with layers={layers!r} and include_1x1={include_1x1}; it has {has or 'neither kind'}."
        + (f" Choose {' or '.join(advice)}." if advice else "")
    )


def filters(module: nn.Module, name: str = "") -> Tensor:
    """Return the filters that a layer uses as rows, detached, on its device; a view of its weight where possible.

    They are (F, N), F outputs, each a weighted sum of N inputs: N = C/g k k for a convolution of C input channels in g
    groups. For a transposed convolution, they are the kernels that contribute to one output channel. A module that is
    not a layer is an error, as are weights that are quantized, offloaded, sharded or uninitialized, or for which
    `effective_weight` raises one.
    """
    kind = layer_kind(module)
    if kind is None:
        raise ValueError(f"{name or type(module).__name__} is neither a convolution nor a linear layer.")
    name = name or type(module).__name__
    if (stored := module._parameters.get("weight")) is not None:
        readable(stored, kind, name)
    weight = readable(effective_weight(module, name), kind, name)
    if isinstance(module, _ConvTransposeNd):  # (in, out / groups, ...)
        grouped = weight.unflatten(0, (module.groups, -1)).transpose(1, 2)
        return grouped.reshape(module.out_channels, -1)
    return weight.T if isinstance(module, Conv1D) else weight.flatten(1)


def readable(weight: Tensor, kind: LayerKind, name: str) -> Tensor:
    """Return a weight, detached, or raise a ValueError if it is lazy, quantized, on the meta device or a shard."""
    if is_lazy(weight):
        raise ValueError(f"the weight of {name} has no shape yet: the module is lazy. Run the model once.")
    if hasattr(weight, "full_tensor"):  # DTensor, which builds without torch.distributed lack
        raise ValueError(f"the weight of {name} is a shard of a distributed tensor. {GATHER}")
    if type(weight).__module__.startswith("torchao"):
        raise ValueError(quantized(name, f"a {type(weight).__name__}"))
    if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        raise ValueError(quantized(name, str(weight.dtype)))
    if weight.is_meta:
        advice = "Load the model without device_map, or pass the path of its safetensors files"
        raise ValueError(f"the weight of {name} is on the meta device: it is offloaded, or was never loaded. {advice}.")
    if weight.ndim < 2 or (kind == "linear") != (weight.ndim == 2):
        shape = f"{NAMES[kind]}, has the shape {tuple(weight.shape)}"
        raise ValueError(f"the weight of {name}, a {shape}: it is packed, or a shard of a distributed model. {GATHER}")
    return weight.detach()


def quantized(name: str, what: str) -> str:
    """Return the message for quantized weights."""
    return (
        f"{name} is quantized ({what}), so the values of its filters are not available. Pass the model or the "
        "files before quantization, or dequantize the model with `model.dequantize()` of transformers."
    )


def _refuse_packed(name: str, module: nn.Module, layers: LayerSelection) -> None:
    """Raise ValueError for quantized modules that do not subclass the layer they replace (torch.ao, GPTQ, AWQ)."""
    if inspect.ismethod(getattr(module, "weight", None)) or hasattr(module, "qweight"):
        kind = "conv" if "conv" in type(module).__name__.lower() else "linear"
        if layers in (kind, "all"):
            raise ValueError(quantized(name, f"a {type(module).__module__}.{type(module).__qualname__}"))


def numbered_stage(name: str) -> int | None:
    """Return the stage in a module path, if any: 1 for `layer1.` and the like, and also for `stages.0.`."""
    match = NUMBERED.search(name)
    if match is None:
        return None
    stage = int(next(filter(None, match.groups())))
    return stage if match["from_one"] else stage + 1


def stages_of_model(model: nn.Module) -> dict[str, int]:
    """Return the stage of every layer of a model, of all kinds.

    If module paths number stages, those are the stages, from 1. Layers defined before them are in stage 0, the stem;
    layers between and after them are in the preceding stage. Otherwise the first layer after a pooling (maximum,
    average or adaptive) starts the next stage, from 0. Two kinds of poolings do not start a stage: those that keep the
    resolution, as in an Inception block, and adaptive ones to a single point before the last convolution, as in a
    squeeze-and-excitation block.

    The ConvNeXt, Swin, EfficientNet and MobileNetV2 of torchvision do not number stages and reduce the resolution by
    strides: all layers except the classifier are in stage 0. In MobileNetV2, whose pooling is not a module, the
    classifier is in stage 0, too.
    """
    kinds = {name: kind for name, module in model.named_modules() if (kind := layer_kind(module))}
    stages_in_names = {name: numbered_stage(name) for name in kinds}
    stages: dict[str, int] = {}
    stage, pooled = 0, False
    if {*stages_in_names.values()} != {None}:
        for name, stage_in_name in stages_in_names.items():
            stage = stages[name] = stage if stage_in_name is None else stage_in_name
        return stages
    modules = dict(model.named_modules())
    last_convolution = max((at for at, name in enumerate(modules) if kinds.get(name) == "conv"), default=-1)
    for at, (name, module) in enumerate(modules.items()):
        if name in kinds:
            stage += pooled and bool(stages)
            stages[name], pooled = stage, False
        else:
            pooled = pooled or _reduces(module, to_point=at > last_convolution)
    return stages


def blocks_of_stages(stages: Iterable[int | None]) -> list[int | None]:
    """Number the analyzed layers within their stages, from 0."""
    counts: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
    return [None if stage is None else next(counts[stage]) for stage in stages]


def _reduces(module: nn.Module, to_point: bool) -> bool:
    """Return whether a module pools to a lower resolution; `to_point`: whether adaptive pooling to one point counts."""
    if isinstance(module, _ADAPTIVE):
        sizes = module.output_size if isinstance(module.output_size, tuple) else (module.output_size,)
        return to_point or any(size != 1 for size in sizes)
    if not isinstance(module, _WINDOWED):
        return False
    stride: Any = module.stride
    return max(stride) > 1 if isinstance(stride, tuple) else stride > 1
