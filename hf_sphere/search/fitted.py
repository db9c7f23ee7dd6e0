"""Scores of groups for queries, and the choice of one by groups that do not calibrate."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere

logger = logging.getLogger(__name__)

Summary = Literal["best", "three", "exponential"]
Cohort = Literal["none", "query", "both"]
Transform = Literal["none", "mean", "ledoit-wolf", "whitening", "within groups"]

SUMMARIES: tuple[Summary, ...] = ("best", "three", "exponential")
"""How the similarities of the rows of a group become one: the best, the mean of the three best, or log-sum-exp."""

COHORTS: tuple[Cohort, ...] = ("none", "query", "both")
"""Which means are subtracted: that of the next groups of the query, and that of the group's own nearest groups."""

TRANSFORMS: tuple[Transform, ...] = ("none", "mean", "ledoit-wolf", "whitening", "within groups")
"""What is done to rows: nothing, the mean is subtracted, and their covariance, that of all rows to the power 1/2 or
wholly, or that within groups, becomes the identity."""

COHORT = 10
"""Number of groups of the mean."""

CANDIDATES = 50
"""Rows with the largest similarities, from which groups are scored."""

SHRINKAGE, SCALE = 0.3, 20.0
"""Part of the identity in a covariance, and factor of the cosines in log-sum-exp."""

FEWEST, FOLDS, LEVEL = 5, 2, 0.05
"""Fewest groups of two rows or more that choose, parts of them, and the level at which scores are compared."""

BLOCK = 1 << 24
"""Number of cosines in memory."""


@dataclass(frozen=True)
class FittedScore:
    """A score of a group for a query: rows are transformed, compared, summarized, and compared with a cohort.

    Attributes:
        mean: (d,) float32, which is subtracted.
        matrix: (d, d) float32, by which rows are multiplied then; None for none.
        summary: How the cosines of the rows of a group become one.
        cohort: Which means over other groups are subtracted.
        name: Name of the transform.
    """

    mean: Tensor
    matrix: Tensor | None = None
    summary: Summary = "best"
    cohort: Cohort = "none"
    name: Transform = "none"

    @property
    def is_cosine(self) -> bool:
        """Whether the score is the cosine of transformed vectors, which a threshold can be set on."""
        return self.summary == "best" and self.cohort == "none"

    @property
    def num_groups(self) -> int:
        """Number of groups that are scored: with the best left out, the cohort is of the next ones."""
        return 2 if self.name == "none" and self.is_cosine else COHORT + 2

    def transform(self, vectors: Tensor) -> Tensor:
        """Return the transformed directions of vectors, (n, d) float32, which do not depend on the number of rows."""
        if self.name == "none":
            return vectors
        parts = []
        for block in vectors.split(8192):
            centered = project_to_sphere(block.double()) - self.mean.double()
            parts.append(
                project_to_sphere(centered if self.matrix is None else centered @ self.matrix.double()).float()
            )
        return torch.cat(parts) if parts else vectors

    def __str__(self) -> str:
        parts = [f"{self.name} transform", f"{self.summary} of the rows", f"cohort {self.cohort}"]
        return ", ".join(parts)


class Groups(NamedTuple):
    """The groups that match queries best, (Q, m) each, best first: score, number of the group, id of its best row."""

    scores: Tensor
    groups: Tensor
    ids: Tensor


def summarize(cosines: Tensor, groups: Tensor, summary: Summary) -> tuple[Tensor, Tensor]:
    """Return the score of the group of each candidate, and whether it is the first of its group, (Q, c) each.

    Cosines (Q, c) are in decreasing order, and -inf where there is no row; groups are numbers.
    """
    order = groups.argsort(dim=1, stable=True)
    sorted_groups, values = groups.gather(1, order), cosines.gather(1, order).double()
    starts = torch.ones_like(sorted_groups, dtype=torch.bool)
    starts[:, 1:] = sorted_groups[:, 1:] != sorted_groups[:, :-1]
    number = starts.cumsum(1) - 1
    positions = torch.arange(groups.shape[1]).expand_as(groups)
    rank = positions - positions.where(starts, 0).cummax(1).values
    counts = (values > -torch.inf) & (rank < {"best": 1, "three": 3}.get(summary, groups.shape[1]))
    if summary == "exponential":
        totals = torch.zeros_like(values).scatter_add(1, number, (SCALE * values).exp().where(counts, 0.0))
        scores = totals.log() / SCALE
    else:
        totals = torch.zeros_like(values).scatter_add(1, number, values.where(counts, 0.0))
        sizes = torch.zeros_like(values).scatter_add(1, number, counts.double())
        scores = (totals / sizes).where(sizes > 0, -torch.inf)
    back = order.argsort(dim=1)
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
    values = scores.scores
    if kind != "none":
        values = values - cohort_means(best.scores)[:, None]
    if kind == "both":
        assert cohorts is not None
        values = values - cohorts.means(scores.groups, left_out)
    return values


