"""Scores of groups for queries, and the choice of one by groups that do not calibrate."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere

logger = logging.getLogger(__name__)

Cohort = Literal["none", "query", "both"]
Transform = Literal["none", "mean", "ledoit-wolf", "within groups"]
Kind = Literal["auto", "cosine", "transformed", "fitted"]

TRANSFORMS: tuple[Transform, ...] = ("mean", "ledoit-wolf", "within groups")
"""What is done to rows: the mean is subtracted, then the covariance becomes the identity: that of all rows to the power
1/2, or that within groups."""

COHORTS: tuple[Cohort, ...] = ("query", "both")
"""Which means are subtracted: that of the next groups of the query, or also that of the group's own nearest groups."""

COHORT = 10
"""Number of groups of the mean."""

CANDIDATES = 50
"""Rows with the largest similarities, from which groups are scored."""

SHRINKAGE, SCALE = 0.3, 20.0
"""Part of the identity in the covariance within groups, and factor of the cosines in log-sum-exp."""

FEWEST, FOLDS, LEVEL = 5, 2, 0.05
"""Fewest groups of two rows or more that choose, parts of them, and the level at which scores are compared."""

BLOCK = 1 << 24
"""Number of cosines in memory."""


@dataclass(frozen=True)
class FittedScore:
    """A score of a group for a query, by the cosines of transformed rows.

    Attributes:
        mean: (d,) float32, which is subtracted.
        matrix: (d, d) float32, by which rows are multiplied then; None for none.
        cohort: `none`: the score is the cosine of the best row. Else it is log-sum-exp of the cosines of the rows of
            the group, less means over other groups.
        name: Name of the transform.
    """

    mean: Tensor
    matrix: Tensor | None = None
    cohort: Cohort = "none"
    name: Transform = "none"

    @property
    def is_cosine(self) -> bool:
        """Whether the score is the cosine of transformed vectors, which a threshold can be set on."""
        return self.cohort == "none"

    @property
    def num_groups(self) -> int:
        """Number of groups that are scored: with the best left out, the cohort is of the next ones."""
        return 2 if self.is_cosine else COHORT + 2

    def transform(self, vectors: Tensor) -> Tensor:
        """Return the transformed directions of vectors, (n, d) float32, which do not depend on the number of rows."""
        if self.name == "none":
            return vectors
        parts = []
        for block in vectors.split(8192):
            points = project_to_sphere(block.double()) - self.mean.double()
            points = points if self.matrix is None else points @ self.matrix.double()
            parts.append(project_to_sphere(points).float())
        return torch.cat(parts) if parts else vectors

    def __str__(self) -> str:
        means = {"none": "", "query": ", less the next groups", "both": ", less the next groups of query and group"}
        what = "cosine of the best row" if self.is_cosine else "log-sum-exp of the rows of a group"
        return f"{what}, {self.name} transform{means[self.cohort]}"


class Groups(NamedTuple):
    """The groups that match queries best, (Q, m) each, best first: score, number of the group, id of its best row."""

    scores: Tensor
    groups: Tensor
    ids: Tensor


def group_scores(cosines: Tensor, groups: Tensor, is_best: bool) -> tuple[Tensor, Tensor]:
    """Return the score of the group of each candidate that is the first of it, and whether it is, (Q, c) each.

    Cosines (Q, c) are in decreasing order, and -inf where there is no row; groups are numbers. The score is that of the
    best row, or log-sum-exp of all candidates of the group.
    """
    order = groups.argsort(dim=1, stable=True)
    sorted_groups = groups.gather(1, order)
    starts = F.pad(sorted_groups[:, 1:] != sorted_groups[:, :-1], (1, 0), value=True)
    back = order.argsort(dim=1)
    if is_best:
        return cosines, starts.gather(1, back)
    number, terms = starts.cumsum(1) - 1, (SCALE * cosines.gather(1, order).double()).exp()
    scores = torch.zeros_like(terms).scatter_add(1, number, terms).log() / SCALE
    return scores.gather(1, number).gather(1, back), starts.gather(1, back)


def best_groups(scores: Tensor, is_first: Tensor, groups: Tensor, ids: Tensor, count: int) -> Groups:
    """Return the best groups among candidates (Q, c), filled up with -inf and -1."""
    scores = scores.where(is_first, -torch.inf)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
    top = scores.gather(1, order)
    exists = top > -torch.inf
    columns = [top, *(column.gather(1, order).where(exists, -1) for column in (groups, ids))]
    if lacking := count - order.shape[1]:
        shape = len(scores), lacking
        columns = [torch.cat([c, c.new_full(shape, f)], 1) for c, f in zip(columns, (-torch.inf, -1, -1), strict=True)]
    return Groups(*columns)


