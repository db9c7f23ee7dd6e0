"""AlexNet and VGG for images of 32 pixels, and AlexNet of torchvision for images of 224 pixels."""

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torchvision.models import AlexNet

from hf_sphere.models.backbones import base
from hf_sphere.models.backbones.base import EmbeddingNet, ImageSize, feature_side, register_backbone


@register_backbone
def alexnet(*, img_size: ImageSize = 224, in_chans: int = 3, drop_rate: float = 0.5, **net: Any) -> EmbeddingNet:
    """AlexNet of torchvision for images of 224 pixels: five convolutions and two hidden layers of 4096 units."""
    feature_side("alexnet", img_size, least=63, halvings=0)
    original = AlexNet(num_classes=1, dropout=drop_rate)
    if in_chans != 3:
        original.features[0] = nn.Conv2d(in_chans, 64, 11, stride=4, padding=2)
    hidden = list(original.classifier)[:-2]  # without the output layer, and the last ReLU, which `EmbeddingNet` adds
    layers = nn.Sequential(*original.features, original.avgpool, nn.Flatten(), *hidden)
    return EmbeddingNet(layers, 4096, **net)


@register_backbone
def alexnet_cifar(*, img_size: ImageSize = 32, in_chans: int = 3, **net: Any) -> EmbeddingNet:
    """AlexNet's five convolutions for images of 32 pixels (29 to 60), without hidden linear layers."""
    feature_side("alexnet_cifar", img_size, least=29, halvings=0)
    layers = [nn.Conv2d(in_chans, 64, 11, stride=4, padding=5), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [*base.conv_relu(192, 384), *base.conv_relu(384, 256), nn.Conv2d(256, 256, 3, padding=1)]
    layers += [nn.MaxPool2d(2), nn.Flatten()]  # to 1 x 1; the final activation follows: ReLU and max pooling commute
    return EmbeddingNet(base.initialize_for_relu(nn.Sequential(*layers)), 256, **net)


CONVOLUTIONS_PER_STAGE = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def _vgg(
    depth: int,
    *,
    img_size: ImageSize = 32,
    in_chans: int = 3,
    widths: Sequence[int] = (64, 128, 256, 512),
    hidden: int = 4096,
    batch_norm: bool = True,
    conv_bias: bool = True,
    drop_rate: float = 0.5,
    pool: type[nn.Module] = nn.MaxPool2d,
    **net: Any,
) -> EmbeddingNet:
    feature_side(f"vgg{depth}_cifar", img_size, least=32, halvings=5)
    convolution = functools.partial(base.conv_norm_relu if batch_norm else base.conv_relu, bias=conv_bias)
    stages = zip(CONVOLUTIONS_PER_STAGE[depth], [*widths, widths[-1]], strict=True)  # four widths
    layers = base.conv_stages(convolution, in_chans, ([width] * count for count, width in stages), pool)
    # At 32 pixels the feature map is 1 x 1; those of larger images are averaged.
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    if hidden:
        layers += [nn.Linear(widths[-1], hidden), nn.ReLU(), nn.Dropout(drop_rate), nn.Linear(hidden, hidden)]
    # With batch norm, linear layers keep torch's initialization.
    initialized = (base.initialize_fan_out if batch_norm else base.initialize_for_relu)(nn.Sequential(*layers))
    return EmbeddingNet(initialized, hidden or widths[-1], drop_rate=drop_rate, **net)


@register_backbone
def vgg11_cifar(*, img_size: ImageSize = 32, **options: Any) -> EmbeddingNet:
    """VGG-11 with four stage `widths`, a classifier of `hidden` units (0 for none), `batch_norm` and `conv_bias`.

    With batch norm, the convolutions are initialized as in torchvision's VGG, and the linear layers by torch's default.
    """
    return _vgg(11, img_size=img_size, **options)


@register_backbone
def vgg13_cifar(*, img_size: ImageSize = 32, **options: Any) -> EmbeddingNet:
    """VGG-13, with the options of VGG-11."""
    return _vgg(13, img_size=img_size, **options)


@register_backbone
def vgg16_cifar(*, img_size: ImageSize = 32, **options: Any) -> EmbeddingNet:
    """VGG-16, with the options of VGG-11."""
    return _vgg(16, img_size=img_size, **options)


@register_backbone
def vgg19_cifar(*, img_size: ImageSize = 32, **options: Any) -> EmbeddingNet:
    """VGG-19, with the options of VGG-11."""
    return _vgg(19, img_size=img_size, **options)


@register_backbone
def vgg11_gray(*, img_size: ImageSize = 32, in_chans: int = 1, **options: Any) -> EmbeddingNet:
    """VGG-11 for one-channel images, with average instead of maximum pooling."""
    return _vgg(11, img_size=img_size, in_chans=in_chans, pool=nn.AvgPool2d, **options)
