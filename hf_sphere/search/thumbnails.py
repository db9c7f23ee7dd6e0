"""Embedding of images without a model, in which copies of an image are near-identical."""

import logging
from collections.abc import Iterator, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL.Image import Resampling
from torch import Tensor

from hf_sphere.search.encoder import Encoder
from hf_sphere.utils.progress import progress_bar

logger = logging.getLogger(__name__)


class ThumbnailEncoder(Encoder):
    """Differences of neighboring pixels of gray thumbnails, which resizing and compression hardly change."""

    name, weights, content, embeds_texts, metric = "", "", "image", False, {"distance": "cosine"}
    class_names, preprocessing = [], {"size": (12, 12)}

    def encode(
        self, source: Any, rows: Sequence[int], *, skip_unreadable: bool = False, progress: bool = True, **_: Any
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield the indices of the readable images and their embeddings; see `ImageEncoder.encode`."""

        def read(row: int) -> Tensor | None:
            try:
                image = source.open(row, 1).resize((12, 12), Resampling.BILINEAR)
            except ValueError as error:
                if not skip_unreadable:
                    raise ValueError(f"{error} Repair or remove it, or pass --skip_unreadable_images.") from error
                logger.warning("Skipped: %s", error)
                return None
            return torch.from_numpy(np.array(image, np.float32))

        with ThreadPool(min(16, len(rows) // 100 + 1)) as pool:
            bar = progress_bar(pool.imap(read, rows), "Reading", len(rows), disable=not progress, leave=False)
            found = {row: pixels for row, pixels in zip(rows, bar, strict=True) if pixels is not None}
        if found:
            pixels = torch.stack([*found.values()])
            differences = torch.cat([pixels.diff(dim=dim).flatten(1) for dim in (1, 2)], 1)
            # The 1 gives images of one color a direction; others hardly change.
            yield torch.tensor([*found]), {"embedding": F.normalize(F.pad(differences, (0, 1), value=1.0))}