def cohort_means(scores: Tensor) -> Tensor:
    """Return the mean of the groups after the best one, (Q,), of scores (Q, m) in decreasing order."""
    after = scores[:, 1 : COHORT + 1]
    exists = after > -torch.inf
    return after.where(exists, 0.0).sum(1) / exists.sum(1).clamp_min(1)


class GroupCohorts(NamedTuple):
    """The nearest groups of some rows of each group, whose mean the score `both` subtracts.

    A calibration query must not count in the means of the groups it is compared with, as a new query does not. So each
    row has one group more than are averaged.
    """

    groups: Tensor  # (G,) int64, in increasing order
    scores: Tensor  # (G, m, COHORT + 1), filled up with -inf
    nearest: Tensor  # (G, m, COHORT + 1), numbers of groups

    @classmethod
    def of(cls, groups: Tensor, found: Groups) -> "GroupCohorts":
        """Make them of rows of groups (n,), and the groups that these found, without their own."""
        names, group, counts = groups.unique(return_inverse=True, return_counts=True)
        order = group.argsort(stable=True)
        rank = torch.empty_like(group)
        rank[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts)[group[order]]
        shape = len(names), int(counts.max()), COHORT + 1
        scores, nearest = torch.full(shape, -torch.inf).double(), torch.full(shape, -1)
        scores[group, rank], nearest[group, rank] = found.scores[:, : COHORT + 1], found.groups[:, : COHORT + 1]
        return cls(names, scores, nearest)

    def means(self, groups: Tensor, left_out: Tensor | None) -> Tensor:
        """Return the mean of each group (Q, m), without one group (Q,); that of all groups for a group without rows."""
        every = self._average(self.scores)
        at = torch.searchsorted(self.groups, groups.contiguous()).clamp_max(len(self.groups) - 1)
        is_known = self.groups[at] == groups
        if left_out is None:
            means = every[at]
        else:
            parts = []
            for block, name in zip(at.split(256), left_out.split(256), strict=True):
                other = self.nearest[block] != name[:, None, None, None]
                parts.append(self._average(self.scores[block].where(other, -torch.inf)))
            means = torch.cat(parts)
        return means.where(is_known, every.mean())

    def _average(self, scores: Tensor) -> Tensor:
        """Return the mean over rows of the means over the first groups that are not left out."""
        exists = scores > -torch.inf
        exists &= exists.cumsum(-1) <= COHORT
        sizes = exists.sum(-1)
        means = scores.where(exists, 0.0).sum(-1) / sizes.clamp_min(1)
        is_row = sizes > 0
        return means.where(is_row, 0.0).sum(-1) / is_row.sum(-1).clamp_min(1)


def above_cohorts(
    scores: Groups, best: Groups, kind: Cohort, cohorts: GroupCohorts | None, left_out: Tensor | None = None
) -> Tensor:
    """Return the scores of groups (Q, m) above the cohorts of a query, by its best groups, and of the groups."""
    values = scores.scores - cohort_means(best.scores)[:, None]
    if kind == "both":
        assert cohorts is not None
        values = values - cohorts.means(scores.groups, left_out)
    return values


def best_without(found: Groups, kind: Cohort, cohorts: GroupCohorts | None, left_out: Tensor | None = None) -> Groups:
    """Return the best group of each query and the best one if this were not there, (Q, 2), above their cohorts."""
    if kind == "none":
        return Groups(*(column[:, :2] for column in found))
    first = above_cohorts(found, found, kind, cohorts, left_out)
    best = first.argmax(1, keepdim=True)
    left = found._replace(scores=found.scores.scatter(1, best, -torch.inf))
    order = left.scores.argsort(dim=1, descending=True, stable=True)
    others = Groups(*(column.gather(1, order) for column in left))
    second = above_cohorts(others, others, kind, cohorts, left_out)
    next_best = second.argmax(1, keepdim=True)
    pairs = [(first.gather(1, best), second.gather(1, next_best))]
    pairs += [
        (mine.gather(1, best), other.gather(1, next_best)) for mine, other in zip(found[1:], others[1:], strict=True)
    ]
    scores, groups, ids = (torch.cat(pair, 1) for pair in pairs)
    return Groups(scores, *(column.where(scores > -torch.inf, -1) for column in (groups, ids)))


