"""From encoded images to uint8 tensors: in parallel, with a progress bar, cached on disk, corrupt images by index."""

import io
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Image
from huggingface_hub.constants import HF_HOME
from PIL import Image as PILImage
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms.v2 import functional as tvF
from tqdm.auto import tqdm

logger = logging.getLogger(__name__)


class CorruptImageError(ValueError):
    """An image that cannot be decoded, with its index in the split."""


@dataclass(frozen=True)
class ImageShape:
    """Shape of the images a model sees: channels (1 or 3), height and width in pixels."""

    channels: int
    height: int
    width: int


def probe_shape(dataset: Dataset, column: str) -> ImageShape:
    """Read the shape off the first image that decodes."""
    for record in dataset.cast_column(column, Image(decode=False)).select_columns([column]):
        try:
            with _open(record[column]) as image:
                gray = image.mode in ("1", "L", "LA", "I", "I;16", "F")
                return ImageShape(1 if gray else 3, image.height, image.width)
        except (OSError, ValueError):
            continue
    raise CorruptImageError(f"no image of column {column!r} can be decoded.")


class EncodedImages(torch.utils.data.Dataset):
    """Encoded images that come out as uint8 tensors (channels, height, width), or as None where corrupt.

    Args:
        dataset: Rows with an image column.
        column: The image column.
        shape: Shape to convert and resize to.
        skip_corrupt: Whether a corrupt image gives None instead of an error.
    """

    def __init__(self, dataset: Dataset, column: str, shape: ImageShape, *, skip_corrupt: bool) -> None:
        if not isinstance(dataset.features[column], Image):
            raise ValueError(f"column {column!r} does not hold images but {dataset.features[column]}.")
        self.rows = dataset.select_columns([column]).cast_column(column, Image(decode=False))
        self.column = column
        self.shape = shape
        self.skip_corrupt = skip_corrupt

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor | None:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Tensor | None]:
        records = self.rows[indices][self.column]
        return [self._decode(index, record) for index, record in zip(indices, records, strict=True)]

    def _decode(self, index: int, record: dict[str, Any]) -> Tensor | None:
        try:
            with _open(record) as image:
                pixels = np.array(image.convert("L" if self.shape.channels == 1 else "RGB"))
        except (OSError, ValueError, SyntaxError) as error:  # PIL raises SyntaxError for a broken PNG
            if self.skip_corrupt:
                return None
            raise CorruptImageError(
                f"image {index} of the split cannot be decoded ({error}). Repair or remove it, or pass "
                "--skip_corrupt_images to leave such images out."
            ) from None
        tensor = torch.from_numpy(pixels).reshape(*pixels.shape[:2], -1).permute(2, 0, 1)
        size = [self.shape.height, self.shape.width]
        # The same resizing as in the image processor, so that training and use see the same pixels.
        return tensor if list(tensor.shape[1:]) == size else tvF.resize(tensor, size, antialias=True)


def decode_all(
    dataset: Dataset,
    column: str,
    shape: ImageShape,
    *,
    skip_corrupt: bool = False,
    cache_dir: str | os.PathLike | None = None,
    num_workers: int | None = None,
    progress: bool = True,
) -> tuple[Tensor, Tensor]:
    """Decode every image of a split once.

    Args:
        dataset: Rows with an image column.
        column: The image column.
        shape: Shape to convert and resize to.
        skip_corrupt: Leave corrupt images out (and log how many) instead of raising.
        cache_dir: Folder for decoded data, keyed by the data set's fingerprint; None for the default one below the
            Hugging Face home.
        num_workers: Decoding processes; None for one a core, or none for small data.
        progress: Whether to show a progress bar.

    Returns:
        Images, uint8 of shape (N, channels, height, width), and the rows they came from, int64 of shape (N,).

    Raises:
        CorruptImageError: If an image cannot be decoded and `skip_corrupt` is not set.
    """
    cache = _cache_file(dataset, column, shape, cache_dir)
    stored = _read_cache(cache)
    if stored is not None and (skip_corrupt or len(stored["rows"]) == len(dataset)):
        return stored["images"], stored["rows"]
    if num_workers is None:
        num_workers = min(os.cpu_count() or 1, 16) if len(dataset) > 5000 else 0
    encoded = EncodedImages(dataset, column, shape, skip_corrupt=skip_corrupt)
    loader: DataLoader = DataLoader(encoded, batch_size=500, num_workers=num_workers, collate_fn=collate_decoded)
    images = torch.empty((len(dataset), shape.channels, shape.height, shape.width), dtype=torch.uint8)
    rows, first, filled = [], 0, 0
    with tqdm(total=len(dataset), desc="Decoding images", unit="image", disable=not progress, leave=False) as bar:
        for good, batch in loader:
            images[filled : filled + len(batch)] = batch
            rows.append(first + good.nonzero()[:, 0])
            filled += len(batch)
            first += len(good)
            bar.update(len(good))
    if filled < len(dataset):
        logger.warning("Left out %d corrupt image(s) of %d.", len(dataset) - filled, len(dataset))
    if filled == 0:
        raise CorruptImageError("every image of the split is corrupt.")
    result = {"images": images[:filled].clone() if filled < len(images) else images, "rows": torch.cat(rows)}
    _write_cache(cache, result)
    return result["images"], result["rows"]


def _open(record: dict[str, Any]) -> PILImage.Image:
    return PILImage.open(io.BytesIO(record["bytes"]) if record["bytes"] is not None else record["path"])


def collate_decoded(images: list[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Return which images are good, (B,), and those stacked."""
    good = [image for image in images if image is not None]
    batch = torch.stack(good) if good else torch.empty(0, dtype=torch.uint8)
    return torch.tensor([image is not None for image in images]), batch


def _cache_file(dataset: Dataset, column: str, shape: ImageShape, cache_dir: str | os.PathLike | None) -> Path:
    folder = Path(cache_dir) if cache_dir is not None else Path(HF_HOME) / "hf_sphere" / "decoded"
    # The fingerprint is private in name only: it is what `datasets` documents as the key of its own caches.
    return folder / f"{dataset._fingerprint}-{column}-{shape.channels}x{shape.height}x{shape.width}.safetensors"


def _read_cache(path: Path) -> dict[str, Tensor] | None:
    if not path.is_file():
        return None
    try:
        return load_file(path)
    except (OSError, SafetensorError):
        logger.warning("The cache file %s is damaged; decoding again.", path)
        return None


def _write_cache(path: Path, tensors: dict[str, Tensor]) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, unfinished)
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        logger.warning("Could not write the cache of decoded images (%s); training goes on without it.", error)