def best_without(found: Groups, kind: Cohort, cohorts: GroupCohorts | None, left_out: Tensor | None = None) -> Groups:
    """Return the best group of each query and the best one if this were not there, (Q, 2), above their cohorts."""
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


def transforms(
    vectors: Tensor, groups: Tensor
) -> Iterator[tuple[Transform, Callable[[], tuple[Tensor, Tensor | None]]]]:
    """Yield the name of each transform, and a function that fits it to unit vectors (n, d) of groups (n,)."""
    exact = vectors.double()
    mean, dim = exact.mean(0), vectors.shape[1]
    centered = exact - mean

    def power(values: Tensor, axes: Tensor, shrinkage: float, exponent: float) -> tuple[Tensor, Tensor | None]:
        level = values.mean()
        shrunk = (1 - shrinkage) * values + shrinkage * level
        return mean.float(), ((axes * (shrunk / level) ** exponent) @ axes.T).float()

    def spectrum(points: Tensor, freedom: int) -> tuple[Tensor, Tensor]:
        values, axes = torch.linalg.eigh(points.T @ points / max(1, freedom))
        return values.clamp_min(0), axes

    yield "none", lambda: (torch.zeros(dim), None)
    if float(centered.square().mean()) < 1e-12:  # equal rows have no axes
        return
    yield "mean", lambda: (mean.float(), None)
    whole = spectrum(centered, len(exact))
    yield "ledoit-wolf", lambda: power(*whole, _ledoit_wolf(centered, whole[0]), -0.25)
    yield "whitening", lambda: power(*whole, SHRINKAGE, -0.5)
    names, group, counts = groups.unique(return_inverse=True, return_counts=True)
    within = exact - (torch.zeros(len(names), dim).double().index_add(0, group, exact) / counts[:, None])[group]
    if float(within.square().mean()) >= 1e-12:
        yield "within groups", lambda: power(*spectrum(within, len(exact) - len(names)), SHRINKAGE, -0.5)


def _ledoit_wolf(centered: Tensor, variances: Tensor) -> float:
    """Return the shrinkage of a covariance of centered rows (n, d), by its eigenvalues (Ledoit and Wolf, 2004)."""
    distance = (variances - variances.mean()).square().sum()
    error = (centered.square().sum(1).square().mean() - variances.square().sum()) / len(centered)
    return float((error / distance).clamp(0, 1)) if distance > 0 else 1.0


def fit_score(vectors: Tensor, groups: Tensor, rows: Tensor, folds: Tensor, *, always: bool) -> FittedScore | None:
    """Return the score that names most queries at a level; None if groups are too few, or if the cosine is as good.

    Queries are rows, each among all others. A transform is fitted to the groups of the other folds, so that it is
    judged as for groups that it has not seen; the one that is returned is fitted to all. It is better if the mean
    difference over groups is above its standard error.

    Args:
        vectors: (n, d), unit vectors of groups that do not calibrate.
        groups: (n,), numbers of their groups.
        rows: (q,), queries.
        folds: (n,), fold of the group of each row, from 0 to FOLDS - 1.
        always: Whether a score is returned although the cosine is as good.
    """
    labels, counts = groups.unique(return_inverse=True, return_counts=True)[1:]
    rows = rows[counts[labels[rows]] > 1]
    is_enough = len(own := labels[rows]) and len(own.unique()) >= FEWEST
    if not is_enough or any((folds != fold).sum() < 2 for fold in range(FOLDS)):
        return None
    results: dict[tuple[Transform, Summary, Cohort], Tensor] = {}
    fits = [dict(transforms(vectors[folds != fold], groups[folds != fold])) for fold in range(FOLDS)]
    for name in (name for name in TRANSFORMS if all(name in fit for fit in fits)):
        for fold, fit in enumerate(fits):
            is_judged = folds[rows] == fold
            points = FittedScore(*fit[name](), name=name).transform(vectors)
            for key, columns in _search_each(points, labels, rows):
                results.setdefault((name, *key), torch.zeros(3, len(rows)).double())[:, is_judged] = columns[
                    :, is_judged
                ]
    named = {key: _named(columns, own) for key, columns in results.items()}
    cosine, choice = named["none", "best", "none"], max(named, key=lambda key: float(named[key].mean()))
    gain = named[choice] - cosine
    text = "Named at %.0f %%: %.3f by %s, %.3f by the cosine."
    logger.info(text, 100 * LEVEL, named[choice].mean(), choice, cosine.mean())
    if not always and not gain.mean() > gain.std() / len(gain) ** 0.5:
        return None
    name, summary, cohort = choice
    return FittedScore(*dict(transforms(vectors, groups))[name](), summary, cohort, name)