def transforms(vectors: Tensor, groups: Tensor) -> dict[Transform, tuple[Tensor, Tensor | None]]:
    """Return the mean and the matrix of each transform, fitted to unit vectors (n, d) of groups (n,)."""
    exact = vectors.double()
    mean = exact.mean(0)
    centered = exact - mean
    names, group, counts = groups.unique(return_inverse=True, return_counts=True)
    within = (
        exact - (torch.zeros(len(names), exact.shape[1]).double().index_add(0, group, exact) / counts[:, None])[group]
    )
    found: dict[Transform, tuple[Tensor, Tensor | None]] = {"mean": (mean.float(), None)}

    def power(points: Tensor, freedom: int, shrinkage: float | None, exponent: float) -> tuple[Tensor, Tensor]:
        values, axes = torch.linalg.eigh(points.T @ points / max(1, freedom))
        values = values.clamp_min(0)
        share, level = _ledoit_wolf(points, values) if shrinkage is None else shrinkage, values.mean()
        return mean.float(), ((axes * ((1 - share) * values / level + share) ** exponent) @ axes.T).float()

    # Equal rows have no axes.
    if float(centered.square().mean()) >= 1e-12:
        found["ledoit-wolf"] = power(centered, len(exact), None, -0.25)
    if float(within.square().mean()) >= 1e-12:
        found["within groups"] = power(within, len(exact) - len(names), SHRINKAGE, -0.5)
    return found


def _ledoit_wolf(centered: Tensor, variances: Tensor) -> float:
    """Return the shrinkage of a covariance of centered rows (n, d), by its eigenvalues (Ledoit and Wolf, 2004)."""
    distance = (variances - variances.mean()).square().sum()
    error = (centered.square().sum(1).square().mean() - variances.square().sum()) / len(centered)
    return float((error / distance).clamp(0, 1)) if distance > 0 else 1.0


def fit_score(vectors: Tensor, groups: Tensor, rows: Tensor, folds: Tensor, kind: Kind) -> FittedScore | None:
    """Return the score that names most queries at a level; None if groups are too few, or if the cosine is as good.

    Queries are rows, each among the others of its fold, by transforms that are fitted to the groups of the other folds:
    rows that fitted a transform lie farther apart than new ones, so they are no fair rows to search. The one that is
    returned is fitted to all. For the kind `auto` its mean difference over groups is above its standard error.

    Args:
        vectors: (n, d), unit vectors of groups that do not calibrate.
        groups: (n,), numbers of their groups.
        rows: (q,), queries.
        folds: (n,), fold of the group of each row, from 0 to FOLDS - 1.
        kind: `auto`; `fitted` also if the cosine is as good; or `transformed` for a cosine of transformed vectors.
    """
    labels, counts = groups.unique(return_inverse=True, return_counts=True)[1:]
    rows = rows[counts[labels[rows]] > 1]
    if len(labels[rows].unique()) < FEWEST or any(len(labels[folds == fold].unique()) < 2 for fold in range(FOLDS)):
        return None
    cohorts: tuple[Cohort, ...] = ("none",) if kind == "transformed" else COHORTS
    results: dict[tuple[Transform, Cohort], list[Tensor]] = {}
    judged = []
    for fold in range(FOLDS):
        members = (folds == fold).nonzero()[:, 0]
        queries = torch.isin(members, rows).nonzero()[:, 0]
        judged.append(labels[members[queries]])
        fits = transforms(vectors[folds != fold], groups[folds != fold])
        for name in TRANSFORMS:
            # A fold of equal rows has no axes: nothing is done to them then.
            score = FittedScore(*fits[name], name=name) if name in fits else COSINE
            for cohort, columns in _search_each(score.transform(vectors[members]), labels[members], queries, cohorts):
                results.setdefault((name, cohort), []).append(columns)
        (_, columns) = next(_search_each(vectors[members], labels[members], queries, ("none",)))
        results.setdefault(("none", "none"), []).append(columns)
    own = torch.cat(judged)
    named = {key: _named(torch.cat(columns, 1), own) for key, columns in results.items()}
    cosine = named.pop(("none", "none"))
    choice = max(named, key=lambda key: float(named[key].mean()))
    gain = named[choice] - cosine
    text = "Named at %.0f %%: %.3f by %s, %.3f by the cosine."
    logger.info(text, 100 * LEVEL, named[choice].mean(), choice, cosine.mean())
    fitted = transforms(vectors, groups)
    if choice[0] not in fitted or (kind == "auto" and not gain.mean() > gain.std() / len(gain) ** 0.5):
        return None
    return FittedScore(*fitted[choice[0]], choice[1], choice[0])


