"""Pictures of any kind as 8-bit gray or colour, the same in training and in use."""

import numpy as np
from PIL import Image


def convert_picture(picture: Image.Image, channels: int) -> Image.Image:
    """Convert a picture to 8-bit gray (1 channel) or colour (3).

    Args:
        picture: Any picture; 16-bit gray is scaled down by 256, which PIL by itself would clip at 255.
        channels: 1 or 3.

    Raises:
        ValueError: If the picture holds 32-bit values, whose range is unknown.
    """
    if picture.mode in ("I", "F"):
        raise ValueError(f"pictures of mode {picture.mode!r} have no known range; save them with 8 or 16 bits a pixel")
    if picture.mode.startswith("I;16"):
        picture = Image.fromarray((np.asarray(picture, dtype=np.uint16) >> 8).astype(np.uint8))
    return picture.convert("L" if channels == 1 else "RGB")
