"""AlexNet of torchvision for images of 224 pixels, and the usual small variant for images of 32 pixels."""

from typing import Any

from torch import nn
from torchvision.models import AlexNet

from hf_sphere.models.backbones.base import (
    EmbeddingNet,
    ImageSize,
    conv_relu,
    feature_side,
    initialize_for_relu,
    register_backbone,
)


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
    if max(feature_side("alexnet_cifar", img_size, least=29, halvings=0)) > 60:
        raise ValueError(
            f"alexnet_cifar requires images of 29 to 60 pixels per side; got {img_size}. For larger images use alexnet."
        )
    layers = nn.Sequential(
        nn.Conv2d(in_chans, 64, 11, stride=4, padding=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *conv_relu(192, 384),
        *conv_relu(384, 256),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.MaxPool2d(2),  # to 1 x 1; the final activation follows, since ReLU and max pooling commute
        nn.Flatten(),
    )
    alexnet = EmbeddingNet(layers, 256, **net)
    initialize_for_relu(alexnet.layers)
    return alexnet
