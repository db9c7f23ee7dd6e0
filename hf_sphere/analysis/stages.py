"""Stages of a network, by which Gamba et al. group their results.

They start a stage at each max-pooling, which is right for LeNet and VGG, but results in only two stages of a ResNet. If
the module paths number stages, those are used here.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from torch import nn
from torch.nn.modules import pooling

from hf_sphere.analysis.layers import LayerKind, layer_kind

NUMBERED = re.compile(
    r"(?:^|\.)(?:"
    r"(?:layer|stage|denseblock|transition)_?(?P<from_one>\d+)\."
    r"|stages[._](?P<stages>\d+)\.|layers\.(?P<layers>\d+)\.(?:blocks|downsample)\.|blocks\.(?P<blocks>\d+)\.\d+\."
    r")"
)
"""`layer1.0.conv1`, `model.backbone.stage2.x`, `features.denseblock1.x`, `resnet.encoder.stages.0.layers.1.x`, Swin's
`layers.0.blocks.1.x` and `layers.1.downsample.x`, EfficientNet's `blocks.0.1.x`; not `encoder.layer.0.x` nor
`blocks.0.x`, which number layers of one kind. A module named `layer1` itself is a layer, not a stage."""

_ADAPTIVE = (pooling._AdaptiveAvgPoolNd, pooling._AdaptiveMaxPoolNd)
_WINDOWED = (
    pooling._MaxPoolNd,
    pooling._AvgPoolNd,
    pooling._LPPoolNd,
    pooling.FractionalMaxPool2d,
    pooling.FractionalMaxPool3d,
)


def numbered_stage(name: str) -> int | None:
    """Return the stage in a module path, if any: 1 for `layer1.` and the like, and also for `stages.0.`."""
    match = NUMBERED.search(name)
    if match is None:
        return None
    if match["from_one"] is not None:
        return int(match["from_one"])
    return int(match["stages"] or match["layers"] or match["blocks"]) + 1


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
    numbers = {name: numbered_stage(name) for name in kinds}
    stages: dict[str, int] = {}
    stage = 0
    if any(number is not None for number in numbers.values()):
        for name, number in numbers.items():
            stage = stages[name] = stage if number is None else number
        return stages

    modules = dict(model.named_modules())
    last_convolution = max((at for at, name in enumerate(modules) if kinds.get(name) == "conv"), default=-1)
    pooled = False
    for at, (name, module) in enumerate(modules.items()):
        if name in kinds:
            stage += pooled and bool(stages)
            stages[name] = stage
            pooled = False
        else:
            pooled = pooled or _reduces(module, to_point=at > last_convolution)
    return stages


def stages_of_names(kinds: Mapping[str, LayerKind]) -> dict[str, int] | None:
    """Return the stage of every layer of a file or a state dict, which has names but no modules.

    Layers whose names do not number stages are in the stem, stage 0, if they are convolutions, and in the last stage if
    they are linear, since names do not show whether a layer is between or after the stages: `conv_head` of the
    EfficientNet of timm is in stage 0 by its name, and in the last stage by the model. None if no name numbers a stage,
    since poolings have no weights.
    """
    numbers = {name: numbered_stage(name) for name in kinds}
    known = [number for number in numbers.values() if number is not None]
    if not known:
        return None
    other = {"conv": 0, "linear": max(known)}
    return {name: other[kinds[name]] if number is None else number for name, number in numbers.items()}


def blocks_of_stages(stages: Iterable[int | None]) -> list[int | None]:
    """Number the analyzed layers within their stages, from 0."""
    counts: Counter[int | None] = Counter()
    blocks: list[int | None] = []
    for stage in stages:
        blocks.append(None if stage is None else counts[stage])
        counts[stage] += 1
    return blocks


def _reduces(module: nn.Module, to_point: bool) -> bool:
    """Return whether a module pools to a lower resolution; `to_point`: whether adaptive pooling to one point counts."""
    if isinstance(module, _ADAPTIVE):
        sizes = module.output_size if isinstance(module.output_size, tuple) else (module.output_size,)
        return to_point or any(size != 1 for size in sizes)
    if not isinstance(module, _WINDOWED):
        return False
    stride = getattr(module, "stride", None) or 2  # fractional poolings have no stride, and always reduce
    return max(stride) > 1 if isinstance(stride, tuple) else stride > 1