def _search_each(
    points: Tensor, labels: Tensor, rows: Tensor, cohorts: tuple[Cohort, ...]
) -> Iterator[tuple[Cohort, Tensor]]:
    """Yield, for each cohort, what rows find, (3, q): best score, best of other groups, and is it right."""
    parts = []
    for block in rows.split(max(1, BLOCK // len(points))):
        cosines = points[block] @ points.T
        cosines.scatter_(1, block[:, None], -torch.inf)
        nearest = cosines.topk(min(CANDIDATES, len(points)))
        cosines.masked_fill_(labels[block, None] == labels, -torch.inf)
        parts.append((*nearest, *cosines.topk(min(CANDIDATES, len(points)))))
    of_all, at, of_others, at_others = (torch.cat(columns) for columns in zip(*parts, strict=True))
    own, is_best = labels[rows], cohorts == ("none",)
    every, others = (
        best_groups(*group_scores(cosines.double(), labels[at], is_best), labels[at], at, COHORT + 2)
        for cosines, at in ((of_all, at), (of_others, at_others))
    )
    known = GroupCohorts.of(own, others)
    for cohort in cohorts:
        of_known, of_unknown = best_without(every, cohort, known), best_without(others, cohort, known, own)
        is_right = (of_known.groups[:, 0] == own).double()
        yield cohort, torch.stack([of_known.scores[:, 0], of_unknown.scores[:, 0], is_right])


def _named(columns: Tensor, groups: Tensor) -> Tensor:
    """Return the part of each group (q,) that is named correctly at the level, (G,), by columns of `_search_each`."""
    known, unknown, is_right = columns
    group, counts = groups.unique(return_inverse=True, return_counts=True)[1:]
    order = unknown.argsort(descending=True)
    accepted = (1 / counts[group].double())[order].cumsum(0) / len(counts)
    threshold = unknown[order][(accepted > LEVEL).nonzero()[0]]
    hits = ((known > threshold) & (is_right > 0)).double()
    return torch.zeros(len(counts)).double().index_add(0, group, hits) / counts


COSINE = FittedScore(torch.empty(0))
"""What groups are scored by if no score is fitted: the cosine of the best row."""

TENSORS = dict.fromkeys(("mean", "matrix"), torch.float32) | {"cohorts": torch.float64}
TENSORS |= dict.fromkeys(("cohort_groups", "cohort_nearest"), torch.int64)
"""Types of the tensors of a fitted score in files."""


def pack(score: FittedScore | None, cohorts: GroupCohorts | None) -> dict[str, Tensor]:
    """Return the tensors of a score for a file."""
    tensors = {} if score is None else {"mean": score.mean, "matrix": score.matrix}
    if cohorts is not None:
        tensors |= {"cohort_groups": cohorts.groups, "cohorts": cohorts.scores, "cohort_nearest": cohorts.nearest}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def unpack(
    names: tuple[Transform, Cohort] | None, tensors: dict[str, Tensor], dim: int
) -> tuple[FittedScore | None, GroupCohorts | None]:
    """Return the score of `pack`, whose tensors are taken out of others, or raise an error if they are damaged."""
    parts = {name: tensors.pop(name) for name in TENSORS if name in tensors}
    if names is None:
        return None, None
    transform, cohort = names
    shape = (*parts.get("cohorts", torch.empty(0, 0)).shape[:2], COHORT + 1)
    shapes = {"mean": (dim,), "matrix": (dim, dim), "cohort_groups": shape[:1]}
    for name, tensor in parts.items():
        is_valid = tensor.dtype == TENSORS[name] and tensor.shape == shapes.get(name, shape)
        if not is_valid or not (tensor < torch.inf).all():
            raise ValueError(f"{name} of the fitted score is invalid")
    score = FittedScore(parts["mean"], parts.get("matrix"), cohort, transform)
    if cohort != "both":
        return score, None
    order = parts["cohort_groups"].argsort()
    return score, GroupCohorts(*(parts[name][order] for name in ("cohort_groups", "cohorts", "cohort_nearest")))
