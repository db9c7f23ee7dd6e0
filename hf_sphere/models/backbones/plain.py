"""Networks without shortcuts: fully connected, LeNets, CNN9, Conv4, AlexNet, VGG, and one for visualizations."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from timm.layers import to_2tuple
from torch import nn
from torchvision.models import AlexNet

from hf_sphere.geometry import OPERATORS
from hf_sphere.models.backbones import base
from hf_sphere.models.backbones.base import EmbeddingNet, ImageSize, feature_side, register_backbone
from hf_sphere.nn import AngularLinear, SphericalLinear
from hf_sphere.utils.checks import check_choice


def _perceptron(img_size: ImageSize, in_chans: int, widths: Sequence[int], *, bias: bool = True) -> nn.Sequential:
    """Linear maps from the pixels to `widths` with ReLUs in between; `EmbeddingNet` adds the final activation."""
    height, breadth = to_2tuple(img_size)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise([in_chans * height * breadth, *widths]):
        layers += [nn.Linear(inputs, outputs, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@register_backbone
def linear_embedding(
    *,
    img_size: ImageSize = 28,
    in_chans: int = 3,
    width: int = 1,
    bias: bool = False,
    sigmoid: bool = False,
    **net: Any,
) -> EmbeddingNet:
    """One linear map from the pixels to `width` units, as in the toy task of two clusters.

    The final activation is ReLU, or the logistic function if `sigmoid`.
    """
    layers = _perceptron(img_size, in_chans, [width], bias=bias)
    return EmbeddingNet(layers, width, activation=nn.Sigmoid if sigmoid else nn.ReLU, **net)


@register_backbone
def simple_fnn(*, img_size: ImageSize = 28, in_chans: int = 3, **net: Any) -> EmbeddingNet:
    """Fully connected network, pixels-500-300."""
    return EmbeddingNet(_perceptron(img_size, in_chans, (500, 300)), 300, **net)


@register_backbone
def mlp(*, img_size: ImageSize = 28, in_chans: int = 3, widths: Sequence[int] = (4096,), **net: Any) -> EmbeddingNet:
    """Fully connected network, pixels-`widths` with ReLUs in between: (4096,), or with a bottleneck (4096, 1024)."""
    return EmbeddingNet(base.initialize_for_relu(_perceptron(img_size, in_chans, widths)), widths[-1], **net)


@register_backbone
def lenet5(*, img_size: ImageSize = 28, in_chans: int = 3, **net: Any) -> EmbeddingNet:
    """LeNet-5: two 5x5 convolutions of 6 and 16 channels with max pooling, then 120 and 84 units.

    The first convolution is padded by 2, so that the feature maps of 28-pixel images are those of LeNet-5's 32 pixels.
    """
    height, breadth = feature_side("lenet5", img_size, least=12, halvings=1)
    layers = [nn.Conv2d(in_chans, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    layers += [nn.Linear(16 * ((height - 4) // 2) * ((breadth - 4) // 2), 120), nn.ReLU(), nn.Linear(120, 84)]
    return EmbeddingNet(nn.Sequential(*layers), 84, **net)


LENET9_STAGES = ((6, 6), (16, 16), (64, 64))


@register_backbone
def lenet9(*, img_size: ImageSize = 28, in_chans: int = 3, **net: Any) -> EmbeddingNet:
    """Nine layers: three stages of two 3x3 convolutions (6, 16, 64 channels) with max pooling, 120 and 84 units.

    Intended for statistics of hyperplanes, for which LeNet-5 has too few convolutions. Each convolution is followed by
    ReLU, without batch norm (Gamba, Carlsson, Azizpour and Björkman, arXiv:2003.07797).
    """
    height, breadth = feature_side("lenet9", img_size, least=8, halvings=3)
    units = [nn.Flatten(), nn.Linear(64 * height * breadth, 120), nn.ReLU(), nn.Linear(120, 84)]
    layers = nn.Sequential(*base.conv_stages(base.conv_relu, in_chans, LENET9_STAGES), *units)
    return EmbeddingNet(base.initialize_for_relu(layers), 84, **net)


@register_backbone
def lenet9_dropout(*, img_size: ImageSize = 28, in_chans: int = 3, **net: Any) -> EmbeddingNet:
    """`lenet9` as in the authors' program: average pooling to 3x3, and dropout of 0.5 before the 120 and the 84 units.

    Weights are Xavier-uniform with a gain of the square root of two, and biases zero. Filters with uniform weights are
    not isotropic, which the tests of `hf_sphere.hyperplanes` take for the initialization.
    """
    feature_side("lenet9_dropout", img_size, least=8, halvings=3)
    pooled = [*base.conv_stages(base.conv_relu, in_chans, LENET9_STAGES), nn.AdaptiveAvgPool2d(3), nn.Flatten()]
    units = [nn.Dropout(0.5), nn.Linear(576, 120), nn.ReLU(), nn.Dropout(0.5), nn.Linear(120, 84)]
    lenet = EmbeddingNet(nn.Sequential(*pooled, *units), 84, **net)
    return base.initialize(lenet, functools.partial(nn.init.xavier_uniform_, gain=2**0.5))


@register_backbone
def lenet5_bn(*, img_size: ImageSize = 28, in_chans: int = 3, **net: Any) -> EmbeddingNet:
    """Two padded 5x5 convolutions of 6 and 16 channels with batch norm and pooling, then 120 units with batch norm."""
    height, breadth = feature_side("lenet5_bn", img_size, least=4, halvings=2)
    layers: list[nn.Module] = []
    for width in (6, 16):
        layers += [nn.Conv2d(in_chans, width, 5, padding=2), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        in_chans = width
    layers += [nn.Flatten(), nn.Linear(16 * height * breadth, 120), nn.BatchNorm1d(120)]
    return EmbeddingNet(nn.Sequential(*layers), 120, **net)


@register_backbone
def cnn9(
    *,
    img_size: ImageSize = 32,
    in_chans: int = 3,
    hidden_layer: str = "plain",
    hidden_kwargs: Mapping[str, Any] | None = None,
    **net: Any,
) -> EmbeddingNet:
    """Nine layers: three stages of three 3x3 convolutions (128, 192, 256 channels) with pooling, then 256 units.

    `hidden_layer` is the layer of 256 units: `plain`, a linear map with bias; `spherized`, `SphericalLinear` with the
    options `hidden_kwargs`; or the name of an angular operator, `AngularLinear`. The feature map before it keeps its
    ReLU, even before a spherization, as in the code of the paper that compares them.
    """
    height, breadth = feature_side("cnn9", img_size, least=8, halvings=3)
    sizes, options = (256 * height * breadth, 256), dict(hidden_kwargs or {})
    check_choice("hidden_layer", hidden_layer, ("plain", "spherized", *OPERATORS))
    if options and hidden_layer != "spherized":
        raise ValueError(f"hidden_kwargs are options of hidden_layer spherized; {hidden_layer} has none. Omit them.")
    layers = base.conv_stages(base.conv_norm_relu, in_chans, [[width] * 3 for width in (128, 192, 256)])
    if hidden_layer == "spherized":
        last: nn.Module = SphericalLinear(*sizes, **options)
    else:
        last = nn.Linear(*sizes) if hidden_layer == "plain" else AngularLinear(*sizes, hidden_layer)
    layers += [nn.Flatten(), last]
    return EmbeddingNet(nn.Sequential(*layers), 256, **net)


@register_backbone
def conv4(*, img_size: ImageSize = 84, in_chans: int = 3, **net: Any) -> EmbeddingNet:
    """Few-shot encoder of four pooled 3x3 convolutions of 64 channels and a last one over the entire feature map.

    In the paper, only the spherized network has the last convolution; `conv4_maxpool` is the plain one.
    """
    # For the 84-pixel images of mini-ImageNet this is the paper's 5x5 convolution of stride 5.
    last = nn.Conv2d(64, 64, feature_side("conv4", img_size, least=16, halvings=4))
    layers = [*base.conv_stages(base.conv_norm_relu, in_chans, [[64]] * 4), last, nn.BatchNorm2d(64), nn.Flatten()]
    return EmbeddingNet(nn.Sequential(*layers), 64, **net)


@register_backbone
def conv4_maxpool(*, img_size: ImageSize = 84, in_chans: int = 3, **net: Any) -> EmbeddingNet:
    """Few-shot encoder of four pooled 3x3 convolutions of 64 channels and max pooling of the entire feature map."""
    layers = base.conv_stages(base.conv_norm_relu, in_chans, [[64]] * 4)
    del layers[-2]  # the final activation follows, since ReLU and max pooling commute
    layers += [nn.MaxPool2d(feature_side("conv4_maxpool", img_size, least=16, halvings=4)), nn.Flatten()]
    return EmbeddingNet(nn.Sequential(*layers), 64, **net)


@register_backbone
def visualization_cnn(
    *, img_size: ImageSize = 28, in_chans: int = 3, units: int | None = None, **net: Any
) -> EmbeddingNet:
    """Three stages of two 3x3 convolutions (32, 64, 128 channels), then 256 units and, if set, a layer of `units`.

    Intended for visualizations, with 2 or 3 `units`, which have the final activation of the network; `embedding_dim` in
    the model's configuration adds a layer without activation instead.
    """
    height, breadth = feature_side("visualization_cnn", img_size, least=4, halvings=2)
    layers = base.conv_stages(base.conv_norm_relu, in_chans, [[width] * 2 for width in (32, 64, 128)])
    layers.pop()  # no last pooling
    layers += [nn.Flatten(), nn.Linear(128 * height * breadth, 256)]
    if units:
        layers += [nn.ReLU(), nn.Linear(256, units)]
    return EmbeddingNet(nn.Sequential(*layers), units or 256, **net)


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


def _register_vgg(depth: int) -> None:
    def build(*, img_size: ImageSize = 32, **options: Any) -> EmbeddingNet:
        return _vgg(depth, img_size=img_size, **options)

    build.__name__ = f"vgg{depth}_cifar"
    # With batch norm, convolutions are initialized as in torchvision's VGG, and linear layers by torch's default.
    build.__doc__ = f"VGG-{depth}: four stage `widths`, `hidden` units (0 for none), `batch_norm` and `conv_bias`."
    register_backbone(build)


for _depth in CONVOLUTIONS_PER_STAGE:
    _register_vgg(_depth)


@register_backbone
def vgg11_gray(*, img_size: ImageSize = 32, in_chans: int = 1, **options: Any) -> EmbeddingNet:
    """VGG-11 for one-channel images, with average instead of maximum pooling."""
    return _vgg(11, img_size=img_size, in_chans=in_chans, pool=nn.AvgPool2d, **options)
