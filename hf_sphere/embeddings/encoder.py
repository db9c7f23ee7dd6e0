"""Images of any source to embeddings and predictions, batch by batch, with a saved model and its image processor."""

import logging
import operator
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModel, AutoProcessor
from transformers.modeling_outputs import ModelOutput

from hf_sphere.embeddings.extract import class_names, load_embedding_model, read_output
from hf_sphere.embeddings.sources import ImageSource
from hf_sphere.models import SphereVisionImageProcessor
from hf_sphere.utils.digest import digest_weights
from hf_sphere.utils.loading import load_model, load_pretrained

logger = logging.getLogger(__name__)


class ImageEncoder:
    """A saved model that embeds images, and texts if it is a model such as CLIP.

    Args:
        name: Folder or Hub id of a model of type sphere_vision, or of a transformers model with `get_image_features`
            and `get_text_features`.
        device: Device of the model; a GPU if there is one.

    Attributes:
        name: The name.
        model: The model, in eval mode.
        processor: Its image processor.
        class_names: Names of the classes, by index; empty for a model without a head.
        embeds_texts: Whether the model embeds texts.
        metric: Distance of the embeddings, as options of `NeighborSearch`.
        weights: Digest of the weights, which identifies the model.

    Raises:
        ValueError: If the model is of another type, or has no image processor.
    """

    def __init__(self, name: str, device: torch.device | str | None = None) -> None:
        self.name = name
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._is_sphere = load_pretrained(AutoConfig, name).model_type == "sphere_vision"
        model: Any = load_embedding_model(name) if self._is_sphere else load_model(AutoModel, name, complete=True)
        if not self._is_sphere and not hasattr(model, "get_text_features"):
            raise ValueError(
                f"{name} is a {type(model).__name__}; use a model of type sphere_vision, or one such as CLIP."
            )
        try:
            loaded = load_pretrained(SphereVisionImageProcessor if self._is_sphere else AutoProcessor, name)
        except OSError as error:
            raise ValueError(
                f"{name} has no image processor, so the preprocessing of its images is unknown. Save the one of its "
                "training there: SphereVisionImageProcessor(...).save_pretrained(...)."
            ) from error
        self.model = model.to(device).eval()
        self.class_names = class_names(model) if self._is_sphere else []
        self.processor = getattr(loaded, "image_processor", loaded)
        self._texts: Any = getattr(loaded, "tokenizer", None)
        self.embeds_texts = self._texts is not None
        self.metric: dict[str, Any] = {"distance": getattr(getattr(model, "head", None), "distance", "cosine")}
        if self.metric["distance"] == "hyperbolic":
            self.metric["curvature"] = float(model.head.curvature)
        self.weights = digest_weights(model)

    def encode(
        self,
        source: ImageSource,
        rows: Sequence[int] | None = None,
        *,
        batch_size: int = 64,
        num_workers: int | None = None,
        skip_unreadable: bool = False,
        progress: bool = True,
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield the indices of the images of each batch, (b,), and the columns of `read_output`.

        Args:
            source: The images.
            rows: Indices of the images; all if None.
            batch_size: Images per batch.
            num_workers: Number of decoding processes; if None, one per core, or 0 for few images.
            skip_unreadable: Leave out images that cannot be read, with a warning, instead of raising an error.
            progress: Whether to show a progress bar.

        Raises:
            ValueError: If an image cannot be read, or an output is not finite; the message names the image.
        """
        rows = range(len(source)) if rows is None else rows
        if num_workers is None:
            num_workers = min(os.cpu_count() or 1, 16) if len(rows) > 500 else 0
        loader: DataLoader = DataLoader(
            _Prepared(source, self.processor),
            batch_sampler=[list(rows[at : at + batch_size]) for at in range(0, len(rows), batch_size)],
            num_workers=num_workers,
            collate_fn=operator.itemgetter(0),
            generator=torch.Generator(),  # the loader draws a seed, which must not change the global random state
        )
        with tqdm(total=len(rows), desc="Embedding", unit="image", disable=not progress, leave=False) as bar:
            for indices, pixels, errors in loader:
                if errors and not skip_unreadable:
                    raise ValueError(f"{errors[0]} Repair or remove it, or skip such images: --skip_unreadable_images.")
                for error in errors:
                    logger.warning("Skipped: %s", error)
                if pixels is not None:
                    names = [source.names[index] for index in indices.tolist()]
                    yield indices, self._embed(names, pixel_values=pixels)
                bar.update(len(indices) + len(errors))

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Return the embeddings of texts, (B, d), float32 on the CPU.

        Raises:
            ValueError: If the model embeds no texts.
        """
        if not self.embeds_texts:
            raise ValueError(f"{self.name} embeds no texts; search with images, or use a model such as CLIP.")
        tokens: Any = self._texts(list(texts), padding=True, truncation=True, return_tensors="pt")
        return self._embed(list(texts), **tokens)["embedding"]

    @torch.inference_mode()
    def _embed(self, names: Sequence[str], **inputs: Tensor) -> dict[str, Tensor]:
        inputs = {name: value.to(self.model.device) for name, value in inputs.items()}
        if self._is_sphere:
            return read_output(self.model(**inputs), names)
        features = self.model.get_image_features if "pixel_values" in inputs else self.model.get_text_features
        return read_output(ModelOutput(embeddings=features(**inputs).pooler_output), names)


class _Prepared(torch.utils.data.Dataset):
    """Batches of a source, prepared for a model: indices of the readable images, their pixels, and the errors."""

    def __init__(self, source: ImageSource, processor: Any) -> None:
        self.source = source
        self.processor = processor

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor | None, list[str]]]:
        images, good, errors = [], [], []
        for index in indices:
            try:
                images.append(self.source.open(index, getattr(self.processor, "num_channels", 3)))
                good.append(index)
            except ValueError as error:
                errors.append(str(error))
        pixels = self.processor(images, return_tensors="pt")["pixel_values"] if images else None
        return [(torch.tensor(good, dtype=torch.long), pixels, errors)]
