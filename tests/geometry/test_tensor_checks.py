"""Conversion of numbers of any kind to tensors."""

from decimal import Decimal

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from hf_sphere.geometry.checks import check_codes, to_floating, to_tensor

EXACT = 16777217.5  # float32 rounds it


def datasets_column():
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"values": [EXACT, 1.0]})["values"]


def pandas_column(dtype=None):
    return pytest.importorskip("pandas").Series([EXACT, 1.0], dtype=dtype)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [EXACT, 1],
        lambda: (EXACT, 1.0),
        lambda: [torch.tensor(EXACT, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)],
        lambda: np.array([EXACT, 1.0]),
        lambda: np.array([1.0, EXACT])[::-1],
        lambda: np.array([EXACT, 1.0], dtype=">f8"),
        lambda: np.array([EXACT, 1.0], dtype=np.longdouble),
        lambda: np.array([EXACT, 1.0], dtype=object),
        lambda: [Decimal(EXACT), Decimal(1)],
        lambda: torch.tensor([EXACT, 1.0], dtype=torch.float64),
        lambda: pandas_column("Float64"),
        pandas_column,
        datasets_column,
    ],
)
def test_no_kind_of_numbers_loses_digits(make):
    found = to_tensor("values", make())
    assert found.dtype == torch.float64
    assert found.tolist() == [EXACT, 1.0]


def test_integers_become_float64_unless_they_may_be_bits_and_floating_arrays_keep_their_dtype():
    for dtype in ("uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"):
        found = to_floating("x", np.array([1, 0], dtype=dtype))
        assert torch.equal(found, torch.tensor([1.0, 0.0], dtype=torch.float64))
    for dtype in ("float16", "float32"):
        assert to_floating("x", np.ones(2, dtype=dtype)).dtype == getattr(torch, dtype)
    for dtype in (torch.int8, np.dtype("uint8")):
        with pytest.raises(TypeError, match=r"x of dtype (torch.int8|uint8) can be coordinates or packed bits"):
            check_codes("x", dtype)


def test_a_read_only_array_is_accepted_without_a_warning(recwarn):
    array = np.ones(2)
    array.flags.writeable = False
    assert to_tensor("x", array).tolist() == [1.0, 1.0]
    assert not recwarn.list


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([2**53 + 1], ValueError, "x must be exact in float64; some of dtype int64 are not"),
        ([2**70 + 1], TypeError, r"some of dtype object are not, such as integers above 2\*\*53 and missing values"),
        ([None, 1.0], TypeError, "missing values"),
        ([[1.0], [1.0, 2.0]], TypeError, "x must be numbers; .*inhomogeneous"),
        ([torch.ones(1), torch.ones(2)], TypeError, "x must be numbers; stack expects each tensor to be equal size"),
        (["1.5", "2"], TypeError, "x must be numbers; the first is '1.5'"),
        ([[1.0], None], TypeError, "x must be numbers; .*row 1 has none"),
        (object(), TypeError, "x must be numbers"),
        (torch.eye(2).to_sparse(), TypeError, r"x must be dense, .*; got Tensor. Convert it with .to_dense"),
        (csr_matrix(np.eye(2)), TypeError, "got csr_matrix. Convert it"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), TypeError, r"without masked values; got MaskedArray"),
        (torch.tensor([1j]), TypeError, "x must be real; got torch.complex64"),
        (np.array([1j]), TypeError, "x must be real; got torch.complex128"),
    ],
)
def test_what_is_not_exact_or_dense_is_an_error(values, error, message):
    with pytest.raises(error, match=message):
        to_floating("x", values)
