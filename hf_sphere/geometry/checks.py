"""Conversion and checks of tensors: numbers of any kind, embeddings, scores and labels."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

IGNORED = -100
"""Label of examples that a loss ignores, as in torch and transformers."""


def check_floating(name: str, value: Any) -> None:
    """Raise a TypeError unless a value is a tensor of a floating-point dtype."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got, how = (value.dtype, ".float") if isinstance(value, Tensor) else (type(value).__name__, "torch.as_tensor")
        raise TypeError(f"{name} must be a tensor of a floating-point dtype; got {got}. Convert it with {how}().")


def check_points(points: Tensor) -> None:
    """Raise a ValueError unless points (..., n, d) are at least one, with directions."""
    norms = torch.linalg.vector_norm(points.detach(), dim=-1)
    if points.ndim < 2 or not points.shape[-2] or not ((norms > 0) & norms.isfinite()).all():
        got = tuple(points.shape)
        raise ValueError(f"points (..., n, d) must have n >= 1 and finite norms above 0; got {got}. Remove others.")


def check_dense(name: str, values: Any) -> None:
    """Raise a TypeError for a sparse or nested tensor, a sparse matrix, or an array with masked values."""
    is_sparse = values.layout != torch.strided if isinstance(values, Tensor) else hasattr(values, "toarray")
    if is_sparse or np.ma.is_masked(values):
        how = f"got {type(values).__name__}. Convert it with .to_dense(), .toarray() or .filled()"
        raise TypeError(f"{name} must be dense, without masked values; {how}.")


def check_codes(name: str, dtype: object) -> None:
    """Raise a TypeError for 8-bit integers, which do not say whether they are coordinates or packed bits."""
    if str(dtype).removeprefix("torch.") in ("int8", "uint8"):
        how = "coordinates, or bits by numpy.unpackbits(codes, axis=1), after adding 128 to int8"
        raise TypeError(f"{name} of dtype {dtype} can be coordinates or packed bits. Convert to float32 {how}.")


def to_tensor(name: str, values: Any, kind: str = "numbers") -> Tensor:
    """Return numbers as a tensor without loss of precision; Python numbers become float64 and int64."""
    check_dense(name, values)
    try:
        values = values[:] if isinstance(values, Sequence) else values  # a column of datasets, which is read at once
        if not isinstance(values, (Tensor, list, tuple)):
            array = np.asarray(values)  # columns of vectors of pandas, polars and pyarrow become arrays of objects
            values = array.tolist() if array.dtype == object and array.ndim else array
        if isinstance(values, (list, tuple)):
            values = _stack(name, values)
        if not isinstance(values, Tensor):
            if values.dtype.kind in "SUTMm" and values.size:
                how = "Number the names: numpy.unique(names, return_inverse=True)[1]; embed texts by a model"
                raise TypeError(f"the first is '{values.flat[0]}'. {how}.")
            if values.dtype.kind not in "biufc" or values.dtype == np.longdouble:
                values = _to_float64(name, values)
            values = torch.from_numpy(np.require(values, values.dtype.newbyteorder("="), ["C", "W"]))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TypeError(f"{name} must be {kind}; {error}") from error
    if values.is_complex():
        raise TypeError(f"{name} must be real; got {values.dtype}.")
    return values


def _stack(name: str, rows: Sequence[Any]) -> Any:
    """Return a list of vectors, or of numbers, as one tensor or array."""
    kinds = {*map(type, rows)}
    if kinds and all(issubclass(kind, Tensor) for kind in kinds):
        return torch.stack(tuple(rows))
    rows = [row.to_numpy() if hasattr(row, "to_numpy") else row for row in rows]  # such as a `Vector` of pgvector
    if kinds - {list, str, int, float}:
        for row in rows:
            check_dense(f"each row of {name}", row)
    if max([len(row) for row in rows if hasattr(row, "__len__")], default=0):
        for number, row in enumerate(rows):
            # None, NaN in a column of pandas, and nothing in one of an older polars
            if not hasattr(row, "__len__") or not len(row):
                raise ValueError(f"row {number} has none")
    return np.asarray(rows)


def to_floating(name: str, values: Any) -> Tensor:
    """Return numbers as a tensor of a floating-point dtype, float64 for integers; see `to_tensor`."""
    values = to_tensor(name, values)
    if values.is_floating_point():
        return values.float() if values.element_size() == 1 else values  # torch computes little with 8 bits
    return torch.from_numpy(_to_float64(name, values.cpu().numpy())).to(values.device)


def _to_float64(name: str, array: np.ndarray) -> np.ndarray:
    wide = array.astype(np.float64)
    with np.errstate(invalid="ignore"):
        if not (wide.astype(array.dtype) == array).all():
            others = "integers above 2**53 and missing values"
            raise ValueError(f"{name} must be exact in float64; some of dtype {array.dtype} are not, such as {others}.")
    return wide


