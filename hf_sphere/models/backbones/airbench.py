"""A small network for CIFAR-10 that trains in minutes."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sphere.models.backbones.base import EmbeddingNet, ImageSize, feature_side, register_backbone

_OUTPUT_SCALE = 1 / 9


class PatchWhitening(nn.Module):
    """A fixed 2x2 convolution that decorrelates the pixels of patches, with a learned bias.

    Its 8 C filters for C channels are the principal axes of 2x2 patches, scaled to unit variance, and their negatives;
    until `initialize_from_data` is called, each filter selects a pixel. `epsilon` is added to the variances.
    """

    # Fixed tensors are buffers, since transformers makes all parameters of a loaded model trainable.
    weight: Tensor
    whitened: Tensor

    def __init__(self, in_channels: int, epsilon: float = 5e-4) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.epsilon = epsilon
        self.register_buffer("weight", torch.empty(8 * in_channels, in_channels, 2, 2))
        self.register_buffer("whitened", torch.tensor(False))
        self.bias = nn.Parameter(torch.empty(8 * in_channels))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Let each filter select a pixel, and set the bias to zero."""
        self._set_filters(torch.eye(4 * self.in_channels, device=self.weight.device))
        nn.init.zeros_(self.bias)

    @torch.no_grad()
    def initialize_from_data(self, images: Tensor) -> None:
        """Set the filters from normalized images, (B, C, H, W); thousands of patches are enough."""
        patches = images.float().unfold(2, 2, 1).unfold(3, 2, 1)  # (B, C, H - 1, W - 1, 2, 2)
        covariance = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2).T.cov()
        variances, axes = torch.linalg.eigh(covariance.double())
        self._set_filters((axes / (variances + self.epsilon).sqrt()).T.flip(0))
        self.whitened.fill_(True)

    def forward(self, images: Tensor) -> Tensor:
        """Return the responses of the filters: (B, C, H, W) -> (B, 8 C, H - 1, W - 1)."""
        return F.conv2d(images, self.weight, self.bias)

    def _set_filters(self, filters: Tensor) -> None:
        self.weight.copy_(torch.cat([filters, -filters]).unflatten(1, (self.in_channels, 2, 2)))


class AirbenchNet(EmbeddingNet):
    """`EmbeddingNet` that begins with `PatchWhitening`."""

    @property
    def needs_data_initialization(self) -> bool:
        """Whether `initialize_from_data` has not been called yet."""
        return not self.layers[0].whitened

    def initialize_from_data(self, images: Tensor) -> None:
        """Whiten the patches of normalized training images, (B, C, H, W)."""
        whitening: Any = self.layers[0]
        whitening.initialize_from_data(images)


class _ScaledGELU(nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        return _OUTPUT_SCALE * super().forward(input)


@register_backbone
def airbench_cifar(
    *, img_size: ImageSize = 32, in_chans: int = 3, widths: Sequence[int] = (64, 256, 256), **net: Any
) -> EmbeddingNet:
    """Whitened 2x2 patches, then a block of two convolutions for each of `widths` (channels), globally max-pooled.

    The convolutions begin as identities on as many channels as they can preserve, and the gains of the batch norms are
    fixed. The final activation divides the embeddings by 9, so that logits are small and learning rates can be large;
    heads that replace the activation get undivided embeddings. The network needs
    `hf_sphere.training.initialize_from_data`, which the recipes call (Jordan, arXiv:2404.00498).
    """
    feature_side("airbench_cifar", img_size, least=2 ** len(widths) + 1, halvings=0)
    layers: list[nn.Module] = [PatchWhitening(in_chans), nn.GELU()]
    channels = 8 * in_chans
    for width in widths:
        layers += [_identity_conv(channels, width), nn.MaxPool2d(2), _norm(width), nn.GELU()]
        layers += [_identity_conv(width, width), _norm(width), nn.GELU()]
        channels = width
    # The last GELU is the final activation of the network; max pooling before or after it differs only below -0.75.
    layers[-1:] = [nn.AdaptiveMaxPool2d(1), nn.Flatten()]
    return AirbenchNet(nn.Sequential(*layers), channels, activation=_ScaledGELU, **net)


def _identity_conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(conv.weight[:in_channels])
    return conv


def _norm(channels: int) -> nn.BatchNorm2d:
    # Fast statistics, since a run has only about a thousand steps.
    norm = nn.BatchNorm2d(channels, momentum=0.4)
    del norm.weight
    norm.register_buffer("weight", torch.ones(channels))
    return norm
