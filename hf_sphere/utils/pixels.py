"""Conversion of images of any mode to 8-bit gray or color, the same in training and inference."""

import numpy as np
from PIL import Image


def convert_image(image: Image.Image, channels: int) -> Image.Image:
    """Convert an image to 8-bit gray (1 channel) or color (3 channels).

    Args:
        image: An image of any mode; 16-bit gray values are divided by 256, whereas PIL would clip them at 255.
        channels: 1 or 3.

    Raises:
        ValueError: If the image has 32-bit values, whose range is unknown.
    """
    if image.mode in ("I", "F"):
        raise ValueError(f"images of mode {image.mode!r} have no known range; save them with 8 or 16 bits per pixel")
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image, dtype=np.uint16) >> 8).astype(np.uint8))
    return image.convert("L" if channels == 1 else "RGB")
