"""The check that nothing is tested on the rows to which it was fitted."""

import hashlib
import logging
from typing import NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

ROW_BITS = 32
"""Bits of an identity that are the row; those above are the data set."""

CHANCE = 0.01
"""Fraction of tested rows that may equal fitted ones by value, as do duplicates in real data: it bounds the change of a
rate, such as an accuracy or AUROC."""


class SharedRowsError(ValueError):
    """Something is tested on rows that it was fitted to."""


class Rows(NamedTuple):
    """Rows to compare with others: digests of their values (N,), 0 for zero vectors, and identities (N,) if known."""

    digests: Tensor
    ids: Tensor | None = None

    @classmethod
    def of(cls, values: Tensor, ids: Tensor | None = None) -> "Rows":
        """Return the rows of values (N, d)."""
        cells = (values.cpu().double() + 0.0).contiguous().numpy()  # + 0.0, since -0.0 has other bytes
        digests = [hashlib.blake2b(row, digest_size=8).digest() if row.any() else b"" for row in cells]
        return cls(torch.tensor([int.from_bytes(digest, signed=True) for digest in digests]), ids)


def check_disjoint(tested: Rows, fitted: Rows, what: str) -> None:
    """Raise an error if something is tested on rows that it was fitted to.

    Rows of one data set are compared by their identities, of which none may be shared; others by their values, of which
    one, or the fraction `CHANCE`, may be shared and is logged. Vectors of zeros are no evidence.

    Args:
        tested: The tested rows.
        fitted: The rows of the fit.
        what: What is tested on what, for messages.

    Raises:
        SharedRowsError: With the number of shared rows.
    """
    same, equal = 0, torch.isin(tested.digests, fitted.digests) & (tested.digests != 0)
    if tested.ids is not None and fitted.ids is not None:
        same = int(torch.isin(tested.ids, fitted.ids).sum())
        equal &= ~torch.isin(tested.ids >> ROW_BITS, fitted.ids >> ROW_BITS)
    count, total = same + int(equal.sum()), len(tested.digests)
    how = "" if same else " by their values (pass `ids` if they are other inputs with equal values)"
    text = f"{what}: {count:,} of {total:,} rows are among the {len(fitted.digests):,} rows of the fit{how}."
    if same or count > max(1, CHANCE * total):
        raise SharedRowsError(
            f"{text} The result would be too good. Fit to rows that are not tested; for the images that a model was "
            "trained on, use --split training of recipes/extract_embeddings.py."
        )
    if count:
        logger.warning(text)
