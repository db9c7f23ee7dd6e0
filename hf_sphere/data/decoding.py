"""Decoding of images to uint8 tensors: parallel, cached on disk, with corrupt images reported by index."""

import contextlib
import hashlib
import itertools
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch
from datasets import Dataset
from huggingface_hub.constants import HF_HOME
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms.v2 import InterpolationMode, RandAugment, functional as tvF

from hf_sphere.data.augmentation import Augmentation, drawing_from
from hf_sphere.data.sources import encoded_images, file_names, open_image
from hf_sphere.utils.files import atomic_file, read_tensors
from hf_sphere.utils.pixels import WHITE, convert_image, read_orientation, resize_image, turn_upright
from hf_sphere.utils.progress import progress_bar
from hf_sphere.utils.texts import damage

logger = logging.getLogger(__name__)

_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82", "GIF": b";", "WEBP": b""}
"""Last bytes of complete files, by format; PIL reads a WebP file to its end when it opens it."""


class CorruptImageError(ValueError):
    """An image that cannot be decoded, with its index in the split."""


def corrupt(image: str, error: str, more: str = "") -> CorruptImageError:
    """Return the error of an image."""
    advice = "Repair or remove it, or pass --skip_invalid to leave such images out."
    return CorruptImageError(f"{image} cannot be decoded ({error}){more}. {advice}")


@dataclass(frozen=True)
class ImageShape:
    """Shape of the input images of a model: channels (1 or 3), height and width in pixels.

    For `crop_pct`, which crops the center, and `interpolation` see `hf_sphere.utils.pixels.resize_image`, and for
    `background`, the color behind transparent parts, `convert_image`.
    """

    channels: int
    height: int
    width: int
    crop_pct: float | None = None
    interpolation: str = "bilinear"
    background: tuple[int, ...] = WHITE


def probe_shapes(dataset: Dataset, column: str, count: int = 256) -> list[ImageShape]:
    """Return the different shapes of some images, evenly spaced, that can be opened; their pixels are not decoded."""
    shapes: dict[ImageShape, None] = {}
    for record in encoded_images(dataset.select(range(0, len(dataset), math.ceil(len(dataset) / count))), column):
        with contextlib.suppress(Exception), open_image(record[column]) as image:
            # Of a PNG without it, `getexif` would decode the pixels.
            has_exif = image.format != "PNG" or "exif" in image.info
            is_turned = has_exif and read_orientation(image) > 4
            is_gray = image.mode in ("1", "L", "LA") or image.mode.startswith("I;16")
            shapes[ImageShape(1 if is_gray else 3, *(image.size if is_turned else image.size[::-1]))] = None
    if not shapes:
        raise CorruptImageError(f"no image of column {column!r} can be decoded.")
    return list(shapes)


def decode_image(
    record: dict[str, Any] | None, shape: ImageShape, augmentation: Augmentation | None = None, seed: int = 0
) -> Tensor:
    """Decode an image to uint8 (channels, height, width), and augment it; PIL raises errors of many classes."""
    with open_image(record) as image, contextlib.nullcontext() if augmentation is None else drawing_from(seed):
        if augmentation is None or augmentation.random_resized_crop is None:
            upright = tvF.pil_to_tensor(convert_image(image, shape.channels, shape.background))
            mode = InterpolationMode(shape.interpolation)
            pixels = resize_image(upright, (shape.height, shape.width), shape.crop_pct, mode)
        else:
            pixels = _read_crop(image, shape, augmentation)
        if augmentation is None:
            return pixels
        if augmentation.horizontal_flip and torch.rand(1) < 0.5:
            pixels = pixels.flip(-1)
        return pixels if augmentation.rand_augment is None else RandAugment(*augmentation.rand_augment)(pixels)


