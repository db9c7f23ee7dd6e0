"""The check that nothing is tested on the rows to which it was fitted."""

import logging
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

ROW_BITS = 32
"""Bits of an identity that are the row; those above are the dataset."""

CHANCE = 0.01
"""Fraction of tested rows that may equal fitted ones by value, as do duplicates in real data: it bounds the change of a
rate, such as an accuracy or AUROC."""


class SharedRowsError(ValueError):
    """Something is tested on rows that it was fitted to."""


class Rows(NamedTuple):
    """Rows to compare with others: digests of their values (N,), int64, and identities (N,) if known."""

    digests: Tensor
    ids: Tensor | None = None

    @classmethod
    def of(cls, values: Tensor, ids: Tensor | None = None) -> "Rows":
        """Return the rows of values (N, d); most rows that differ by rounding have the same digest.

        The outputs of a model differ by rounding with the batch size. Digests are of rounded random projections, since
        of all coordinates some would be near the boundary of a step. The step for two is the precision of float32.
        """
        points, generator = values.cpu().double().numpy(), np.random.default_rng(0)
        steps = np.ldexp(np.linalg.norm(points, axis=1), -max(14, 48 // points.shape[1]))
        projections = points @ generator.standard_normal((points.shape[1], 16))
        cells = np.rint(projections / np.where(steps > 0, steps, 1)[:, None]).astype(np.int64)
        return cls(torch.from_numpy(cells @ generator.integers(1 << 62, size=16)), ids)


def check_disjoint(tested: Rows, fitted: Rows, what: str, of_fit: str) -> None:
    """Raise a `SharedRowsError` with their number if something is tested on rows that it was fitted to.

    Rows of one dataset are compared by their identities, and none may be shared. Others are compared by their values;
    one, or the fraction `CHANCE`, may be shared and is logged. Values that occur more than once in one of the sets, as
    for a collapsed network, are no evidence. `what` and `of_fit` name the rows.
    """
    counted = (rows.digests.unique(return_counts=True) for rows in (tested, fitted))
    single = [values[counts == 1] for values, counts in counted]
    same, equal = 0, torch.isin(tested.digests, single[0][torch.isin(*single)])
    if tested.ids is not None and fitted.ids is not None:
        same = int(torch.isin(tested.ids, fitted.ids).sum())
        equal &= ~torch.isin(tested.ids >> ROW_BITS, fitted.ids >> ROW_BITS)
    count, total = same + int(equal.sum()), len(tested.digests)
    how = "" if same else ", by their values (pass `ids` if they are other rows with equal values)"
    text = f"{count:,} of the {total:,} {what} are among the {len(fitted.digests):,} {of_fit}{how}."
    if same or count > max(1, CHANCE * total):
        raise SharedRowsError(f"{text} The result would be too good: use other rows for the fit than for the test.")
    if count:
        logger.warning(text)
