"""Regression targets computed from pixels, so that any images of strokes can be used for regression.

Light ink on a dark background is assumed, as in MNIST; images of dark ink on paper must be inverted first. Each
function maps images, uint8 (N, C, H, W), to float32 (N,); all channels have the same weight.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_PIXELS_AT_A_TIME = 1 << 20
"""Maximum number of pixels converted to double precision at once: 8 MB."""


def intensity(images: Tensor) -> Tensor:
    """Mean intensity of each image on the scale from 0 (black) to 1.

    Args:
        images: uint8, (N, C, H, W).

    Returns:
        float32, (N,).
    """
    return _joined(images, [ink.mean((1, 2)) / (255 * images.shape[1]) for ink in _ink(images)])


def slant(images: Tensor) -> Tensor:
    """Slant of the stroke from the vertical in degrees, between -90 and 90, positive where it leans right.

    It is computed from central second moments of the ink: tan(slant) = mu_xy / mu_yy, with x to the right and y up.
    Shearing an image by -tan(slant) makes the stroke upright. Images without ink, or with ink in a single row only,
    have slant 0.

    Args:
        images: uint8, (N, C, H, W), light on dark.

    Returns:
        float32, (N,), in degrees.
    """
    height, width = images.shape[-2:]
    across = torch.arange(width, dtype=torch.float64, device=images.device)
    down = torch.arange(height, dtype=torch.float64, device=images.device)
    slants = []
    for ink in _ink(images):
        in_rows = ink.sum(2)
        total = in_rows.sum(1, keepdim=True).clamp_min(1)  # a sum of integers, so only blank images are clamped
        offset = down - in_rows @ down[:, None] / total
        moment_yy = (in_rows * offset.square()).sum(1)
        moment_xy = (ink @ across * offset).sum(1)
        # Rows are counted downward, hence the sign.
        slants.append(torch.where(moment_yy > 0, -moment_xy / moment_yy, 0.0).atan().rad2deg())
    return _joined(images, slants)


COMPUTED_VALUES: dict[str, Callable[[Tensor], Tensor]] = {"intensity": intensity, "slant": slant}
"""Functions by name of the value."""

CHANGED_BY = {
    "intensity": ("crop_padding", "random_resized_crop", "color_jitter", "occlusion"),
    "slant": ("horizontal_flip", "alternating_flip", "rotation", "random_resized_crop", "occlusion"),
}
"""Options of `Augmentation` that change the value of an image."""


def _ink(images: Tensor) -> Iterator[Tensor]:
    """Yield sums over the channels, integers as float64 (n, H, W), for chunks of the images."""
    for part in images.split(max(_PIXELS_AT_A_TIME // max(images[0:1].numel(), 1), 1)):
        yield part.sum(1, dtype=torch.float64)


def _joined(images: Tensor, parts: list[Tensor]) -> Tensor:
    return torch.cat(parts).float() if parts else torch.zeros(0, device=images.device)
