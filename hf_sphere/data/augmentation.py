"""Augmentation of training images: of a batch, on its device, or of each image by the process that decodes it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.v2 import CutMix, MixUp, RandAugment, RandomResizedCrop, functional as tvF

from hf_sphere.data.options import AugmentationOptions
from hf_sphere.utils.modules import to_device


@dataclass
class Augmentation(AugmentationOptions):
    """Random augmentation of training images, with the options of `AugmentationOptions` in this order.

    RandAugment (Cubuk et al., 2019, arXiv:1909.13719) and color jitter are applied to each image before it is cropped.
    Jitter multiplies brightness, contrast and saturation by up to one plus or minus their strengths, and rotates the
    hue by up to a fraction of the color circle, in a random order per batch. Random resized crops keep a uniform
    fraction of the area, at a uniform position, with a log-uniform aspect ratio, as torchvision draws them; one that
    would be wider or higher than the image is resampled, and after ten attempts the full image is used. Resizing is
    bilinear. With alternating flips, two epochs have each image both ways (Jordan, arXiv:2404.00498). Rotations use the
    nearest pixel, and zeros outside.

    This is for images in memory, at the size of the model. The worker that decodes an image from disk or a stream cuts
    the random resized crop out of the original pixels, flips it, and applies RandAugment, in this order and as
    torchvision does; the rest is for the batch. With `shuffled_pixels`, which come first, all is for the batch.

    Attributes:
        occlusion_color: Value per channel of the occluded square, from 0 to 255.
    """

    occlusion_color: Sequence[float] = (0.0,)

    def check_size(self, height: int, width: int) -> None:
        """Raise an error if images of this size, in pixels, are too small for the padding or the occlusion."""
        side = min(height, width)
        largest_padding = side - 1 if self.crop_padding_mode == "reflect" else side
        for name, limit in (("crop_padding", largest_padding), ("occlusion", side)):
            if (value := getattr(self, name)) > limit:
                raise ValueError(f"{name} {value} exceeds what images of {height} x {width} pixels allow, {limit}.")

    def random_crop(self, height: int, width: int) -> RandomResizedCrop:
        """Return the random resized crop to a size, whose aspect ratio that of the crop is relative to."""
        area, aspect, ratio = (self.random_resized_crop or 1.0, 1.0), width / height, self.crop_aspect_ratio
        return RandomResizedCrop((height, width), area, (aspect / ratio, aspect * ratio))

    def __call__(self, images: Tensor, generator: torch.Generator, mirrored: Tensor | None = None) -> Tensor:
        """Augment each image of a uint8 batch (B, C, H, W) independently; the generator is on the CPU.

        With `alternating_flip`, `mirrored`, bool (B,), are the images to flip.
        """
        if self.rand_augment is not None:
            images = _change_each(images, RandAugment(*self.rand_augment), generator)
        if self.color_jitter is not None:
            images = _jitter_colors(images, self.color_jitter, generator)
        if self.crop_padding:
            mode = "constant" if self.crop_padding_mode == "zeros" else self.crop_padding_mode
            padded = tvF.pad(images, [self.crop_padding], padding_mode=mode)
            windows = padded.unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)  # (B, C, top, left, H, W)
            draws = torch.randint(0, 2 * self.crop_padding + 1, (2, len(images)), generator=generator)
            top, left = to_device(draws, images.device)
            images = windows[torch.arange(len(images), device=images.device), :, top, left]
        if self.random_resized_crop is not None:
            cropped = _change_each(images.float(), self.random_crop(*images.shape[2:]), generator)
            images = cropped.round_().to(images.dtype)
        if self.horizontal_flip:
            mirrored = torch.rand(len(images), generator=generator) < 0.5
        if mirrored is not None:
            images = torch.where(to_device(mirrored, images.device)[:, None, None, None], images.flip(-1), images)
        if self.rotation:
            degrees = (2 * torch.rand(len(images), generator=generator) - 1) * self.rotation
            images = _rotate(images, degrees.deg2rad())
        if self.occlusion:
            images = _occlude(images, self.occlusion, self.occlusion_color, generator)
        return images


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Seed torch's global generator of the CPU, from which torchvision draws, and restore it at the end."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _change_each(images: Tensor, change: nn.Module, generator: torch.Generator) -> Tensor:
    """Change each image by an operation of torchvision, which draws from torch's global generator."""
    with drawing_from(int(torch.randint(2**62, (1,), generator=generator))):
        return torch.stack([change(image) for image in images])


