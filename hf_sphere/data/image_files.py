"""Encoded images, in files or in memory: opening, encoding, and a check of the files before they are decoded."""

import io
import itertools
import logging
import os
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset, Image, Value
from datasets.utils.file_utils import xopen
from PIL import Image as PILImage, ImageFile

from hf_sphere.utils.checks import check_regular
from hf_sphere.utils.image_formats import open_format
from hf_sphere.utils.progress import progress_bar
from hf_sphere.utils.texts import damage

logger = logging.getLogger(__name__)

_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82", "GIF": b";", "WEBP": b""}
"""Last bytes of complete files, by format; PIL reads a WebP file to its end when it opens it."""


def encoded_images(dataset: Dataset, column: str) -> Dataset:
    """Return the image column of a split, not decoded."""
    if not holds_images(dataset.features[column]):
        how = f"convert paths or pixels with dataset.cast_column({column!r}, datasets.Image())"
        raise ValueError(f"column {column!r} does not contain images but {dataset.features[column]}; {how}.")
    return dataset.select_columns([column]).cast_column(column, Image(decode=False))


def holds_images(feature: Any) -> bool:
    """Whether a column has images, or encoded images that were stored as bytes."""
    stored = feature.get("bytes") if isinstance(feature, dict) else feature
    return isinstance(feature, Image) or stored in (Value("binary"), Value("large_binary"))


def encode_image(image: PILImage.Image) -> dict[str, Any]:
    """Encode an image without loss, upright; `datasets` would compress one from a JPEG file again."""
    from hf_sphere.utils.pixels import turn_upright  # imports torchvision, which texts do not need

    try:
        upright = turn_upright(image)
    except Exception as error:  # of PIL and its plugins, of many classes
        name = getattr(image, "filename", "") or "an image"
        raise ValueError(f"{name} cannot be read as an image: {damage(error)}.") from error
    # A palette's transparency would be lost.
    upright = upright.convert("RGBA") if "transparency" in upright.info else upright.copy()
    return Image().encode_example(upright)


def open_image(record: dict[str, Any] | None) -> ImageFile.ImageFile:
    """Open an encoded image of `datasets`, as it is stored; PIL raises errors of many classes."""
    if record is None or (record["bytes"] is None and record["path"] is None):
        raise ValueError("it is missing")
    encoded, path = record["bytes"], record["path"]
    if encoded is None and "://" in path:  # in a zip file, or remote
        with xopen(path, "rb") as file:
            encoded = file.read()
    if encoded is None:
        check_regular(path)
    image = open_format(path if encoded is None else io.BytesIO(encoded))
    if getattr(image, "is_animated", False) and image.format != "MPO":  # MPO: a photo with its preview
        image.close()
        raise ValueError("it is animated; save one of its frames")
    return image


def file_names(dataset: Dataset, column: str, folder: str | os.PathLike = "") -> list[str]:
    """Return the file of each image of a split, relative to `folder` below it, or an empty list if none is named."""
    tables = encoded_images(dataset, column).with_format("arrow").iter(1000)
    names = [name for table in tables for name in pc.struct_field(table[column], "path").to_pylist()]
    root = os.path.join(os.path.abspath(folder), "") if folder else ""
    return [(name or "").removeprefix(root) for name in names] if any(names) else []


def examine_files(
    records: Dataset, column: str, rows: Sequence[int], *, progress: bool = True
) -> tuple[dict[int, str], int]:
    """Check headers and last bytes of files, else decode; return errors by row, and the number with transparency."""

    def examine(rows: Sequence[int]) -> list[bool | str]:
        return [_examine(record) for record in records[rows][column]]

    chunks = [rows[at : at + 100] for at in range(0, len(rows), 100)]
    with ThreadPool(min(16, max(len(chunks), 1))) as pool:
        checked = itertools.chain.from_iterable(pool.imap(examine, chunks))
        bar = progress_bar(checked, "Checking files", len(rows), unit="image", disable=not progress, leave=False)
        results = dict(zip(rows, bar, strict=True))
    errors = {row: result for row, result in results.items() if isinstance(result, str)}
    return errors, sum(result is True for result in results.values())


def log_transparent(count: int, total: int, background: Sequence[int]) -> None:
    """Log the number of images with transparency, if any, and the color that they are drawn on."""
    if count:
        message = "%d of %d images have an alpha channel or a transparent color; they are drawn on background_color %s."
        logger.warning(message, count, total, " ".join(map(str, background)))


def _examine(record: dict[str, Any] | None) -> bool | str:
    """Return whether an image has transparency, or the error of a damaged file."""
    try:
        with open_image(record) as image:
            file: Any = image.fp
            end, position = _ENDS.get(image.format or ""), file.tell()
            file.seek(-len(end or b""), os.SEEK_END)
            is_whole = file.read() == end
            file.seek(position)
            if not is_whole:
                image.load()
            return image.has_transparency_data
    except Exception as error:  # of PIL and its plugins, of many classes
        return damage(error)
