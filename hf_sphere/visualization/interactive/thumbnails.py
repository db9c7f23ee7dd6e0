"""Thumbnail sheets: many small images in a few large ones."""

import base64
import io
import math
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

LONGEST_SIDE = 128  # pixels: the size at which the page shows thumbnails
MOST_PIXELS = 10_240_000  # pixels of all thumbnails together: 10,000 of 32 x 32
MOST_BYTES = 2_500_000  # bytes of all sheets together: a page with them, plotly.js and the points stays below 6 MB
SHEET_SIDE = 1024  # pixels: the page decodes a sheet when one of its images is first shown, which must be fast
_QUALITIES = (90, 75, 60, 45, 30, 15)
_SHRINK = 0.8
_SAMPLE = 500


def make_sheets(images: Tensor) -> dict[str, Any]:
    """Arrange images row by row on WebP sheets, with the best quality that `MOST_BYTES` allows.

    Many or large images are downscaled, repeatedly if even the lowest quality takes too many bytes.

    Args:
        images: uint8 (N, C, H, W) on the CPU, C of 1 (gray) or 3 (RGB), N at least 1.

    Returns:
        A dictionary with `width` and `height` of a thumbnail in pixels, `columns` (thumbnails per row of a sheet),
        `per_sheet` (thumbnails on a full sheet) and `sheets` (the sheets as base64).
    """
    height, width = images.shape[-2:]
    scale = min(1.0, LONGEST_SIDE / max(height, width), math.sqrt(MOST_PIXELS / (len(images) * height * width)))
    allowed = MOST_BYTES / len(images)
    while True:
        size = (max(1, math.floor(height * scale)), max(1, math.floor(width * scale)))
        # The size of the sheets is estimated from a sample of the images.
        sample = _resized(images[:: math.ceil(len(images) / _SAMPLE)], size)
        fitting = (quality for quality in _QUALITIES if len(_encoded(sample, quality)) < 0.95 * allowed * len(sample))
        quality = next(fitting, None)
        if quality is not None or size == (1, 1):
            break
        scale *= _SHRINK
    columns = min(SHEET_SIDE // size[1], math.ceil(math.sqrt(len(images))))
    per_sheet = columns * min(SHEET_SIDE // size[0], math.ceil(len(images) / columns))
    sheets = [
        base64.b64encode(_encoded(_resized(part, size), quality or _QUALITIES[-1], columns)).decode("ascii")
        for part in images.split(per_sheet)
    ]
    return {"width": size[1], "height": size[0], "columns": columns, "per_sheet": per_sheet, "sheets": sheets}


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    if images.shape[-2:] == size:
        return images
    return F.interpolate(images, size, mode="bilinear", antialias=True)


def _encoded(images: Tensor, quality: int, columns: int = 16) -> bytes:
    """Arrange images (n, C, h, w) in rows of `columns`, padded with black, and encode them as WebP."""
    count, channels, height, width = images.shape
    rows = math.ceil(count / columns)
    tiles = torch.cat([images, images.new_zeros(rows * columns - count, channels, height, width)])
    sheet = tiles.view(rows, columns, channels, height, width).permute(0, 3, 1, 4, 2)
    pixels = sheet.reshape(rows * height, columns * width, channels).expand(-1, -1, 3)
    buffer = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(buffer, "WEBP", quality=quality, method=2)
    return buffer.getvalue()
