"""Validated input of the estimators: the directions of the rows of an array, a sparse matrix or a tensor."""

import warnings
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.utils.extmath import row_norms
from sklearn.utils.validation import _check_feature_names, _check_n_features, validate_data
from torch import Tensor

Block: TypeAlias = Tensor | Any
"""Some of the rows, (b, d): a tensor or a `csr_matrix`, which has no type annotations."""


class Rows:
    """The rows of a matrix, which is not copied, in blocks; and the factors that normalize them.

    `rows[index]` returns a block and its factors. These are 0 for rows of zeros.

    Args:
        estimator: The estimator, whose number of features is set or checked.
        X: Matrix (n, d): array-like, a scipy sparse matrix, or a tensor on any device.
        reset: Whether to set the number of features of the estimator (in `fit`), instead of checking it.
        for_density: Whether d must be at least 2, sparse matrices are errors, and blocks have the dtype float64 on
            devices that support it. Otherwise they have that of the matrix, at least float32.

    Raises:
        ValueError: If the matrix is empty, does not have two axes or the right number of features, or is not finite.
        TypeError: If a tensor is complex, or the matrix is sparse and must not be.
    """

    def __init__(self, estimator: Any, X: Any, reset: bool, for_density: bool = False) -> None:
        self.is_tensor = isinstance(X, Tensor)
        min_features = 2 if reset and for_density else 1
        self.matrix: Block
        if isinstance(X, Tensor):
            self.matrix = _check_tensor(estimator, X.detach(), reset, min_features)
        else:
            self.matrix = validate_data(
                estimator,
                X,
                reset=reset,
                accept_sparse=False if for_density else "csr",
                dtype=[np.float64, np.float32],
                order="C",
                ensure_min_features=min_features,
            )
            if not sp.issparse(self.matrix):
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # only read
                    self.matrix = torch.from_numpy(self.matrix)
        self.dim = int(self.matrix.shape[1])
        is_dense = isinstance(self.matrix, Tensor)
        self.device = self.matrix.device if is_dense else torch.device("cpu")
        self.dtype = self.matrix.dtype if is_dense else torch.from_numpy(self.matrix.data[:0]).dtype
        if for_density and self.device.type != "mps":
            self.dtype = torch.float64
        self.scales = torch.ones(self.matrix.shape[0], dtype=self.dtype, device=self.device)
        for part in self.parts(self.dim):
            norms = _norms(self[part][0])
            self.scales[part] = torch.where(norms > 0, 1 / norms, 0.0)
        self.is_zero = self.scales == 0
        if self.is_zero.any():
            count = f"{int(self.is_zero.sum())} of {len(self)}"
            warnings.warn(f"{count} rows of X are zero and have no direction; they get the label 0.", stacklevel=5)

    def __len__(self) -> int:
        return len(self.scales)

    def parts(self, values_per_row: int) -> Iterator[slice]:
        """Return slices of the rows, such that blocks with the given number of values per row fit into the cache."""
        size = max(64, 2 ** (19 if self.device.type == "cpu" else 26) // max(values_per_row, 1))
        return (slice(start, min(start + size, len(self))) for start in range(0, len(self), size))

    def __getitem__(self, index: slice | np.ndarray) -> tuple[Block, Tensor]:
        at: Any = index if isinstance(index, slice) else torch.from_numpy(index).to(self.device)
        block = self.matrix[at].to(self.dtype) if isinstance(self.matrix, Tensor) else self.matrix[index]
        return block, self.scales[at]

    def directions(self, index: np.ndarray) -> Tensor:
        """Return unit vectors (b, d) of some rows, as a dense tensor."""
        block, scales = self[index]
        return (block if isinstance(block, Tensor) else torch.from_numpy(block.toarray())) * scales[:, None]

    def output(self, values: Tensor) -> Any:
        """Return a result in the form of the input: as a tensor or a numpy array."""
        return values if self.is_tensor else values.numpy()


def products(block: Block, centers: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the inner products of rows (b, d) with centers (k, d), (b, k), stored in `out` if the rows are dense."""
    if isinstance(block, Tensor):
        return torch.mm(block, centers.T, out=out)
    return torch.from_numpy(block @ centers.numpy().T)


def sums_by_label(block: Block, scales: Tensor, labels: Tensor, count: int) -> Tensor:
    """Return the sums of the scaled rows (b, d) with each of `count` labels: (count, d)."""
    if isinstance(block, Tensor) and block.device.type != "cpu":
        return (torch.nn.functional.one_hot(labels, count) * scales[:, None]).T @ block  # deterministic
    rows, ends = block.numpy() if isinstance(block, Tensor) else block, np.arange(len(labels) + 1)
    sums = sp.csr_matrix((scales.numpy(), labels.numpy(), ends), shape=(len(labels), count)).T @ rows
    return torch.from_numpy(sums.toarray() if sp.issparse(sums) else sums)


def all_sums_by_label(rows: Rows, labels: Tensor, count: int) -> Tensor:
    """Return the sums of the directions of all rows with each of `count` labels: (count, d)."""
    sums = torch.zeros(count, rows.dim, dtype=rows.dtype, device=rows.device)
    for part in rows.parts(8 if rows.device.type == "cpu" else count + rows.dim):  # large: each call has a cost
        sums += sums_by_label(*rows[part], labels[part], count)
    return sums


def _norms(block: Block) -> Tensor:
    """Norms (b,), for dense rows without overflow or underflow of squares."""
    if not isinstance(block, Tensor):
        return torch.from_numpy(row_norms(block))
    norms, limits = torch.linalg.vector_norm(block, dim=1), torch.finfo(block.dtype)
    if norms.min() > limits.tiny**0.25 and norms.max() < limits.max**0.25:
        return norms
    largest = block.abs().amax(1, keepdim=True)
    return largest.squeeze(1) * torch.linalg.vector_norm(block / torch.where(largest > 0, largest, 1.0), dim=1)


def _check_tensor(estimator: Any, X: Tensor, reset: bool, min_features: int) -> Tensor:
    """Check a tensor as scikit-learn checks arrays."""
    if X.is_complex():
        raise TypeError(f"X must be real; got {X.dtype}.")
    if X.ndim != 2 or X.shape[0] == 0 or X.shape[1] < min_features:
        raise ValueError(f"X must have the shape (n, d) with n >= 1 and d >= {min_features}; got {tuple(X.shape)}.")
    X = X.to(torch.promote_types(X.dtype, torch.float32))
    if not X.isfinite().all():
        raise ValueError(f"X must be finite; {int((~X.isfinite().all(1)).sum())} of {len(X)} rows are not.")
    _check_feature_names(estimator, X, reset=reset)
    _check_n_features(estimator, X, reset=reset)
    return X
