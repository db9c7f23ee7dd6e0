"""The formats of images that are opened, and opening them."""

from typing import Any

from PIL import Image, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "QOI", "TGA")
"""Formats that Pillow reads without another program, in the order in which they are tried; EPS would start Ghostscript.

The content of a file decides its format, whatever its name.
"""


def open_format(file: Any) -> Any:
    """Open an image file, a path or a binary file, if it has one of the `FORMATS`; its pixels are not decoded yet."""
    Image.init()  # AVIF is not in every version of Pillow
    try:
        return Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])
    except UnidentifiedImageError as error:
        raise UnidentifiedImageError(f"{error}: it is none of {', '.join(FORMATS)}") from error


def check_format(image: Image.Image) -> None:
    """Refuse an image that somebody else opened, but did not load yet, in another format than `FORMATS`."""
    if getattr(image, "tile", None) and image.format not in (*FORMATS, "MPO"):  # MPO: opened as JPEG
        hint = f"convert it to one of {', '.join(FORMATS)}, or call its load() if you trust it"
        raise ValueError(f"the format {image.format} may start another program, so it is not decoded; {hint}")