def check_scores(name: str, scores: Tensor) -> Tensor:
    """Return valid scores (N,), N >= 1, as float64 on the CPU."""
    scores = to_floating(name, to_tensor(name, scores).detach().cpu()).double()
    if scores.ndim != 1 or len(scores) == 0:
        raise ValueError(f"{name} must have the shape (N,) with N >= 1; got {tuple(scores.shape)}.")
    if scores.isnan().any():
        raise ValueError(f"{name} must not be NaN; index {int(scores.isnan().nonzero()[0])} is. Remove or replace it.")
    return scores


def check_correct(correct: Tensor, count: int) -> Tensor:
    """Return whether each prediction is correct, (count,), as zeros and ones in float64 on the CPU."""
    correct = check_scores("correct", correct)
    if len(correct) != count:
        raise ValueError(f"correct must have the shape ({count},), one per prediction; got ({len(correct)},).")
    if not ((correct == 0) | (correct == 1)).all():
        raise ValueError("correct must be boolean, or 0 and 1; got other values. Compute predictions == labels.")
    return correct


def check_confidences(confidences: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Return confidences and whether each prediction is correct, (N,) each, as float64 on the CPU."""
    confidences = check_scores("confidences", confidences)
    return confidences, check_correct(correct, len(confidences))


def check_embeddings(embeddings: Tensor, min_count: int = 1, what: str = "embeddings") -> Tensor:
    """Return valid embeddings (N, d), N >= `min_count`, d >= 1, on their device; integers become float64."""
    embeddings = to_embeddings(embeddings, min_count, what)
    check_rows(is_finite(embeddings), f"{what} must be finite", "are not")
    return embeddings


def to_embeddings(embeddings: Tensor, min_count: int = 1, what: str = "embeddings") -> Tensor:
    """Return what `check_embeddings` does, but embeddings may be infinite or NaN."""
    embeddings = to_tensor(what, embeddings).detach()
    check_codes(what, embeddings.dtype)
    embeddings = to_floating(what, embeddings)
    if embeddings.ndim != 2 or len(embeddings) < min_count or embeddings.shape[1] == 0:
        got = tuple(embeddings.shape)
        one = f" A single vector is a list of one: [{what}]." if embeddings.ndim == 1 and min_count == 1 else ""
        raise ValueError(f"{what} must have the shape (N, d) with N >= {min_count} and d >= 1; got {got}.{one}")
    return embeddings


def is_finite(embeddings: Tensor) -> Tensor:
    """Whether each row of embeddings (N, d) is finite, (N,)."""
    return torch.linalg.vector_norm(embeddings, torch.inf, dim=-1).isfinite()  # makes no copy, as isfinite does


def check_rows(valid: Tensor, rule: str, problem: str, ids: Sequence[Any] | None = None, hint: str = "") -> None:
    """Raise a ValueError with the first row that is not valid, (N,), or with the ids of such rows."""
    if count := int((~valid).sum()):
        rows = valid.logical_not().nonzero()[:, 0].tolist()
        which = f"the first at index {rows[0]}" if ids is None else f"with the ids {shorten([ids[n] for n in rows])}"
        raise ValueError(f"{rule}; {count} of {len(valid)} {problem}, {which}. Remove them{hint}.")


def shorten(values: Sequence[Any], most: int = 5) -> str:
    """Return the first of some values as a text, and how many more there are."""
    more = f" and {len(values) - most:,} more" * (len(values) > most)
    return ", ".join(map(repr, values[:most])) + more


def check_labels(labels: Tensor, count: int, what: str = "labels") -> Tensor:
    """Return valid labels (count,), of any integer dtype, as int64."""
    labels = to_tensor(what, labels, "integers")
    if labels.shape != (count,):
        raise ValueError(f"{what} must have the shape ({count},), one per embedding; got {tuple(labels.shape)}.")
    if labels.is_floating_point():
        check_rows(labels.isfinite(), f"{what} must be integers", "are missing or not finite")
    check_integers(labels, what)
    return labels.long()


def check_integers(labels: Tensor, what: str = "labels") -> None:
    """Raise a TypeError unless labels are of an integer dtype."""
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"{what} must be integers; got {labels.dtype}. Convert them with .long().")


def check_classes(labels: Tensor, count: int) -> Tensor:
    """Return the labels (count,) renumbered as class indices 0, 1, ..., int64 on the CPU."""
    return check_labels(labels, count).cpu().unique(return_inverse=True)[1]


def is_batched(tensor: Tensor) -> bool:
    """Whether vmap or a batched autograd call hides an axis of the tensor; torch has no public function for this."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def is_readable(tensor: Tensor) -> bool:
    """Whether values can be read without a device synchronization: on the CPU, outside of compilation and vmap."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not is_batched(tensor)


def check_class_labels(labels: Tensor, num_classes: int, *, owner: str, advice: str) -> None:
    """Raise an error for labels that are no integers, or outside 0..K-1, except -100, if they can be read."""
    check_integers(labels)
    if not is_readable(labels) or not (labels := labels[labels.long() != IGNORED]).numel():
        return
    low, high = labels.aminmax()
    if low < 0 or high >= num_classes:
        last = num_classes - 1
        raise ValueError(
            f"labels run from {low} to {high}, but the {owner} has {num_classes} classes (0 to {last}). {advice}"
        )
