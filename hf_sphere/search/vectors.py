"""Vectors as APIs and databases deliver them."""

import base64
import binascii
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sphere.metrics.checks import check_embeddings
from hf_sphere.search.space import unit_vectors


def read_vectors(
    values: Any, what: str = "the vectors", *, scale: Any = None, offset: Any = 0.0, dim: int | None = None
) -> Tensor:
    """Return vectors as float32 on the CPU, (N, d).

    Args:
        values: (N, d): a tensor or array of any floating dtype, lists of numbers, or texts, the base64 of little-endian
            float32, as with `encoding_format="base64"`. Integers need a scale.
        what: What they are, for messages.
        scale: Value of one step of integers: a number, or one per dimension. Cosines are the same for any common
            number, such as 1; they need the numbers per dimension, if those differ.
        offset: Value of the integer 0, a number or one per dimension. It changes cosines. With ranges (2, d), as in
            sentence-transformers' `quantize_embeddings`, the scale of int8 is the difference of the ranges / 255, and
            the offset `ranges[0] + 128 * scale`.
        dim: Number of leading dimensions to keep, of models trained for it (Matryoshka); they are normalized again.

    Raises:
        ValueError: If the vectors have several lengths, or values that are not finite, or integers have no scale.
    """
    if not hasattr(values, "ndim") or getattr(values, "dtype", None) == np.dtype(object):
        values = list(values)
        if all(isinstance(value, str) for value in values):
            try:
                values = [np.frombuffer(base64.b64decode(value, validate=True), "<f4") for value in values]
            except (binascii.Error, ValueError) as error:
                raise ValueError(f"{what} are texts that are not the base64 of float32: {error}.") from error
        lengths = {np.size(value) if np.ndim(value) == 1 else -1 for value in values}
        if len(lengths) != 1 or -1 in lengths:
            found = ", ".join("no vector" if size < 0 else str(size) for size in sorted(lengths)) or "none"
            raise ValueError(f"{what} must be vectors of one length; there are lengths {found}.")
        values = torch.stack([torch.as_tensor(value) for value in values])
    vectors = torch.as_tensor(values).detach().cpu()
    if not vectors.is_floating_point() and scale is None:
        raise ValueError(
            f"{what} are integers ({vectors.dtype}) without their scale. Give scale=1.0 if all dimensions have the "
            "same, which cosines do not need, or else one number per dimension, and the offset, if any."
        )
    vectors = vectors.float()
    if scale is not None:
        scale, offset = (torch.as_tensor(number, dtype=torch.float32) for number in (scale, offset))
        if {scale.shape, offset.shape} - {(), vectors.shape[1:]}:
            raise ValueError(f"scale and offset of {what} must be numbers, or {vectors.shape[1]} each.")
        vectors = vectors * scale + offset
    if dim is not None:
        if not 1 <= dim <= vectors.shape[-1]:
            raise ValueError(f"dim must be from 1 to the number of dimensions, {vectors.shape[-1]}; got {dim}.")
        vectors = torch.nn.functional.normalize(vectors[:, :dim], dim=-1)
    return check_embeddings(vectors, what=what)


class VectorEncoder:
    """The encoder of vectors that are given, without a model; its interface is that of `ImageEncoder`."""

    name = weights = settings = ""
    content = "vector"
    embeds_texts = False
    metric = {"distance": "cosine"}

    def encode(self, source: Any, rows: Sequence[int], **_: Any) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield the rows and their vectors, normalized."""
        yield torch.tensor(rows), {"embedding": unit_vectors("vectors", source.encoded[list(rows)])}

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Raise an error: there is no model."""
        raise ValueError("the index has no model that embeds texts; search with their vectors.")

    def name_cells(self, source: Any, indices: Tensor, columns: Any) -> dict[str, list[Any]]:
        """Return the row, the name and, if known, the label of each vector."""
        cells = {"row": indices.tolist(), "file": [source.names[row] for row in indices]}
        return cells | ({"label": [source.labels[row] for row in indices]} if source.labels else {})
