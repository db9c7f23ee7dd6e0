"""Rows of matrices as directions, in blocks, and what the estimators of this folder share."""

import math
import warnings
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.utils.extmath import row_norms
from sklearn.utils.validation import _check_feature_names, _check_n_features, _check_sample_weight, validate_data
from torch import Tensor

from hf_sphere.geometry.checks import check_codes, check_dense, check_embeddings, to_tensor
from hf_sphere.utils.modules import widest_dtype

Block: TypeAlias = Tensor | Any
"""Some of the rows, (b, d): a tensor or a `csr_matrix`, which has no type annotations."""


class DirectionRows:
    """The rows of a matrix (n, d) in blocks, and the factors that normalize them, which are 0 for rows of zeros.

    `reset` sets the number of features of the estimator, as `fit` does, instead of checking it. With `for_density`,
    d must be at least 2, sparse matrices are errors, and blocks have the dtype float64 where the device supports it.
    A row of weight w counts as w equal rows; `used_weights` are 0 for rows of zeros.
    """

    def __init__(
        self, estimator: Any, X: Any, reset: bool, for_density: bool = False, sample_weight: Any = None
    ) -> None:
        self.is_tensor = isinstance(X, Tensor)
        self.matrix: Block
        if isinstance(X, Tensor):
            X = check_embeddings(X, what="X")
            self.matrix = X.to(torch.promote_types(X.dtype, torch.float32))
            _check_feature_names(estimator, X, reset=reset)
            _check_n_features(estimator, X, reset=reset)
        else:
            if not sp.issparse(X):
                check_dense("X", X)
                if len(getattr(X, "shape", ())) < 2:  # a column or a list of vectors
                    X = to_tensor("X", X).numpy()
                check_codes("X", getattr(X, "dtype", None))
            kinds = {"accept_sparse": False if for_density else "csr", "dtype": [np.float64, np.float32], "order": "C"}
            least = 1 + (reset and for_density)
            self.matrix = validate_data(estimator, X, reset=reset, ensure_min_features=least, **kinds)
            if not sp.issparse(self.matrix):
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # only read
                    self.matrix = torch.from_numpy(self.matrix)
            elif not self.matrix.has_canonical_format:
                self.matrix = sp.csr_matrix(self.matrix, copy=True)
                self.matrix.sum_duplicates()
        self.matrix = _within_range(self.matrix)
        self.dim = int(self.matrix.shape[1])
        is_dense = isinstance(self.matrix, Tensor)
        self.device = self.matrix.device if is_dense else torch.device("cpu")
        self.dtype = self.matrix.dtype if is_dense else torch.from_numpy(self.matrix.data[:0]).dtype
        if for_density:
            self.dtype = widest_dtype(self.device)
        self.scales = torch.ones(self.matrix.shape[0], dtype=self.dtype, device=self.device)
        for index in self.parts(self.dim):
            block = self[index][0]
            if isinstance(block, Tensor):
                norms = torch.linalg.vector_norm(block, dim=1)
            else:
                norms = torch.from_numpy(row_norms(block.astype("float64")).astype(block.dtype))
            self.scales[index] = torch.where(norms > 0, 1 / norms, 0.0)
        self.is_zero = self.scales == 0
        self.weights = torch.ones_like(self.scales)
        if sample_weight is not None:
            check_dense("sample_weight", sample_weight)
            if isinstance(sample_weight, Tensor):
                sample_weight = sample_weight.detach().cpu().double().numpy()
            weights = _check_sample_weight(sample_weight, np.empty(len(self)), ensure_non_negative=True)
            if weights.dtype.kind not in "fiu" or not weights.any() or not np.isfinite(weights).all():
                raise ValueError("sample_weight must have finite real numbers, not only zeros.")
            self.weights = torch.from_numpy(weights).to(self.device, self.dtype)
        self.used_weights = self.weights * ~self.is_zero
        if zeros := int(self.is_zero.sum()):
            text = f"{zeros} of {len(self)} rows of X are zero and have no direction; they get the label 0."
            warnings.warn(text, stacklevel=5)

    def __len__(self) -> int:
        return len(self.scales)

    def warn_of_shares(self) -> None:
        """Warn if weights, which count as numbers of rows, sum to far less than the number of rows, as shares do."""
        count, total = int((self.used_weights > 0).sum()), float(self.used_weights.sum())
        if total < count / 10:
            text = f"weights count as numbers of rows, and those of {count} rows sum to {total:.3g}"
            warnings.warn(f"{text}; multiply shares by the number of rows that they stand for.", stacklevel=5)

    def parts(self, values_per_row: int) -> Iterator[slice]:
        """Return slices of the rows, such that blocks with the given number of values per row fit into the cache."""
        size = max(64, 2 ** (19 if self.device.type == "cpu" else 26) // max(values_per_row, 1))
        return (slice(start, min(start + size, len(self))) for start in range(0, len(self), size))

    def __getitem__(self, index: slice | Tensor) -> tuple[Block, Tensor]:
        if isinstance(self.matrix, Tensor):
            return self.matrix[index].to(self.dtype), self.scales[index]
        return self.matrix[index.numpy() if isinstance(index, Tensor) else index], self.scales[index]

    def directions(self, index: Tensor) -> Tensor:
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


def all_sums_by_label(rows: DirectionRows, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the weighted sums of the directions with each of `count` labels, (count, d), and of the weights."""
    sums, on_cpu = torch.zeros(count, rows.dim, dtype=rows.dtype, device=rows.device), rows.device.type == "cpu"
    for part in rows.parts(8 if on_cpu else count + rows.dim):  # large: each call has a cost
        block, scales = rows[part]
        scales = scales * rows.weights[part]
        if on_cpu:
            indices = scales.numpy(), labels[part].numpy(), np.arange(len(scales) + 1)
            of_block = sp.csr_matrix(indices, shape=(len(scales), count)).T @ (
                block.numpy() if isinstance(block, Tensor) else block
            )
            sums += torch.from_numpy(of_block.toarray() if sp.issparse(of_block) else of_block)
        else:  # deterministic
            sums += (torch.nn.functional.one_hot(labels[part], count) * scales[:, None]).T @ block
    return sums, sums.new_zeros(count).index_add_(0, labels, rows.used_weights)


def _within_range(matrix: Block) -> Block:
    """Divide the rows of a matrix whose squares could overflow or underflow by their largest values."""
    is_dense = isinstance(matrix, Tensor)
    sizes = matrix if is_dense else torch.from_numpy(abs(matrix).max(1).toarray().reshape(-1, 1))
    largest = torch.linalg.vector_norm(sizes, math.inf, dim=1)
    limits = torch.finfo(largest.dtype)
    usual = (largest == 0) | ((largest > limits.tiny**0.25) & (largest < limits.max**0.25))
    if usual.all():
        return matrix
    divisors = torch.where(usual, 1.0, largest)
    if is_dense:
        return matrix / divisors[:, None]
    matrix = sp.csr_matrix(matrix, copy=True)
    matrix.data /= np.repeat(divisors.numpy(), np.diff(matrix.indptr))
    return matrix