def _rotate(images: Tensor, radians: Tensor) -> Tensor:
    """Rotate each image about its center, with nearest-pixel sampling and zeros outside."""
    height, width = images.shape[-2:]
    cosine, sine, zero = radians.cos(), radians.sin(), torch.zeros_like(radians)
    # Grid coordinates run from -1 to 1 along both sides, so the aspect ratio of the image must be compensated.
    entries = [cosine, sine * (height / width), zero, -sine * (width / height), cosine, zero]
    matrix = torch.stack(entries, dim=1).reshape(-1, 2, 3)
    grid = F.affine_grid(to_device(matrix, images.device), list(images.shape), align_corners=False)
    turned = F.grid_sample(images.float(), grid, mode="nearest", padding_mode="zeros", align_corners=False)
    return turned.to(images.dtype)


def _occlude(images: Tensor, side: int, color: Sequence[float], generator: torch.Generator) -> Tensor:
    """Cover a square of each image."""
    count, _, height, width = images.shape
    top = torch.randint(0, height - side + 1, (count, 1), generator=generator)
    left = torch.randint(0, width - side + 1, (count, 1), generator=generator)
    rows = ((step := torch.arange(height) - top) >= 0) & (step < side)
    columns = ((step := torch.arange(width) - left) >= 0) & (step < side)
    covered = to_device(rows[:, None, :, None] & columns[:, None, None, :], images.device)
    paint = to_device(torch.tensor(color).round().to(images.dtype), images.device).reshape(1, -1, 1, 1)
    return torch.where(covered, paint, images)


def _jitter_colors(images: Tensor, strengths: Sequence[float], generator: torch.Generator) -> Tensor:
    """Change brightness, contrast, saturation and hue of each image by random amounts, in a random order per batch."""
    amounts = (2 * torch.rand(4, len(images), generator=generator) - 1) * torch.tensor(strengths)[:, None]
    amounts = to_device(amounts, images.device)[..., None, None, None]
    changed = images.float() / 255
    for kind in torch.randperm(4, generator=generator).tolist():
        if strengths[kind] and (kind < 2 or images.shape[1] == 3):  # gray images have neither saturation nor hue
            changed = _change_color(changed, amounts[kind], kind)
    return (255 * changed).round_().to(images.dtype)


def _change_color(images: Tensor, amounts: Tensor, kind: int) -> Tensor:
    """Change brightness (0), contrast (1), saturation (2) or hue (3) of images (B, C, H, W) from 0 to 1."""
    if kind < 3:  # which scale the distance to a gray
        luma = tvF.rgb_to_grayscale(images) if images.shape[1] == 3 else images
        gray = (0.0, luma.mean(dim=(1, 2, 3), keepdim=True), luma)[kind]
        return (gray + (images - gray) * (1 + amounts)).clamp(0, 1)
    # The hue is rotated by a fraction of the color circle, with value and chroma of the HSV model kept.
    value, chroma = images.amax(1, keepdim=True), images.amax(1, keepdim=True) - images.amin(1, keepdim=True)
    red, green, blue = (images / chroma.clamp(min=1e-12)).split(1, dim=1)
    sector = torch.where(value == images[:, 1:2], blue - red + 2, red - green + 4)
    sector = torch.where(value == images[:, :1], green - blue, sector)
    # In units of a sixth of the circle, the channels fall off around red (0), green (2) and blue (4).
    distance = (sector + 6 * amounts - torch.arange(0.0, 6.0, 2.0, device=images.device)[:, None, None] + 3) % 6 - 3
    return value - chroma * (distance.abs() - 1).clamp(0, 1)


def mix_images(batch: dict[str, Tensor], options: AugmentationOptions, generator: torch.Generator) -> dict[str, Tensor]:
    """Mix each image of a normalized batch (B, C, H, W) with the one before it, by one of the kinds with an alpha.

    These are mixup (Zhang et al., ICLR 2018) and CutMix (Yun et al., ICCV 2019). `labels` are those with the larger
    share, `mixed_labels` the others, and `mixed_share` the share of these, each (B,).
    """
    images, labels, alphas = batch["pixel_values"], batch["labels"], {MixUp: options.mixup, CutMix: options.cutmix}
    kinds = [kind(alpha=alpha, num_classes=len(images)) for kind, alpha in alphas.items() if alpha]
    chosen, seed = torch.randint(2**62, (2,), generator=generator).tolist()
    with drawing_from(seed):
        # Labeled by their numbers, images get shares of any two of them, however many classes there are.
        mixed, shares = kinds[chosen % len(kinds)](images, torch.arange(len(images)))
    share = to_device(1 - shares.diagonal(), labels.device)  # from the CPU, which does not wait for the device
    others, is_larger = labels.roll(1), share > 0.5
    return {
        "pixel_values": mixed,
        "labels": torch.where(is_larger, others, labels),
        "mixed_labels": torch.where(is_larger, labels, others),
        "mixed_share": torch.minimum(share, 1 - share),
    }
