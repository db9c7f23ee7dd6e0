"""Margins: how much nearer a query is to a row than other groups are, and scores of groups by them."""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere

Score = Literal["cosine", "margin"]

NEAREST, SCALE = 3, 20.0
"""Number of other groups that a margin is above, and factor of margins in log-sum-exp."""

BLOCK = 1 << 24
"""Number of cosines in memory."""


class Groups(NamedTuple):
    """The groups that match queries best, (Q, m) each, best first: score, number of the group, id of its best row."""

    scores: Tensor
    groups: Tensor
    ids: Tensor


def group_scores(scores: Tensor, groups: Tensor, is_best: bool) -> tuple[Tensor, Tensor]:
    """Return the score of the group of each candidate that is the first of it, and whether it is, (Q, c) each.

    Scores (Q, c) of rows are in decreasing order, and -inf where there is no row; groups are numbers. The score of a
    group is that of its best row, or log-sum-exp of all its candidates.
    """
    order = groups.argsort(dim=1, stable=True)
    sorted_groups = groups.gather(1, order)
    starts = F.pad(sorted_groups[:, 1:] != sorted_groups[:, :-1], (1, 0), value=True)
    back = order.argsort(dim=1)
    if is_best:
        return scores, starts.gather(1, back)
    number, terms = starts.cumsum(1) - 1, (SCALE * scores.gather(1, order)).exp()
    sums = torch.zeros_like(terms).scatter_add(1, number, terms).log() / SCALE
    return sums.gather(1, number).gather(1, back), starts.gather(1, back)


def best_groups(scores: Tensor, is_first: Tensor, found: Any, count: int) -> Groups:
    """Return the best groups among candidates (Q, c) with the scores of their groups, filled up with -inf and -1."""
    scores = F.pad(scores.where(is_first, -torch.inf), (0, count), value=-torch.inf)
    top, order = scores.sort(dim=1, descending=True, stable=True)
    top, order = top[:, :count], order[:, :count]
    groups, ids = (F.pad(each, (0, count)).gather(1, order) for each in (found.groups, found.ids))
    return Groups(top, groups.where(top > -torch.inf, -1), ids.where(top > -torch.inf, -1))


class Nearest(NamedTuple):
    """The other groups that rows are nearest to: largest cosines, (N, m) float32, and numbers of these groups, (N, m).

    There is one more than margins need, so that the group of a calibration query can be left out, as if it were new.
    """

    cosines: Tensor
    groups: Tensor

    @classmethod
    def of(cls, vectors: Tensor, groups: Tensor, sample: Tensor) -> "Nearest":
        """Find them for vectors (N, d) of groups (N,), among a sample of the rows of each group, row numbers."""
        names, counts = groups[sample].unique(return_counts=True)
        count = min(NEAREST + 1, len(names))
        columns = torch.arange(int(counts.max())).clamp_max((counts - 1)[:, None])  # the last row fills up
        members = sample[groups[sample].argsort(stable=True)][(counts.cumsum(0) - counts)[:, None] + columns]
        others = project_to_sphere(vectors[members.flatten()])
        parts = []
        for block, own in zip(*(x.split(max(1, BLOCK // len(others))) for x in (vectors, groups)), strict=True):
            cosines = (project_to_sphere(block) @ others.T).view(len(block), *members.shape).amax(2)
            parts.append(cosines.masked_fill(own[:, None] == names, -torch.inf).topk(count))
        cosines, at = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return cls(cosines, names[at])

    @classmethod
    def known(cls, offsets: Tensor) -> "Nearest":
        """Return what has these offsets (N,), if no group is left out."""
        return cls(offsets[:, None], torch.full((len(offsets), 1), -1))

    def offsets(self, rows: Tensor, left_out: Tensor | None = None) -> Tensor:
        """Return what margins of rows are above, float64; of rows (Q, c) as if groups of numbers (Q,) were new."""
        cosines = self.cosines[rows].double()
        exists = cosines > -torch.inf
        if left_out is not None:
            exists &= self.groups[rows] != left_out[:, None, None]
        exists &= exists.cumsum(-1) <= NEAREST
        return cosines.where(exists, 0.0).sum(-1) / exists.sum(-1).clamp_min(1)