def _read_crop(image: Any, shape: ImageShape, augmentation: Augmentation) -> Tensor:
    """Decode a random crop of an image, and resize it."""
    is_turned = read_orientation(image) > 4
    width, height = image.size[::-1] if is_turned else image.size
    draw = augmentation.random_crop(shape.height, shape.width)
    box = draw.make_params([torch.empty(1, height, width, device="meta")])
    # A JPEG file is decoded at half of its size, a quarter or an eighth if the crop keeps twice the size of the model.
    needed = math.ceil(2 * shape.width * width / box["width"]), math.ceil(2 * shape.height * height / box["height"])
    image.draft(None, needed[::-1] if is_turned else needed)
    upright = turn_upright(image)
    x, y = upright.width / width, upright.height / height
    left, right = round(box["left"] * x), round((box["left"] + box["width"]) * x)
    top, bottom = round(box["top"] * y), round((box["top"] + box["height"]) * y)
    crop = tvF.pil_to_tensor(convert_image(upright.crop((left, top, right, bottom)), shape.channels, shape.background))
    return resize_image(crop, (shape.height, shape.width), interpolation=InterpolationMode(shape.interpolation))


@dataclass(eq=False)
class EncodedImages(torch.utils.data.Dataset):
    """Encoded images of a split, decoded on access to uint8 (C, H, W) and transformed, or as an error."""

    dataset: Dataset
    column: str
    shape: ImageShape
    rows: Any = None  # (N,) of the dataset; all if None
    transform: Callable[..., Any] | None = None  # of decoded images (B, C, H, W) and their rows, (B,)

    def __post_init__(self) -> None:
        self.rows = torch.arange(len(self.dataset)) if self.rows is None else self.rows
        self._records = encoded_images(self.dataset, self.column)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, requests: Sequence[Any]) -> list[Tensor | CorruptImageError]:
        """Decode images, each requested by its index, or by its index, an augmentation and its seed."""
        whole = [request if isinstance(request, tuple) else (request, None, 0) for request in requests]
        rows = self.rows[[index for index, *_ in whole]]
        records = self._records[rows.tolist()][self.column]
        return [self._decode(row, cell, *draw) for row, cell, (_, *draw) in zip(rows, records, whole, strict=True)]

    def select(self, indices: Tensor) -> "EncodedImages":
        """Select images by index or by mask."""
        return replace(self, rows=self.rows[indices])

    def _decode(self, row: Tensor, record: dict[str, Any] | None, *draw: Any) -> Tensor | CorruptImageError:
        try:
            image = decode_image(record, self.shape, *draw)
        except Exception as error:  # of PIL and its plugins, of many classes
            return self._error(int(row), damage(error))
        return image if self.transform is None else self.transform(image[None], row[None])[0]

    def _error(self, row: int, error: str, more: str = "") -> CorruptImageError:
        record = self._records[row][self.column]
        name = f" ({record['path']})" if record is not None and record["path"] else ""
        split = f" {self.dataset.split}" if self.dataset.split else ""
        return corrupt(f"image {row}{name} of the split{split}", error, more)


def decode_all(
    images: EncodedImages,
    *,
    skip_corrupt: bool = False,
    cache_dir: str | os.PathLike | None = None,
    num_workers: int | None = None,
    progress: bool = True,
) -> tuple[Tensor, Tensor]:
    """Decode every image once, or read the cache; return the images, uint8 (N, C, H, W), and their indices, (N,)."""
    cache = cache_file(images, cache_dir)
    stored = read_tensors(cache) if cache.is_file() else {}
    if not stored or (len(stored["indices"]) < len(images) and not skip_corrupt):
        shape, good, filled = images.shape, [], 0
        decoded = torch.empty((len(images), shape.channels, shape.height, shape.width), dtype=torch.uint8)
        requests = ([*range(at, min(at + 500, len(images)))] for at in range(0, len(images), 500))
        loader = load_batches(images, requests, 0 if num_workers is None and len(images) <= 5000 else num_workers)
        with progress_bar(None, "Decoding images", len(images), unit="image", disable=not progress, leave=False) as bar:
            for mask, batch, error in loader:
                if error is not None and not skip_corrupt:
                    raise error
                good.append(mask)
                if batch is not None:
                    decoded[filled : filled + len(batch)] = batch
                    filled += len(batch)
                bar.update(len(mask))
        stored = {"images": decoded[:filled], "indices": torch.cat(good).nonzero()[:, 0]}
        with atomic_file(cache) as unfinished:
            save_file(stored, unfinished)
    report_left_out(images, stored["indices"])
    return stored["images"], stored["indices"]


