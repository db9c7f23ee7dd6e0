"""Augmentation of training images, one operation per batch, on the device of the images."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_DRAWS = 10
"""Attempts at a random resized crop before the full image is used."""


@dataclass(frozen=True)
class Augmentation:
    """Random augmentation of training images.

    Attributes:
        crop_padding: Zero padding in pixels on each side before a random crop of the original size.
        horizontal_flip: Whether to flip images with probability 1/2.
        rotation: Maximum angle, in degrees, of a random rotation in either direction (nearest pixel, zeros outside).
        random_resized_crop: Minimum fraction of the area that a crop keeps, above 0 and up to 1 (0.08 is common); None
            for no such crop. The fraction is uniform up to 1, the position is uniform, and the aspect ratio log-uniform
            from 3/4 to 4/3 times that of the image; the crop is resized to the size of the image. A crop that would be
            wider or higher than the image is resampled; after ten attempts the full image is used. Positions are
            not rounded to pixels, and resizing is bilinear: crops are only enlarged, so no antialiasing is needed.
            Images are cropped at the size of the model, not at their original size, so a small crop is blurrier than
            one cut out of a large original.
    """

    crop_padding: int = 0
    horizontal_flip: bool = False
    rotation: float = 0.0
    random_resized_crop: float | None = None

    def __post_init__(self) -> None:
        if self.crop_padding < 0:
            raise ValueError(f"crop_padding must not be negative; got {self.crop_padding}.")
        if not 0.0 <= self.rotation <= 180.0:
            raise ValueError(f"rotation must lie between 0 and 180 degrees; got {self.rotation}.")
        if self.random_resized_crop is not None:
            if not 0.0 < self.random_resized_crop <= 1.0:
                raise ValueError(
                    "random_resized_crop is the minimum fraction of the area to keep, above 0 and up to 1 (0.08 is "
                    f"common); got {self.random_resized_crop}."
                )
            if self.crop_padding:
                raise ValueError(
                    f"crop_padding={self.crop_padding} and random_resized_crop={self.random_resized_crop} are two ways "
                    "to crop; use only one of them."
                )

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Augment each image of a uint8 batch (B, C, H, W) independently; `generator` is on the CPU."""
        if self.crop_padding:
            images = _random_crop(images, self.crop_padding, generator)
        if self.random_resized_crop is not None:
            images = _crop_and_resize(images, *_draw_boxes(len(images), self.random_resized_crop, generator))
        if self.horizontal_flip:
            mirrored = torch.rand(len(images), generator=generator) < 0.5
            images = torch.where(mirrored.to(images.device)[:, None, None, None], images.flip(-1), images)
        if self.rotation:
            degrees = (2 * torch.rand(len(images), generator=generator) - 1) * self.rotation
            images = _rotate(images, degrees.deg2rad())
        return images


def _random_crop(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Random crop of the original size from the zero-padded image."""
    count, channels, height, width = images.shape
    padded = F.pad(images, (padding,) * 4)
    top, left = torch.randint(0, 2 * padding + 1, (2, count), generator=generator).to(images.device)
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = left[:, None] + torch.arange(width, device=images.device)
    padded = padded.gather(2, rows[:, None, :, None].expand(-1, channels, -1, padded.shape[-1]))
    return padded.gather(3, columns[:, None, None, :].expand(-1, channels, height, -1))


def _draw_boxes(count: int, smallest_share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample boxes inside the unit square: their sizes and centers, each (N, 2) with x first."""
    draws = torch.rand(2, count, _DRAWS, generator=generator)
    area = smallest_share + (1 - smallest_share) * draws[0]
    ratio = ((2 * draws[1] - 1) * math.log(4 / 3)).exp()
    sizes = torch.stack([(area * ratio).sqrt(), (area / ratio).sqrt()], dim=-1)
    fits = (sizes <= 1).all(-1)
    first = fits.int().argmax(1)
    size = torch.where(fits.any(1, keepdim=True), sizes[torch.arange(count), first], 1.0)
    center = size / 2 + (1 - size) * torch.rand(count, 2, generator=generator)
    return size, center


def _crop_and_resize(images: Tensor, size: Tensor, center: Tensor) -> Tensor:
    """Resize a box of each image to the full image, bilinear; size and center (B, 2), x first, in image sides."""
    matrix = torch.cat([torch.diag_embed(size), (2 * center - 1)[:, :, None]], dim=2)
    grid = F.affine_grid(matrix.to(images.device), list(images.shape), align_corners=False)
    # A box at the edge samples up to half a pixel beyond the last pixel center, hence the border padding.
    cropped = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    return cropped.round_().to(images.dtype)


def _rotate(images: Tensor, radians: Tensor) -> Tensor:
    """Rotate each image about its center, with nearest-pixel sampling and zeros outside."""
    height, width = images.shape[-2:]
    cosine, sine, zero = radians.cos(), radians.sin(), torch.zeros_like(radians)
    # Grid coordinates run from -1 to 1 along both sides, so the aspect ratio of the image must be compensated.
    matrix = torch.stack(
        [cosine, sine * (height / width), zero, -sine * (width / height), cosine, zero], dim=1
    ).reshape(-1, 2, 3)
    grid = F.affine_grid(matrix.to(images.device), list(images.shape), align_corners=False)
    turned = F.grid_sample(images.float(), grid, mode="nearest", padding_mode="zeros", align_corners=False)
    return turned.to(images.dtype)
