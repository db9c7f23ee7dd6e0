"""In which stage of a network a layer is: the keys by which Gamba et al. file their results.

They start a stage at each max-pooling, which is right for LeNet and VGG, but leaves a ResNet with two. Where the module
paths number stages, these are the stages.
"""

import re
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
`blocks.0.x`, where layers of one kind are counted. What is itself called `layer1` is a layer and no stage."""

_ADAPTIVE = (pooling._AdaptiveAvgPoolNd, pooling._AdaptiveMaxPoolNd)
_WINDOWED = (
    pooling._MaxPoolNd,
    pooling._AvgPoolNd,
    pooling._LPPoolNd,
    pooling.FractionalMaxPool2d,
    pooling.FractionalMaxPool3d,
)


def numbered_stage(name: str) -> int | None:
    """Read the stage from a module path: `layer1.` and its like are stage 1, and so is `stages.0.`."""
    match = NUMBERED.search(name)
    if match is None:
        return None
    if match["from_one"] is not None:
        return int(match["from_one"])
    return int(match["stages"] or match["layers"] or match["blocks"]) + 1


def stages_of_model(model: nn.Module) -> dict[str, int]:
    """Return the stage of every layer of a model, whatever its kind.

    If module paths number stages, those are the stages, from 1; what is defined before is stage 0, the stem, and what
    is defined between and after them belongs to the stage before. Else the first layer after a pooling (maximum,
    average or adaptive) starts the next stage, from 0. Poolings that keep the resolution start none, as in an Inception
    block, and neither do adaptive ones to a single point with a convolution still to come, as in a block of squeeze and
    excitation.

    In torchvision, ConvNeXt, Swin, EfficientNet and MobileNetV2 number no stages and reduce by strides: all but the
    classifier is stage 0, and in MobileNetV2, whose pooling is no module, the classifier too.
    """
    kinds = {name: kind for name, module in model.named_modules() if (kind := layer_kind(module))}
    numbers = {name: numbered_stage(name) for name in kinds}
    if any(number is not None for number in numbers.values()):
        stage = 0
        stages = {}
        for name, number in numbers.items():
            stage = stage if number is None else number
            stages[name] = stage
        return stages

    modules = dict(model.named_modules())
    last_convolution = max((at for at, name in enumerate(modules) if kinds.get(name) == "conv"), default=-1)
    stages = {}
    stage, pooled = 0, False
    for at, (name, module) in enumerate(modules.items()):
        if name in kinds:
            stage += pooled and bool(stages)
            stages[name] = stage
            pooled = False
        else:
            pooled = pooled or _reduces(module, to_point=at > last_convolution)
    return stages


def stages_of_names(kinds: Mapping[str, LayerKind]) -> dict[str, int] | None:
    """Return the stage of every layer of a file or a state dict, which has names and no modules.

    Args:
        kinds: All layers and their kinds, in any order.

    Returns:
        The stages that the names number. Of the other layers, convolutions are counted to the stem, stage 0, and linear
        layers to the last stage: names do not say that a layer is between or after the stages. `conv_head` of timm's
        EfficientNet, which comes after them, is stage 0 by its name; give the model, by which it is in the last stage.
        None if no name numbers a stage: poolings have no weights.
    """
    numbers = {name: numbered_stage(name) for name in kinds}
    known = [number for number in numbers.values() if number is not None]
    if not known:
        return None
    other = {"conv": 0, "linear": max(known)}
    return {name: other[kinds[name]] if number is None else number for name, number in numbers.items()}


def blocks_of_stages(stages: Iterable[int | None]) -> list[int | None]:
    """Number the analysed layers within their stages, from 0."""
    counts: dict[int, int] = {}
    blocks: list[int | None] = []
    for stage in stages:
        if stage is None:
            blocks.append(None)
            continue
        blocks.append(counts.get(stage, 0))
        counts[stage] = counts.get(stage, 0) + 1
    return blocks


def _reduces(module: nn.Module, to_point: bool) -> bool:
    """Tell whether a module pools to a lower resolution; `to_point`: whether adaptive poolings to one point count."""
    if isinstance(module, _ADAPTIVE):
        sizes = module.output_size if isinstance(module.output_size, tuple) else (module.output_size,)
        return to_point or any(size != 1 for size in sizes)
    if not isinstance(module, _WINDOWED):
        return False
    stride = getattr(module, "stride", None) or 2  # fractional poolings have none, and always reduce
    return max(stride) > 1 if isinstance(stride, tuple) else stride > 1