def _search_each(points: Tensor, labels: Tensor, rows: Tensor) -> Iterator[tuple[tuple[Summary, Cohort], Tensor]]:
    """Yield, for each summary and cohort, what rows find, (3, q): best score, best of other groups, and is it right."""
    parts = []
    for block in rows.split(max(1, BLOCK // len(points))):
        cosines = points[block] @ points.T
        cosines.scatter_(1, block[:, None], -torch.inf)
        nearest = cosines.topk(min(CANDIDATES, len(points)))
        cosines.masked_fill_(labels[block, None] == labels, -torch.inf)
        parts.append((*nearest, *cosines.topk(min(CANDIDATES, len(points)))))
    of_all, at, of_others, at_others = (torch.cat(columns) for columns in zip(*parts, strict=True))
    own = labels[rows]
    for summary in SUMMARIES:
        found = [
            best_groups(*summarize(cosines, labels[at], summary), labels[at], at, COHORT + 2)
            for cosines, at in ((of_all, at), (of_others, at_others))
        ]
        cohorts = GroupCohorts.of(own, found[1])
        for cohort in COHORTS:
            of_known = best_without(found[0], cohort, cohorts)
            of_unknown = best_without(found[1], cohort, cohorts, own)
            is_right = of_known.groups[:, 0] == own
            yield (summary, cohort), torch.stack([of_known.scores[:, 0], of_unknown.scores[:, 0], is_right.double()])


def _named(columns: Tensor, groups: Tensor) -> Tensor:
    """Return the part of each group (q,) that is named correctly at the level, (G,), by columns of `_search_each`."""
    known, unknown, is_right = columns
    group, counts = groups.unique(return_inverse=True, return_counts=True)[1:]
    order = unknown.argsort(descending=True)
    accepted = (1 / counts[group].double())[order].cumsum(0) / len(counts)
    threshold = unknown[order][(accepted > LEVEL).nonzero()[0]]
    hits = ((known > threshold) & (is_right > 0)).double()
    return torch.zeros(len(counts)).double().index_add(0, group, hits) / counts


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
    names: tuple[Transform, Summary, Cohort] | None, tensors: dict[str, Tensor], dim: int
) -> tuple[FittedScore | None, GroupCohorts | None]:
    """Return the score of `pack`, whose tensors are taken out of others, or raise an error if they are damaged."""
    parts = {name: tensors.pop(name) for name in TENSORS if name in tensors}
    if names is None:
        return None, None
    transform, summary, cohort = names
    shape = (*parts.get("cohorts", torch.empty(0, 0)).shape[:2], COHORT + 1)
    shapes = {"mean": (dim,), "matrix": (dim, dim), "cohort_groups": shape[:1]}
    for name, tensor in parts.items():
        is_valid = tensor.dtype == TENSORS[name] and tensor.shape == shapes.get(name, shape)
        if not is_valid or not (tensor < torch.inf).all():
            raise ValueError(f"{name} of the fitted score is invalid")
    score = FittedScore(parts["mean"], parts.get("matrix"), summary, cohort, transform)
    if cohort != "both":
        return score, None
    order = parts["cohort_groups"].argsort()
    return score, GroupCohorts(*(parts[name][order] for name in ("cohort_groups", "cohorts", "cohort_nearest")))
