"""Vectors as APIs and databases deliver them."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sphere.geometry.checks import check_dense, check_embeddings, check_rows, to_tensor
from hf_sphere.utils.checks import check_integer, error_text


def read_vectors(
    values: Any, what: str = "vectors", *, scale: Any = None, offset: Any = 0.0, dim: int | None = None
) -> Tensor:
    """Return vectors as float32 on the CPU, (N, d).

    Args:
        values: (N, d) floating-point numbers of any precision, integers, or texts: the base64 of little-endian float32.
            A table of numbers, too, whose columns are the dimensions.
        what: Their name in messages.
        scale: Step of integers: a number, whose value does not change cosines (1.0), or one per dimension, which does.
        offset: Value of the integer 0, a number or one per dimension. With `ranges` of sentence-transformers'
            `quantize_embeddings`, scale = (ranges[1] - ranges[0]) / 255 and offset = ranges[0] + 128 * scale.
        dim: Number of leading dimensions to keep, of a model trained for that (Matryoshka); normalized again.

    Raises:
        ValueError: If lengths differ, numbers are not finite, or integers have no scale.

    Example:
        >>> read_vectors(embeddings.half(), dim=2).shape[1]
        2
    """
    vectors = check_embeddings(parse_vectors(values, what, scale, offset), what=what)
    if dim is not None and not check_integer("dim", dim, 1) <= vectors.shape[1]:
        raise ValueError(f"dim must be from 1 to {vectors.shape[1]} for {what}; got {dim}.")
    return vectors if dim is None else torch.nn.functional.normalize(vectors[:, :dim], dim=1)


def parse_vectors(values: Any, what: str = "vectors", scale: Any = None, offset: Any = 0.0) -> Tensor:
    """Return the same as `read_vectors`, but numbers may be infinite or NaN."""
    check_dense(what, values)
    kind = "numbers, the same number of them for each, or the base64 of float32"
    try:
        if not isinstance(values, Tensor):
            if not isinstance(values, Sequence):
                values = np.asarray(values) if hasattr(values, "__array__") else [*values]
            if not len(values):
                raise ValueError("there are none")
            if all(isinstance(row, str) for row in values):
                values = [np.frombuffer(base64.b64decode(row, validate=True), "<f4") for row in values]
        values = to_tensor(what, values, kind).detach().cpu()
        is_integer = not values.is_floating_point()
        if scale is not None:
            shapes = {torch.as_tensor(step).shape for step in (scale, offset)}
            if odd := shapes - {torch.Size(), torch.Size([1]), values.shape[1:]}:
                raise ValueError(
                    f"scale and offset are a number or one per dimension; got the shape {tuple(odd.pop())}"
                )
            values = values.float() * torch.as_tensor(scale).float() + torch.as_tensor(offset).float()
    except (TypeError, ValueError, RuntimeError) as error:  # of torch, for lengths that differ
        reason = error_text(error).rstrip(".").removeprefix(f"{what} must be {kind}; ")
        raise ValueError(f"{what} must be {kind}: {reason}.") from error
    if is_integer and scale is None:
        hint = "scale=1.0 if all dimensions have the same, else one number per dimension, and the offset, if any"
        raise ValueError(f"{what} are integers, which need their scale. Use hf_sphere.search.read_vectors: {hint}.")
    if values.dtype == torch.float64 and values.numel():
        largest = values.abs().amax(-1)
        fits = (largest.float() > 0) & (largest.float() < torch.inf) | (largest == 0) | ~largest.isfinite()
        check_rows(fits, f"{what} must be in the range of float32, 1e-45 to 3e38; normalize them", "are not")
    return values.float()
