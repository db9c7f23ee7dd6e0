"""timm's DenseNet with a stem for small images: one 3x3 convolution, without norm and pooling."""

from typing import Any

from timm.models.densenet import DenseNet
from torch import nn

from hf_sphere.models.backbones.base import register_backbone


class SmallStemDenseNet(DenseNet):
    """timm's DenseNet whose stem is one 3x3 convolution, without norm, activation and pooling.

    Args:
        in_chans: Channels of the images.
        **options: See timm's `DenseNet`.
    """

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
