"""Small versions of the images of a dataset, for pictures of embeddings."""

import os
from collections.abc import Sequence

import torch
from datasets import concatenate_datasets
from torch import Tensor

from hf_sphere.data.decoding import EncodedImages, ImageShape, decode_all, probe_shapes
from hf_sphere.data.sources import IMAGE_COLUMNS, find_column, find_split, load_splits


def load_thumbnails(
    name: str,
    splits: Sequence[str],
    rows: Tensor,
    *,
    config_name: str | None = None,
    image_column: str | None = None,
    side: int = 32,
    cache_dir: str | os.PathLike | None = None,
    progress: bool = True,
) -> Tensor:
    """Load the images of some rows (N,) of a split, or of several, concatenated: uint8, (N, channels, height, width).

    All have the aspect ratio of the first image, and a longest side of at most `side` pixels. An image that cannot be
    decoded is black; it is an error if none can. For `name` see `hf_sphere.data.sources.load_splits`, and for the image
    column, the configuration and the cache folder `ImageSourceOptions`.
    """
    loaded = load_splits(name, config_name)
    sources = [find_split(loaded, split, "--split") for split in splits]
    column = find_column(sources[0], image_column, IMAGE_COLUMNS, "image")
    images = concatenate_datasets([source.select_columns([column]) for source in sources])
    first, *others = probe_shapes(images, column)
    scale = min(1.0, side / max(first.height, first.width))
    channels = max(source.channels for source in (first, *others))
    shape = ImageShape(channels, max(1, round(scale * first.height)), max(1, round(scale * first.width)))
    encoded = EncodedImages(images.select(rows.tolist()), column, shape)
    decoded, good = decode_all(encoded, skip_corrupt=True, cache_dir=cache_dir, progress=progress)
    thumbnails = torch.zeros((len(rows), *decoded.shape[1:]), dtype=torch.uint8)
    thumbnails[good] = decoded
    return thumbnails
