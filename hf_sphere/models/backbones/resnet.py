"""timm's ResNets with the stem for small images: one 3x3 convolution and no pooling."""

from typing import Any

from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn

from hf_sphere.models.backbones.base import register_backbone


def _with_small_stem(model: ResNet, in_chans: int) -> ResNet:
    stem = nn.Conv2d(in_chans, model.bn1.num_features, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as timm does for its own
    model.conv1 = stem
    model.maxpool = nn.Identity()
    model.pretrained_cfg = {}
    return model


def _resnet(block: type[nn.Module], layers: tuple[int, ...], *, in_chans: int = 3, **options: Any) -> ResNet:
    return _with_small_stem(ResNet(block, layers, in_chans=in_chans, **options), in_chans)


def _thin_resnet(depth: int, *, in_chans: int = 3, **options: Any) -> ResNet:
    # A "deep" stem of width 8 is timm's way to 16 channels before the first stage; the stem itself is replaced.
    blocks = ((depth - 2) // 6,) * 3
    thin = {"channels": (16, 32, 64), "stem_type": "deep", "stem_width": 8}
    model = _with_small_stem(ResNet(BasicBlock, blocks, in_chans=in_chans, **thin, **options), in_chans)
    model.layer4 = nn.Sequential()  # timm's forward pass goes through four stages by name
    return model


@register_backbone
def resnet20_cifar(**options: Any) -> ResNet:
    """ResNet-20 of He et al.'s CIFAR experiments: three stages of 16, 32, 64 channels, projection shortcuts."""
    return _thin_resnet(20, **options)


@register_backbone
def resnet32_cifar(**options: Any) -> ResNet:
    """ResNet-32 of He et al.'s CIFAR experiments: three stages of 16, 32, 64 channels, projection shortcuts."""
    return _thin_resnet(32, **options)


@register_backbone
def resnet18_cifar(**options: Any) -> ResNet:
    """ResNet-18 with a 3x3 stem."""
    return _resnet(BasicBlock, (2, 2, 2, 2), **options)


@register_backbone
def resnet34_cifar(**options: Any) -> ResNet:
    """ResNet-34 with a 3x3 stem."""
    return _resnet(BasicBlock, (3, 4, 6, 3), **options)


@register_backbone
def resnet50_cifar(**options: Any) -> ResNet:
    """ResNet-50 with a 3x3 stem."""
    return _resnet(Bottleneck, (3, 4, 6, 3), **options)
