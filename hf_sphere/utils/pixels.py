"""Conversion of images to 8-bit gray or color and to the size of a model, the same in training and inference."""

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode, functional as tvF

from hf_sphere.utils.loading import check_format

WHITE = (255, 255, 255)
"""Default color behind transparent parts: under those of drawings, most files have black."""


def convert_image(image: Image.Image, channels: int, background: Sequence[int] = WHITE) -> Image.Image:
    """Convert an image of any mode to 8-bit gray (1 channel) or color (3 channels), upright as its EXIF data says.

    16-bit gray values are divided by 256, whereas PIL would clip them at 255; the range of 32-bit values is unknown,
    which is an error. `background` is the color, 0 to 255, behind the transparent parts of the image.
    """
    image = turn_upright(image)
    if image.mode in ("I", "F"):
        raise ValueError(f"images of mode {image.mode!r} have no known range; save them with 8 or 16 bits per pixel")
    if image.mode.startswith("I;16"):
        values, transparent = np.asarray(image, dtype=np.uint16), image.info.get("transparency")
        image = Image.fromarray((values >> 8).astype(np.uint8))
        if transparent is not None:
            image.putalpha(Image.fromarray(values != transparent).convert("L"))
    if image.has_transparency_data:
        behind = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(behind, image.convert("RGBA")).convert("RGB")
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)  # which would copy it


def convert_array(image: Tensor) -> Tensor:
    """Convert an array of pixels to the range 0 to 255 as far as its dtype defines the range; see `convert_image`.

    16-bit values are divided by 256; booleans are black and white; values of floating point are returned in float32 or
    better, with a warning if they may be scaled. Other integers that are not from 0 to 255 are an error.
    """
    if image.dtype in (torch.uint8, torch.bool):
        return image if image.dtype == torch.uint8 else image.byte() * 255
    low, high = (value.item() for value in image.double().aminmax())
    if image.is_floating_point():
        if not (low >= 0 and (high == 0 or 1 < high < 256)):
            what = f"the image has values from {low:g} to {high:g}, which are divided by 255, as values from 0 to 255"
            warnings.warn(f"{what}. If they are scaled already, pass do_rescale=False.", stacklevel=2)
        return image.to(torch.promote_types(image.dtype, torch.float32))
    if image.dtype == torch.uint16:
        if 0 < high < 256:
            warnings.warn("the uint16 image has 8-bit values, so it is black; convert it to uint8.", stacklevel=2)
        return (image.int() >> 8).byte()
    if low < 0 or high > 255:
        got = f"{image.dtype} from {low:g} to {high:g}"
        advice = "Convert the image to uint8 or uint16, or pass the `rescale_factor` that maps its values to 0 to 1"
        raise ValueError(f"integers other than uint16 must be from 0 to 255; got {got}. {advice}.")
    return image.byte()


def turn_upright(image: Image.Image) -> Image.Image:
    """Turn an image as its EXIF data says, as `datasets` and the pipelines of transformers do.

    Other metadata is not kept: PIL fails to write much of what cameras and programs write.
    """
    check_format(image)
    image.load()
    orientation = read_orientation(image)
    if orientation == 1:
        return image
    plain = image.copy()
    for name in ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"):
        plain.info.pop(name, None)
    plain.getexif()[ExifTags.Base.Orientation] = orientation
    return ImageOps.exif_transpose(plain)


def read_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an image, 1 (upright) to 8; 1 if it has none that can be read."""
    with contextlib.suppress(Exception):  # of PIL, of many classes
        orientation: Any = image.getexif().get(ExifTags.Base.Orientation)
        return orientation if orientation in range(1, 9) else 1
    return 1


def resize_image(
    image: Tensor,
    size: Sequence[int],
    crop_pct: float | None = None,
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
) -> Tensor:
    """Resize images (..., C, H, W) to a height and width, regardless of their aspect ratio or with a center crop.

    With `crop_pct`, as in timm, the aspect ratio is kept, with sides that are at least `size` divided by this, rounded
    down, and the center is cropped.
    """
    if crop_pct is None:
        whole = list(size)
    else:
        least = [int(side / crop_pct + 1e-6) for side in size]
        scale = max(side / length for side, length in zip(least, image.shape[-2:], strict=True))
        whole = [max(side, int(length * scale)) for side, length in zip(least, image.shape[-2:], strict=True)]
    if list(image.shape[-2:]) != whole:
        image = tvF.resize(image, whole, interpolation=interpolation, antialias=True)
    return image if crop_pct is None else tvF.center_crop(image, list(size))
