"""Embeddings and predictions of images and texts by a saved model."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets.fingerprint import Hasher
from PIL.Image import Image, Resampling
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from hf_sphere.data.decoding import state_of_files
from hf_sphere.search import extract
from hf_sphere.search.extract import Batch, embed_batches
from hf_sphere.search.source import ImageSource
from hf_sphere.search.vectors import unit_vectors, usable_rows
from hf_sphere.utils.checks import check_extra, text_list
from hf_sphere.utils.loading import PACKAGES, find_file, load_pretrained, load_sentence_transformer, split_weights
from hf_sphere.utils.modules import digest_weights
from hf_sphere.utils.pixels import WHITE

logger = logging.getLogger(__name__)

SAMPLE_TEXTS = ["a", "a red bird", "How much is it?", "12 %", "The train to the coast leaves at noon, and is late."]
"""Texts of several lengths, whose embeddings show the norms of a model."""


class Encoder:
    """What an `ImageEncoder` and a `TextEncoder` have in common."""

    class_names: list[str]
    preprocessing: dict[str, Any]
    is_symmetric: bool = True
    """Whether queries are embedded as rows of an index are."""
    decisions: str = ""
    """Digest of the calibration and the rejection of the model, if it has any."""

    @property
    def settings(self) -> str:
        """Digests of the preprocessing, the class names and the decisions, which the weights do not identify."""
        options = {name: value for name, value in self.preprocessing.items() if value is not None}
        texts = (json.dumps(values, sort_keys=True, default=str) for values in (options, self.class_names))
        digests = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]
        return "-".join(digests + [self.decisions[:16]] * bool(self.decisions))

    def name_cells(self, source: ImageSource, indices: Tensor, columns: Mapping[str, Tensor]) -> dict[str, list[Any]]:
        """Return the row, file, label, prediction, certainty and decision, as far as known, of a batch."""
        rows = indices.tolist()
        cells = {name: [column[row] for row in rows] for name, column in source.columns.items()}
        if "prediction" in columns:
            cells["prediction"] = [self.class_names[index] for index in columns["prediction"].tolist()]
        names = ("confidence", "concentration", "known", "p_value")
        return cells | {name: columns[name].tolist() for name in names if name in columns}


class ImageEncoder(Encoder):
    """A saved model that embeds images, and texts if it is a model such as CLIP.

    Args:
        name: Folder or Hub id; see `load_embedding_model`.
        device: Device of the model; a GPU if there is one.

    Attributes:
        content: What it embeds.
        name: The name.
        model: The model, in eval mode.
        processor: Its image processor, and
        preprocessing: the options of this.
        class_names: Names of the classes, by index; empty for a model without a head.
        embeds_texts: Whether the model embeds texts.
        metric: Distance of the embeddings, as options of `NeighborSearch`.
        weights: Digest of the weights, which identifies the model.

    Raises:
        ValueError: If the model is of another type.
        OSError: If it has no image processor.

    Example:
        >>> encoder = ImageEncoder("outputs/my-model")  # doctest: +SKIP
        >>> for rows, columns in encoder.encode(["cat.jpg", "dog.jpg"]):  # doctest: +SKIP
        ...     print(columns["embedding"].shape)
    """

    content = "image"

    def __init__(self, name: str, device: torch.device | str | None = None) -> None:
        self.name, model = name, extract.load_embedding_model(name)
        self.processor = extract.load_image_processor(name)
        self.preprocessing, background = self.processor.to_dict(), getattr(self.processor, "background_color", WHITE)
        self.colors = getattr(model.config, "num_channels", 3), background
        self.model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
        self.class_names = extract.class_names(model)
        self.embeds_texts = hasattr(model, "get_text_features")
        self._texts: Any = load_pretrained(AutoTokenizer, name) if self.embeds_texts else None
        self.metric = extract.embedding_metric(model)
        self.weights, self.decisions = digest_weights(model), extract.digest_decisions(model)

    def encode(
        self,
        images: Any,
        rows: Sequence[int] | None = None,
        *,
        batch_size: int = 64,
        num_workers: int | None = None,
        skip_invalid: bool = False,
        progress: bool = True,
        **sharing: Any,
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield the indices of the images of each batch, (b,), and the columns of `hf_sphere.search.extract.embed`.

        Args:
            images: See `ImageSource.of`.
            rows: Indices of the images; all if None.
            batch_size: Images per batch.
            num_workers: Number of decoding processes; if None, one per core, or 0 for few images.
            skip_invalid: Leave out images that cannot be read, with a warning, instead of raising an error.
            progress: Whether to show a progress bar.
            **sharing: The `accelerator` and the `folder` of `hf_sphere.search.extract.embed_batches`.

        Raises:
            ValueError: If an image cannot be read, or an output is not finite; the message names the image.
        """
        source = ImageSource.of(images)
        rows = range(len(source)) if rows is None else rows
        if sharing.get("folder") is not None:
            options = [self.weights, self.settings, skip_invalid, source.name, source.split, [*rows]]
            chosen = source.encoded.select(rows)
            # Despite its private name, the fingerprint is documented by `datasets` as the key of its caches; it is
            # another one whenever a stream is read.
            contents = [source.encoded._fingerprint] if source.name else map(Hasher.hash, chosen)
            sharing["identity"] = [*options, state_of_files(chosen, "image"), *contents]

        def embed(batches: list[Sequence[int]]) -> Iterator[Batch]:
            default_workers = min(os.cpu_count() or 1, 16) if sum(map(len, batches)) > 500 else 0
            loader: DataLoader = DataLoader(
                batches,  # type: ignore[arg-type]  # a list is a dataset, here of indices
                batch_size=None,
                num_workers=default_workers if num_workers is None else num_workers,
                collate_fn=partial(_prepare, source, self.processor, self.colors),
                generator=torch.Generator(),  # the loader draws a seed, which must not change the global random state
            )
            for indices, pixels, errors in loader:
                for error in errors:
                    if not skip_invalid:
                        raise ValueError(f"{error} Repair or remove it, or skip such images: --skip_invalid.")
                    logger.warning("Skipped: %s", error)
                names = [source.names[index] for index in indices.tolist()]
                yield {"row": indices} | ({} if pixels is None else self._embed(names, pixel_values=pixels))

        return embed_batches(embed, rows, batch_size=batch_size, progress=progress, **sharing)

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Return the embeddings of texts, (B, d), float32 on the CPU.

        Raises:
            ValueError: If the model embeds no texts, or these are none, or a single `str`.
        """
        if not self.embeds_texts:
            raise ValueError(f"{self.name} embeds no texts; search with images, or use a model such as CLIP.")
        texts, padding = text_list("texts", texts), dict[str, Any](padding=True)
        if self.model.config.model_type.startswith("siglip"):  # trained with texts of one length, without a mask
            length = self.model.config.text_config.max_position_embeddings
            padding = {"padding": "max_length", "max_length": length, "return_attention_mask": False}
        tokens: Any = self._texts(texts, truncation=True, return_tensors="pt", **padding)
        return self._embed(texts, **tokens)["embedding"]

    def _embed(self, names: Sequence[str], **inputs: Tensor) -> dict[str, Tensor]:
        inputs = {name: value.to(self.model.device) for name, value in inputs.items()}
        return extract.embed(self.model, names, **inputs)


class TextEncoder(Encoder):
    """A SentenceTransformer, which embeds documents, and texts that search in them; see `ImageEncoder`.

    Args:
        model: Folder, Hub id, or a `SentenceTransformer`. Code of a folder or of the Hub is never run.
        device: Device of a model that is loaded; a GPU if there is one.

    Raises:
        ImportError: If sentence-transformers is not installed.
        ValueError: If the model is damaged, is none of sentence-transformers, has modules of other libraries, or
            compares embeddings of different norms by inner products.

    Example:
        >>> TextEncoder("sentence-transformers/all-MiniLM-L6-v2").encode_texts(["a dog"]).shape  # doctest: +SKIP
        torch.Size([1, 384])
    """

    content, embeds_texts = "text", True

    def __init__(self, model: Any, device: torch.device | str | None = None) -> None:
        check_extra("sentence-transformers", "a model of texts", "sentence_transformers")
        self.name = model if isinstance(model, str) else type(model).__name__
        self.model = model = load_sentence_transformer(model, device) if isinstance(model, str) else model.eval()
        similarity = str(model.similarity_fn_name)
        has_cosines = similarity in ("cosine", "euclidean")
        if similarity == "dot":  # cosines if all norms are equal, which modules do not show, due to `truncate_dim`
            norms = [self._embed(encode, SAMPLE_TEXTS, 64) for encode in (model.encode_document, model.encode_query)]
            low, high = torch.cat(norms).norm(dim=1).aminmax()
            types = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
            has_cosines = bool(high - low <= high * max([1e-4, *(2 * torch.finfo(dtype).eps for dtype in types)]))
        if not has_cosines:
            hint = "set its similarity_fn_name to cosine or euclidean if it was trained for that"
            raise ValueError(f"{self.name} compares embeddings by {similarity}, which an index does not; {hint}.")
        self.metric = {"distance": "euclidean" if similarity == "euclidean" else "cosine"}
        self.class_names, self.weights = [], digest_weights(model)
        limits = [model.prompts, model.default_prompt_name, model.truncate_dim, model.max_seq_length]
        modules = repr([(type(module).__name__, module.get_config_dict()) for module in model])
        vocabulary: Any = getattr(model.tokenizer, "get_vocab", dict)()
        self.preprocessing = {"modules": modules, "limits": limits, "vocabulary": vocabulary}
        prompts = [
            next((model.prompts[name] for name in (*names, model.default_prompt_name) if name in model.prompts), "")
            for names in (["query"], ["document", "passage", "corpus"])  # as `encode_query` and `encode_document` do
        ]
        lengths = [[getattr(module, name, None) for module in model] for name in ("query_length", "document_length")]
        is_routed = "task" in model.get_model_kwargs()  # by a Router, or code of the model
        self.is_symmetric = prompts[0] == prompts[1] and lengths[0] == lengths[1] and not is_routed

    def encode(
        self, texts: Any, rows: Sequence[int] | None = None, *, batch_size: int = 64, progress: bool = True, **more: Any
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield the indices of the texts of each batch, (b,), and the column `embedding`; see `ImageEncoder.encode`.

        The texts are a sequence, or an `ImageSource` of them. Options of decoding have no effect.
        """
        texts = texts.encoded if isinstance(texts, ImageSource) else text_list("texts", texts)
        rows = range(len(texts)) if rows is None else rows

        def embed(batches: list[Sequence[int]]) -> Iterator[Batch]:
            for batch in batches:
                embeddings = self._embed(self.model.encode_document, [texts[row] for row in batch], batch_size)
                yield {"row": torch.tensor(batch), "embedding": embeddings}

        sharing: dict[str, Any] = {name: more[name] for name in ("accelerator", "folder") if name in more}
        sharing["identity"] = [self.weights, self.settings, [texts[row] for row in rows]]
        # Of many texts, those of about one length are embedded together.
        return embed_batches(embed, rows, batch_size=16 * batch_size, progress=progress, unit="text", **sharing)

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Return the embeddings of texts that search in others, (B, d), float32 on the CPU.

        Raises:
            ValueError: If there are none, or it is a single `str`.
        """
        return self._embed(self.model.encode_query, text_list("texts", texts), 64)

    def _embed(self, encode: Any, texts: list[str], batch_size: int) -> Tensor:
        embeddings = encode(texts, batch_size=batch_size, show_progress_bar=False, convert_to_tensor=True).float().cpu()
        extract.check_finite({"embedding": embeddings}, texts)
        return embeddings


class VectorEncoder(Encoder):
    """The encoder of given vectors, without a model; see `ImageEncoder`."""

    name, weights, content, embeds_texts, metric = "", "", "vector", False, {"distance": "cosine"}
    class_names, preprocessing = [], {}

    def encode(
        self, source: Any, rows: Sequence[int], *, skip_invalid: bool = False, what: str = "", **_: Any
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield the rows of a source and their vectors, normalized; an error names those without a direction."""
        what, at = what or f"vectors of {source.name or 'the data'}", torch.tensor(rows)
        vectors = source.encoded if len(rows) == len(source.encoded) else source.encoded[at]
        ids = source.ids and [source.ids[row] for row in rows]
        if skip_invalid:
            usable, others = usable_rows(what, vectors, ids)
            at, vectors = (at[usable], vectors[usable]) if others else (at, vectors)
        if len(at):
            hint = ", or leave them out (skip_invalid=True, or --skip_invalid)"
            yield at, {"embedding": unit_vectors(what, vectors, ids, hint)}


