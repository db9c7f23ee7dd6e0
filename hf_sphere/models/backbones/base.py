"""Shared parts of the backbones: a network with an embedding and a classifier, blocks, and registration with timm."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import timm
from timm.layers import to_2tuple
from timm.models import register_model
from torch import Tensor, nn

ImageSize = int | tuple[int, int] | list[int]

BACKBONES: dict[str, Callable[..., nn.Module]] = {}
"""Functions that build the backbones of `register_backbone`, by name."""


class EmbeddingNet(nn.Module):
    """A sequence of layers that ends in an embedding, with the interface of timm's models.

    `forward_features` returns the last hidden layer before its activation; `forward` then applies `final_activation`
    and, if `num_classes` is not 0, the classifier `fc`.

    Args:
        layers: All layers up to the last hidden one, images (B, C, H, W) -> (B, num_features).
        num_features: Length of the embedding.
        num_classes: Number of classes; 0 for the embedding only.
        drop_rate: Dropout after the final activation.
        final_activation: Whether the embedding is followed by `activation` and dropout.
        activation: Builds the final activation.
        pool: Builds the layer after it, which is kept without activation and dropout, too.
    """

    final_activation: nn.Module

    def __init__(
        self,
        layers: nn.Sequential,
        num_features: int,
        *,
        num_classes: int = 1000,
        drop_rate: float = 0.0,
        final_activation: bool = True,
        activation: Callable[[], nn.Module] = nn.ReLU,
        pool: Callable[[], nn.Module] = nn.Identity,
    ) -> None:
        super().__init__()
        self.layers = layers
        kinds = {*map(type, layers)}
        # Images must have the size that the network was built for if it flattens without pooling.
        self.has_fixed_size = nn.Flatten in kinds and not kinds & {nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d}
        self.num_features = num_features
        self._pool = pool
        self.remove_final_activation()
        if final_activation:
            self.final_activation = nn.Sequential(activation(), pool(), nn.Dropout(drop_rate))
        self.pretrained_cfg: dict[str, Any] = {}
        self.reset_classifier(num_classes)

    def remove_final_activation(self) -> None:
        """Remove the activation after the last hidden layer, for a head that replaces it."""
        self.final_activation = self._pool()

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the classifier; with 0 classes the output is the embedding."""
        self.num_classes = num_classes
        self.fc = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def get_classifier(self) -> nn.Module:
        """Return the classifier."""
        return self.fc

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Return patterns of the parameters of each layer, as timm's models do."""
        return {"blocks": r"^layers\.(\d+)"}

    def forward_features(self, x: Tensor) -> Tensor:
        """Compute the last hidden layer before its activation: (B, num_features)."""
        return self.layers(x)

    def forward_intermediates(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute the last hidden layer before its activation, and the outputs of all layers."""
        outputs = []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x)
        return x, outputs

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Compute the logits from the last hidden layer, or the embedding if `pre_logits`."""
        x = self.final_activation(x)
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits, or the embedding if there are no classes."""
        return self.fc(self.final_activation(self.layers(x)))


def conv_relu(in_channels: int, out_channels: int, *, bias: bool = True, norm: bool = False) -> list[nn.Module]:
    """3x3 convolution, batch norm if requested, ReLU."""
    norms = [nn.BatchNorm2d(out_channels)] if norm else []
    return [nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=bias), *norms, nn.ReLU()]


conv_norm_relu = functools.partial(conv_relu, norm=True)


def conv_stages(
    convolution: Callable[[int, int], list[nn.Module]],
    in_channels: int,
    stages: Iterable[Sequence[int]],
    pool: type[nn.Module] = nn.MaxPool2d,
) -> list[nn.Module]:
    """Stages of convolutions of the given widths, each followed by 2x2 pooling."""
    layers: list[nn.Module] = []
    for widths in stages:
        for width in widths:
            layers += convolution(in_channels, width)
            in_channels = width
        layers.append(pool(2))
    return layers


def initialize(net: nn.Module, set_weight: Callable[[Tensor], Any], kinds: Any = (nn.Conv2d, nn.Linear)) -> Any:
    """Initialize the weights of convolutions and linear maps by a function of `torch.nn.init`; biases are zero."""
    for module in net.modules():
        if isinstance(module, kinds):
            set_weight(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return net


def initialize_for_relu(net: nn.Module) -> Any:
    """Apply He initialization (He et al., 2015), with which a deep network without batch norm trains.

    Weights are normal with variance 2 / fan-in, biases zero; torch's default has a sixth of that variance.
    """
    return initialize(net, functools.partial(nn.init.kaiming_normal_, nonlinearity="relu"))


def initialize_fan_out(net: nn.Module) -> Any:
    """Apply He initialization with variance 2 / fan-out to convolutions, as torchvision does before batch norm."""
    return initialize(net, functools.partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu"), nn.Conv2d)


def feature_side(name: str, img_size: ImageSize, least: int, halvings: int) -> tuple[int, int]:
    """Return height and width of a feature map after `halvings` poolings; images need `least` pixels per side."""
    height, width = to_2tuple(img_size)
    if min(height, width) < least:
        sizes = f"at least {least} pixels per side; got {height} x {width}"
        raise ValueError(f"backbone {name!r} needs {sizes}. Set image_size, for instance to {max(least, 28)}.")
    return height >> halvings, width >> halvings


def register_backbone(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Register a function that builds a network with timm and in `BACKBONES`, under the function's name.

    The function takes the keywords `in_chans`, `num_classes` and its own options, and `img_size` if its layers depend
    on it; the defaults of `in_chans` and `img_size` should be those of its usual images. These networks have no
    published weights, so `pretrained=True` raises an error.
    """

    @functools.wraps(build)
    def entry(pretrained: bool = False, *, pretrained_cfg: Any = None, **options: Any) -> nn.Module:
        if pretrained or pretrained_cfg:
            hint = "leave out --pretrained_backbone or --frozen, or in Python pretrained=True"
            raise ValueError(f"backbone {build.__name__!r} has no pretrained weights: {hint}.")
        of_weights = ("pretrained_cfg_overlay", "cache_dir")  # timm passes them to every model
        return build(**{name: value for name, value in options.items() if name not in of_weights})

    BACKBONES[build.__name__] = entry
    return register_model(entry)


def create_backbone(
    name: str, *, num_channels: int, image_size: ImageSize, pretrained: bool | str = False, **options: Any
) -> nn.Module:
    """Create a timm model without its classifier, (B, num_channels, height, width) -> (B, num_features).

    The size of the images is used by backbones whose layers depend on it. `pretrained` loads timm's weights, from its
    cache or the Hub, or a file of weights; the options are those of `timm.create_model`.
    """
    architecture = name.split(".")[0]
    if not timm.is_model(architecture):
        close = ", ".join(difflib.get_close_matches(architecture, timm.list_models(), 5)) or "none"
        raise ValueError(f"unknown backbone {name!r}; similar names: {close}; see `timm.list_models()`.")
    pretrained_cfg = timm.get_pretrained_cfg(architecture)
    has_fixed_size = pretrained_cfg is not None and pretrained_cfg.fixed_input_size  # timm's mark of such models
    if has_fixed_size or "img_size" in inspect.signature(timm.model_entrypoint(architecture)).parameters:
        options.setdefault("img_size", image_size)
    try:
        net = timm.create_model(name, pretrained=pretrained is True, num_classes=0, in_chans=num_channels, **options)
    except TypeError as error:
        raise ValueError(f"backbone {name!r} does not accept the options {options}: {error}") from error
    if isinstance(pretrained, str):
        from hf_sphere.models.pretrained_backbones import load_backbone_weights

        load_backbone_weights(net, name, pretrained)
    return net
