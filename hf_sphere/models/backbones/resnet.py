"""ResNets and DenseNet with a stem for small images, and ResNets of few-shot classification."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from timm.layers import SelectAdaptivePool2d
from timm.models.densenet import DenseNet
from timm.models.resnet import BasicBlock, Bottleneck, ResNet, downsample_conv
from torch import Tensor, nn

from hf_sphere.models.backbones import base
from hf_sphere.models.backbones.base import EmbeddingNet, ImageSize, feature_side, register_backbone


class SmallStemResNet(ResNet):
    """timm's ResNet with a 3x3 convolution as its stem, without pooling by default.

    With `max_pool`, the stem keeps its max-pooling, so that all feature maps have half the side.
    """

    def __init__(
        self,
        block: type[nn.Module],
        layers: tuple[int, ...],
        *,
        in_chans: int = 3,
        max_pool: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(block, layers, in_chans=in_chans, **options)
        self.conv1 = nn.Conv2d(in_chans, self.bn1.num_features, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")  # as in timm
        if not max_pool:
            self.maxpool = nn.Identity()
        self.pretrained_cfg: dict[str, Any] = {}
        if not hasattr(self, "layer4"):
            self.layer4 = nn.Sequential()  # timm's forward pass requires all four

    def remove_final_activation(self) -> None:
        """Remove the last ReLU, for a head that replaces it."""
        stages = [stage for stage in (self.layer1, self.layer2, self.layer3, self.layer4) if len(stage)]
        last = stages[-1][-1]
        setattr(last, "act3" if isinstance(last, Bottleneck) else "act2", nn.Identity())


def _thin_resnet(depth: int, **options: Any) -> ResNet:
    # In timm a "deep" stem of width 8 gives 16 channels before the first stage; the stem itself is replaced.
    blocks = ((depth - 2) // 6,) * 3
    thin: dict[str, Any] = {"channels": (16, 32, 64), "stem_type": "deep", "stem_width": 8}
    return SmallStemResNet(BasicBlock, blocks, **thin, **options)


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
    return SmallStemResNet(BasicBlock, (2, 2, 2, 2), **options)


@register_backbone
def resnet50_cifar(**options: Any) -> ResNet:
    """ResNet-50 with a 3x3 stem."""
    return SmallStemResNet(Bottleneck, (3, 4, 6, 3), **options)


class SmallStemDenseNet(DenseNet):
    """timm's DenseNet whose stem is one 3x3 convolution, without norm, activation and pooling."""

    def __init__(self, *, in_chans: int = 3, **options: Any) -> None:
        super().__init__(in_chans=in_chans, **options)
        stem = self.features.conv0
        self.features.conv0 = nn.Conv2d(in_chans, stem.out_channels, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(self.features.conv0.weight)  # as in timm
        self.features.norm0 = nn.Identity()  # with its activation
        self.features.pool0 = nn.Identity()
        self.pretrained_cfg: dict[str, Any] = {}

    def remove_final_activation(self) -> None:
        """Remove the ReLU after the last batch norm, for a head that replaces it."""
        self.features.norm5.act = nn.Identity()


@register_backbone
def densenet121_cifar(**options: Any) -> DenseNet:
    """DenseNet-121 (Huang et al., 2017) for images of 32 or 64 pixels: growth rate 32, a 3x3 convolution as stem."""
    return SmallStemDenseNet(growth_rate=32, block_config=(6, 12, 24, 16), **options)


SLOPE = 0.1  # of the leaky ReLUs where they are negative


class PooledBlock(nn.Module):
    """Residual block of three 3x3 convolutions with batch norm and a 1x1 shortcut, followed by 2x2 max pooling.

    With `activation`, a leaky ReLU follows the sum.
    """

    def __init__(self, in_channels: int, out_channels: int, *, activation: bool = True) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs in (in_channels, out_channels, out_channels):
            convolution = nn.Conv2d(inputs, out_channels, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(out_channels), nn.LeakyReLU(SLOPE)]
        layers.pop()  # the last activation follows the sum
        self.residual = nn.Sequential(*layers)
        self.shortcut = nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels))
        self.activation = nn.LeakyReLU(SLOPE) if activation else nn.Identity()
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Compute (B, in_channels, H, W) -> (B, out_channels, H // 2, W // 2)."""
        return self.pool(self.activation(self.residual(x) + self.shortcut(x)))


_average = functools.partial(SelectAdaptivePool2d, pool_type="avg", flatten=True)
"""Averages the last feature map; without the final activation, the embedding can be negative."""


@register_backbone
def resnet12(
    *, img_size: ImageSize = 84, in_chans: int = 3, widths: Sequence[int] = (64, 160, 320, 640), **net: Any
) -> EmbeddingNet:
    """ResNet-12 of few-shot learning: four pooled residual blocks of `widths` channels and global average pooling.

    `drop_rate` is dropout of the embedding, instead of the DropBlock of some implementations. The network is that of
    Oreshkin et al., "TADAM", NeurIPS 2018, with the widths of Lee et al., CVPR 2019.
    """
    feature_side("resnet12", img_size, least=2 ** len(widths), halvings=len(widths))
    pairs, last = itertools.pairwise([in_chans, *widths]), len(widths) - 1
    blocks = nn.Sequential(*(PooledBlock(*pair, activation=index < last) for index, pair in enumerate(pairs)))
    he = functools.partial(nn.init.kaiming_normal_, a=SLOPE, mode="fan_out", nonlinearity="leaky_relu")
    base.initialize(blocks, he, nn.Conv2d)
    # After the last pooling, which is equivalent because leaky ReLU is increasing.
    return EmbeddingNet(blocks, widths[-1], activation=functools.partial(nn.LeakyReLU, SLOPE), pool=_average, **net)


@register_backbone
def wrn28(*, img_size: ImageSize = 80, in_chans: int = 3, final_norm: bool = False, **net: Any) -> EmbeddingNet:
    """Wide ResNet of few-shot learning: 28 layers, three stages of four blocks with 160, 320 and 640 channels.

    Each stage halves the feature map, and global average pooling follows (Qiao et al., CVPR 2018). With `final_norm`,
    the last feature map has its ReLU and then a batch norm, and there is no final activation to remove, as before the
    spherization of Kim and Kim (2022).
    """
    feature_side("wrn28", img_size, least=8, halvings=3)
    channels = 80
    blocks = [nn.Conv2d(in_chans, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    for width in (160, 320, 640):
        shortcut = downsample_conv(channels, width, kernel_size=1, stride=2)
        blocks.append(BasicBlock(channels, width, stride=2, downsample=shortcut))
        blocks += [BasicBlock(width, width) for _ in range(3)]
        channels = width
    if final_norm:
        blocks.append(nn.BatchNorm2d(channels))
    else:
        blocks[-1].act2 = nn.Identity()  # the final activation
    layers = base.initialize_fan_out(nn.Sequential(*blocks))
    return EmbeddingNet(layers, channels, pool=_average, **{"final_activation": not final_norm, **net})