class ThumbnailEncoder(ImageEncoder):
    """Differences of neighboring pixels of gray thumbnails, which resizing and compression hardly change."""

    def __init__(self) -> None:
        self.name, self.weights, self.embeds_texts, self.metric = "", "", False, {"distance": "cosine"}
        self.class_names, self.preprocessing = [], {"size": (12, 12)}
        self.processor, self.colors = thumbnails, (1, WHITE)

    def _embed(self, names: Sequence[str], **inputs: Tensor) -> dict[str, Tensor]:
        differences = torch.cat([inputs["pixel_values"].diff(dim=dim).flatten(1) for dim in (1, 2)], 1)
        # The 1 gives images of one color a direction; others hardly change.
        return {"embedding": F.normalize(F.pad(differences, (0, 1), value=1.0))}


def thumbnails(images: Sequence[Image], **_: Any) -> dict[str, Tensor]:
    """Return the gray pixels of thumbnails, (B, 12, 12)."""
    small = [np.array(image.resize((12, 12), Resampling.BILINEAR), np.float32) for image in images]
    return {"pixel_values": torch.from_numpy(np.stack(small))}


def load_encoder(model: Any) -> Any:
    """Return a `TextEncoder` for a model of sentence-transformers, or else an `ImageEncoder`, by its name.

    None or an empty name return a `VectorEncoder`, and an encoder is returned unchanged.

    Raises:
        OSError: If there is no such model, or its configuration cannot be read.

    Example:
        >>> encoder = load_encoder("outputs/birds")  # doctest: +SKIP
    """
    if not isinstance(model, str | None):
        return model
    if not model:
        return VectorEncoder()
    model = getattr(PACKAGES.get(model), "model", model)
    is_of_texts = not any(split_weights(model)) and find_file(model, "modules.json") is not None
    return TextEncoder(model) if is_of_texts else ImageEncoder(model)


def _prepare(
    source: ImageSource, processor: Any, colors: tuple[int, Sequence[int]], indices: Sequence[int]
) -> tuple[Tensor, Tensor | None, list[str]]:
    """Return the indices of the images that can be read, their pixels for a model, and the errors of others."""
    images, errors = dict[int, Image](), list[str]()
    for index in indices:
        try:
            images[index] = source.open(index, *colors)
        except ValueError as error:
            errors.append(str(error))
    pixels = processor([*images.values()], return_tensors="pt")["pixel_values"] if images else None
    return torch.tensor([*images], dtype=torch.long), pixels, errors
