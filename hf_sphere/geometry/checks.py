"""Conversion and validation of numeric arguments."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sphere.utils.devices import check_float64


def check_integer(name: str, value: Any, minimum: int) -> int:
    """Return an integer of at least `minimum` as `int` (numpy integers included), or raise a ValueError."""
    try:
        integer = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        integer = None
    if integer is None or integer < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}; got {value!r}.")
    return integer


def check_floating(name: str, value: Any) -> None:
    """Raise a TypeError unless a value is a tensor of a floating-point dtype."""
    is_tensor = isinstance(value, Tensor)
    if not is_tensor or not value.is_floating_point():
        got, how = (value.dtype, ".float()") if is_tensor else (type(value).__name__, "torch.as_tensor()")
        raise TypeError(f"{name} must be a tensor of a floating-point dtype; got {got}. Convert it with {how}.")
    if not torch.compiler.is_compiling():  # where layouts cannot be read in a backward pass
        check_dense(name, value)


def weigh_points(points: Tensor, weights: Any) -> Tensor:
    """Return weights (..., n) of points (..., n, d), equal if None, in their dtype and divided by their sums.

    A point without a direction, and invalid weights, are errors.
    """
    if points.ndim < 2 or points.shape[-2] == 0:
        raise ValueError(f"points must have the shape (..., n, d) with n of at least 1; got {tuple(points.shape)}.")
    norms = torch.linalg.vector_norm(points.detach(), dim=-1)
    if not ((norms > 0) & norms.isfinite()).all():
        raise ValueError("points must be finite, with finite norms above 0. Normalize them, and remove zeros.")
    weights = points.new_ones(points.shape[-2]) if weights is None else weights
    if not isinstance(weights, Tensor):
        raise TypeError(f"weights must be a tensor; got {type(weights).__name__}. Convert it with torch.as_tensor().")
    *batch, count = points.shape[:-1]
    try:
        torch.broadcast_shapes(weights.shape[:-1], batch)
        fits = weights.shape[-1:] == (count,)
    except RuntimeError:
        fits = False
    if not fits:
        shapes = f"{tuple(weights.shape)} for points of shape {tuple(points.shape)}"
        raise ValueError(f"weights must have the shape (..., n), one for each of the points (..., n, d); got {shapes}.")
    weights = weights.to(points.dtype)
    total = weights.sum(-1, keepdim=True)
    if not ((weights >= 0).all() and ((total > 0) & total.isfinite()).all()):
        raise ValueError("weights must be finite and nonnegative with a positive sum that does not overflow.")
    return weights / total


def check_dense(name: str, values: Any) -> None:
    """Raise a TypeError for a sparse or nested tensor, a sparse matrix, or an array with masked values."""
    if isinstance(values, Tensor):
        is_dense, how = values.layout == torch.strided, "to_dense()"
    else:
        is_dense, how = not hasattr(values, "toarray") and not np.ma.is_masked(values), "toarray() or .filled()"
    if not is_dense:
        got = values.layout if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name} must be dense, without masked values; got {got}. Convert it with .{how}.")


def check_codes(name: str, dtype: object) -> None:
    """Raise a TypeError for 8-bit integers, which do not say whether they are coordinates or packed bits."""
    if str(dtype).removeprefix("torch.") in ("int8", "uint8"):
        raise TypeError(
            f"{name} of dtype {dtype} can be coordinates or packed bits (precisions 'binary' and 'ubinary' of "
            "sentence-transformers). Convert coordinates to float32. Convert bits, after adding 128 to int8, with "
            "numpy.unpackbits(codes, axis=1) to float32, and use the euclidean distance, the root of the Hamming one."
        )


def to_tensor(name: str, values: Any, kind: str = "numbers") -> Tensor:
    """Return numbers as a tensor without loss of precision, and tensors as they are.

    Arrays, columns and lists have the dtype that numpy gives them, so that Python numbers are float64 and int64. Rows
    are lists, arrays, or objects with a `to_numpy`, such as a `Vector` of pgvector. Values that are not of the `kind`
    that the message names, or that no dtype represents exactly, are a TypeError.
    """
    check_dense(name, values)
    try:
        values = values[:] if isinstance(values, Sequence) else values  # a column of datasets, which is read at once
        if not isinstance(values, (Tensor, list, tuple)):
            array = np.asarray(values)  # columns of vectors of pandas, polars and pyarrow become arrays of objects
            values = array.tolist() if array.dtype == object and array.ndim else array
        if isinstance(values, (list, tuple)):
            values = _stack(name, values)
        if not isinstance(values, Tensor):
            array = values
            if array.dtype.kind in "SUTMm" and array.size:
                how = "Number the names: numpy.unique(names, return_inverse=True)[1]"
                raise TypeError(f"the first is '{array.flat[0]}'. {how}.")
            if array.dtype.kind not in "biufc" or array.dtype == np.longdouble:
                array = _to_float64(name, array)
            values = torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
        if values.is_meta:
            raise TypeError("they are on the device meta, where tensors have a shape but no values")
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
    if len(kinds) > 1 and kinds & {bool, np.bool_}:  # which numpy would make ones and zeros
        raise ValueError("some are truth values, which are no numbers")
    if any(hasattr(kind, "__len__") or hasattr(kind, "to_numpy") for kind in kinds - {list, str}):
        for row in rows:
            check_dense(f"each row of {name}", row)
        rows = [row.to_numpy() if hasattr(row, "to_numpy") else row for row in rows]
    if any(hasattr(row, "__len__") for row in rows):
        for number, row in enumerate(rows):
            if not hasattr(row, "__len__"):  # None, and NaN in a column of pandas
                raise ValueError(f"row {number} has none")
    return np.asarray(rows)


def to_floating(name: str, values: Any) -> Tensor:
    """Return numbers as a tensor of a floating-point dtype, float64 for integers; see `to_tensor`."""
    values = to_tensor(name, values)
    exact = values.is_floating_point()
    if exact and values.element_size() == 1:  # torch computes little with 8 bits
        return values.float()
    if not exact:
        check_float64(f"{name} of dtype {values.dtype}", values.device, "Convert them with .float() or .cpu().")
    return values if exact else torch.from_numpy(_to_float64(name, values.cpu().numpy())).to(values.device)


def _to_float64(name: str, array: np.ndarray) -> np.ndarray:
    wide = array.astype(np.float64)
    with np.errstate(invalid="ignore"):
        if not (wide.astype(array.dtype) == array).all():
            others = f"some of dtype {array.dtype} are not, such as integers above 2**53 and missing values"
            raise ValueError(f"{name} must be exact in float64; {others}.")
    return wide


def check_positive(name: str, value: float) -> None:
    """Raise a ValueError unless a number is finite and positive."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be finite and positive; got {value}.")
