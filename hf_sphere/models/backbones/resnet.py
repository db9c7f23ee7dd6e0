"""timm's ResNets with a stem for small images: one 3x3 convolution."""

from typing import Any

from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn

from hf_sphere.models.backbones.base import register_backbone


class SmallStemResNet(ResNet):
    """timm's ResNet with a 3x3 convolution as its stem, without pooling by default.

    Args:
        block: timm's residual block.
        layers: Number of blocks per stage.
        in_chans: Channels of the images.
        max_pool: Whether the stem keeps its max-pooling, so that all feature maps have half the side.
        **options: See timm's `ResNet`.
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
        name = "act3" if isinstance(last, Bottleneck) else "act2"
        setattr(last, name, nn.Identity())


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
def resnet34_cifar(**options: Any) -> ResNet:
    """ResNet-34 with a 3x3 stem."""
    return SmallStemResNet(BasicBlock, (3, 4, 6, 3), **options)


@register_backbone
def resnet50_cifar(**options: Any) -> ResNet:
    """ResNet-50 with a 3x3 stem."""
    return SmallStemResNet(Bottleneck, (3, 4, 6, 3), **options)