def check_files(images: EncodedImages, *, skip_corrupt: bool = False, progress: bool = True) -> Tensor:
    """Check headers and last bytes of files, else decode; return the indices of good ones, and log the others.

    It is faster than decoding them all, and shows damaged files before a training.
    """
    chunks = [rows.tolist() for rows in images.rows.split(100)]
    with ThreadPool(min(16, len(chunks))) as pool:
        parts = pool.imap(lambda rows: [*map(_examine, images._records[rows][images.column])], chunks)
        examined = itertools.chain.from_iterable(parts)
        bar = progress_bar(examined, "Checking files", len(images), unit="image", disable=not progress, leave=False)
        errors = list(bar)
    wrong = [index for index, error in enumerate(errors) if error]
    if wrong and not skip_corrupt:
        more = f", nor can {len(wrong) - 1} other image(s)" if wrong[1:] else ""
        raise images._error(int(images.rows[wrong[0]]), errors[wrong[0]], more)
    good = torch.tensor([not error for error in errors]).nonzero()[:, 0]
    report_left_out(images, good)
    return good


def _examine(record: dict[str, Any] | None) -> str:
    """Return why a file is damaged; an empty text if it is not."""
    try:
        with open_image(record) as image:
            file: Any = image.fp
            end, position = _ENDS.get(image.format or ""), file.tell()
            file.seek(-len(end or b""), os.SEEK_END)
            is_whole = file.read() == end
            file.seek(position)
            if not is_whole:
                image.load()
        return ""
    except Exception as error:  # of PIL and its plugins, of many classes
        return damage(error)


def stack_images(
    images: list[Tensor | CorruptImageError],
) -> tuple[Tensor, Tensor | None, CorruptImageError | None]:
    """Collate decoded images: a mask of the good ones, (B,), these stacked if there are any, and the first error."""
    good = [image for image in images if isinstance(image, Tensor)]
    error = next((image for image in images if isinstance(image, CorruptImageError)), None)
    mask = torch.tensor([isinstance(image, Tensor) for image in images])
    # With the channels last, as they are decoded and as batches are used.
    return mask, torch.stack([image.permute(1, 2, 0) for image in good]).permute(0, 3, 1, 2) if good else None, error


def load_batches(dataset: Any, requests: Any, num_workers: int | None, *, pin: bool = False) -> DataLoader:
    """Return a loader of the items of a dataset, which gets the requests of a batch at a time."""
    return DataLoader(
        dataset,
        batch_sampler=requests,
        num_workers=min(os.cpu_count() or 1, 16) if num_workers is None else num_workers,
        collate_fn=stack_images,
        pin_memory=pin,
        generator=torch.Generator(),  # the loader draws a seed, which must not change the global random state
    )


def report_left_out(images: EncodedImages, kept: Tensor) -> None:
    """Log the names of the images that are not among the `kept` ones, (N,); it is an error if all are left out."""
    if not len(kept):
        raise CorruptImageError("every image of the split is corrupt.")
    left_out = images.rows[~torch.isin(torch.arange(len(images)), kept)]
    if len(left_out):
        names = file_names(images.dataset, images.column)
        shown = ", ".join(names[row] if names else f"image {row}" for row in left_out[:10].tolist())
        logger.warning("Left out %d corrupt image(s) of %d: %s.", len(left_out), len(images), shown)


def cache_file(images: EncodedImages, cache_dir: str | os.PathLike | None = None) -> Path:
    """Return the file of the cache that has the decoded images; its name identifies all but a `transform`."""
    folder = Path(cache_dir) if cache_dir is not None else Path(HF_HOME) / "hf_sphere" / "decoded"
    rows = images.rows.tolist()
    used = images.dataset.select(rows) if len(rows) < len(images.dataset) else images.dataset
    # Despite its private name, the fingerprint is documented by `datasets` as the key of its caches.
    key = used._fingerprint, images.column, images.shape, state_of_files(images._records.select(rows), images.column)
    return folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.safetensors"


def state_of_files(records: Dataset, column: str) -> str:
    """Return a digest of sizes and times of the files that are named but not contained, or an empty string."""
    cells = records[column] if pc.struct_field(records.data.column(column), "bytes").null_count else ()
    states = []
    for record in cells:
        path = record["path"] if record and record["bytes"] is None else None
        if path and os.path.isfile(path):
            stat = os.stat(path)
            states.append((path, stat.st_size, stat.st_mtime_ns))
    return "-" + hashlib.sha256(repr(states).encode()).hexdigest()[:16] if states else ""
