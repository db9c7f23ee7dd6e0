"""Scores of groups, by cosines or margins, and conformal p-values of them, by groups that are exchangeable."""

from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from numbers import Real
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.utils.checks import check_choice

Score = Literal["cosine", "margin"]
Rule = Literal["bounded", "sharp", "strict"]
RULES = get_args(Rule)

NEAREST, SCALE = 3, 20.0
"""Number of other groups that a margin is above, and factor of margins in log-sum-exp."""

SLACK = 1.2
"""Factor by which a bounded p-value can be below the strict one."""

BLOCK = 1 << 24
"""Number of cosines in memory."""

PARTS = ("groups", "ids", "scores", "match_groups", "matches")
"""Tensors of a `Calibration`."""

LANGUAGES = ("de", "en", "es", "fr")
"""Languages of the texts that calibrate a space for questions that have nothing to do with it."""

ROUNDING = 1 + 1e-12
"""Factor of a level, up to which p-values are at most the level."""


def mean_interval(shares: Tensor) -> tuple[float, float, float]:
    """Return the mean of shares, (n,), between the ends of its 95 % interval by Student's t."""
    from scipy.stats import t  # slow to import

    half = float(shares.std() / len(shares) ** 0.5 * t.ppf(0.975, len(shares) - 1))
    mean = float(shares.mean())
    return max(0.0, mean - half), mean, min(1.0, mean + half)


class Candidates(NamedTuple):
    """What queries found, (Q, c) each, best first: scores, numbers of groups, ids of rows, and rows (-1 for none)."""

    scores: Tensor
    groups: Tensor
    ids: Tensor
    rows: Tensor


def best_groups(found: Candidates, count: int, is_margin: bool = False) -> Candidates:
    """Return the best groups among candidates (Q, c), best first; filled up with -inf and -1.

    The scores of candidates are -inf where there is no row. The score of a group is that of its best row, or for
    margins log-sum-exp of all its candidates.
    """
    order = found.groups.argsort(dim=1, stable=True)
    groups, scores = found.groups.gather(1, order), found.scores.gather(1, order)
    starts = F.pad(groups[:, 1:] != groups[:, :-1], (1, 0), value=True)
    if is_margin:
        number, terms = starts.cumsum(1) - 1, (SCALE * scores).exp()
        scores = torch.zeros_like(terms).scatter_add(1, number, terms).log().gather(1, number) / SCALE
    # In the order of the candidates, so that of equal groups the first one found is first.
    scores = F.pad(scores.where(starts, -torch.inf).gather(1, order.argsort(dim=1)), (0, count), value=-torch.inf)
    top, order = scores.sort(dim=1, descending=True, stable=True)
    top, order, exists = top[:, :count], order[:, :count], top[:, :count] > -torch.inf
    rest = torch.stack(found[1:]).expand(3, *found.rows.shape)
    rest = F.pad(rest, (0, count)).gather(2, order.expand(3, *order.shape)).where(exists, -1)
    return Candidates(top, *rest)


class Nearest(NamedTuple):
    """The other groups that rows are nearest to: largest cosines, (N, m) float32, and numbers of these groups, (N, m).

    There is one more than margins need, so that the group of a calibration query can be left out, as if it were new.
    """

    cosines: Tensor
    groups: Tensor

    @classmethod
    def of(cls, vectors: Tensor, groups: Tensor, sample: Tensor, sample_groups: Tensor) -> "Nearest":
        """Find them for vectors (N, d) of groups (N,), among a sample (n, d) of the rows of each group, (n,)."""
        names, counts = sample_groups.unique(return_counts=True)
        count = min(NEAREST + 1, len(names))
        columns = torch.arange(int(counts.max())).clamp_max((counts - 1)[:, None])  # the last row fills up
        members = sample_groups.argsort(stable=True)[(counts.cumsum(0) - counts)[:, None] + columns]
        others = project_to_sphere(sample[members.flatten()])
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


@dataclass(frozen=True)
class Calibration:
    r"""Best scores of queries whose group is not searched, and the p-values that follow from them.

    Let $s$ be the best score of a query $q$ of a new group, and $S_1, ..., S_C$ those of the calibration queries, each
    among the rows of other groups. Each of the $G$ groups has the weight 1, divided among its queries, so
    $Q(s) = \sum_i w_i [S_i \geq s]$ is the number of groups that match as well as $q$ does.

    `sharp`: $p = \max(1 / (G + 1), \sum_i w_i [Q_i \leq Q(s)] / G)$, where $Q_i$ is what $Q$ would be for the
    calibration query $i$ if its group were the new one: without this group, and with the next best match of the queries
    whose best match it is. The share of the queries that stand out as much as $q$ is counted, not the groups above it.
    These include the $Q(s)$ groups above it, so $p \geq \max(1 / (G + 1), Q(s) / G)$, which is at least half of the
    strict $p$ below without a group of the best row. So at most twice the level is accepted with separate calibration.

    `strict`: $p = (1 + Q(s)) / (G + 1)$. For separate calibration queries, whose groups are exchangeable with that of
    $q$, the probability that it is at most a level is at most this level (hierarchical conformal prediction: Lee,
    Barber and Willett, 2023). If the calibration queries are rows of the gallery, they are searched among one group
    fewer than $q$. Only the group of the best row of $q$ makes a difference, and the larger of two counts is taken for
    it:

    - With $q$ as one more row of the gallery, all scores would be exchangeable for one row per group, and so $p$
      uniform or larger. That changes $S_i$ to $\max(S_i, s(x_i, q))$, which is at least $s$ for the best row only. So
      that row is counted, if it is a calibration query.
    - $q$ and $x_i$ are compared in the same groups: those that are neither of the two. So $S_i$ is compared with the
      best score of $q$ in other groups than that of $x_i$ (the jackknife+ of Barber, Candes, Ramdas and Tibshirani,
      Annals of Statistics 2021). That matters for groups of almost equal rows. By their argument, at most twice the
      level is accepted by cosines, and by the sharp rule twice the level and 3 / (G + 1).

    `bounded`: the larger of the sharp $p$ and of the strict one divided by 1.2, so that its bounds are 1.2 times those
    of the strict rule.

    For cosines of groups of one row each the strict rule is exact. With one calibration query per group, all rules are
    the strict one. Margins of rows that calibrate are not exchangeable with those of $q$, which would be near some rows
    itself: their level is measured.
    """

    groups: Tensor  # (C,) int64, number of the group of each query
    ids: Tensor  # (C,) int64, the number of the row that is the query; -1 for separate queries
    scores: Tensor  # (C, 2) float64, its best score among other groups, and the best one without that group
    match_groups: Tensor  # (C, 2) int64, numbers of these groups; -1 for none
    matches: Tensor  # (C, 2) int64, numbers of the best rows of these groups; -1 for none
    next_id: int  # of the next new row when the scores were computed: rows from it on are not searched yet
    rule: Rule = "bounded"

    @cached_property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.members[0])

    @cached_property
    def needs_best(self) -> bool:
        """Whether p-values depend on the best row of the query: not if no calibration query is a row."""
        return bool((self.ids >= 0).any()) and (self._is_strict or self.rule == "bounded")

    @cached_property
    def _is_strict(self) -> bool:
        """Whether the p-values are those of the strict rule, as by all rules for one query per group."""
        return self.rule == "strict" or self.num_groups == len(self.groups)

    @cached_property
    def smallest_p_value(self) -> float:
        """The lowest level that is not refused: the p-value of a query that matches better than all others do."""
        return self._smallest(float(self._weights.amax()) if self.needs_best else 0.0)

    def _smallest(self, own: float) -> float:
        """Return the smallest p-value if the group of the best row counts this much."""
        return float(self.p_values(torch.full((1, 1), torch.inf, dtype=torch.float64), own=own))

    def check_level(self, level: float, smallest: float | None = None) -> None:
        """Raise an error if a level is not in (0, 1), or below the smallest p-value."""
        smallest = smallest or self.smallest_p_value
        if not isinstance(level, Real) or not 0 < level < 1:
            raise ValueError(f"false_accept must be between 0 and 1; got {level!r}.")
        if smallest > level * ROUNDING:
            needed = int(np.ceil(smallest * (self.num_groups + 1) / level / ROUNDING)) - 1
            raise ValueError(
                f"false_accept={level:g} needs {needed:,} calibration groups; there are {self.num_groups:,}, whose "
                f"smallest p-value is {smallest:.3g}. Choose a higher level, or fit with more groups, or with separate "
                "calibration queries (calibration=, or hf-sphere index --calibration)."
            )

    def p_values(self, scores: Tensor, best: Candidates | None = None, own: Tensor | float = 0.0) -> Tensor:
        """Return the p-values of scores (Q, k) of queries, (Q, k) float64.

        First the groups whose queries have at least the scores are counted. That of the best row counts `own` more,
        which follows from the best two groups where calibration queries are rows and these groups are known.
        """
        order = self.scores[:, 0].argsort()
        below = F.pad(self._weights[order].cumsum(0), (1, 0))
        at = torch.searchsorted(self.scores[order, 0].contiguous(), scores.contiguous())
        counts = self.num_groups - below[at]
        if best is not None and self.needs_best:
            names, members = self.members
            group, elsewhere = best.groups[:, 0].contiguous(), best.scores[:, 1:2]
            at = torch.searchsorted(names, group).clamp_max(len(names) - 1)
            queries = members[at].where((names[at] == group)[:, None], -1)
            weights = self._weights[queries].masked_fill(queries < 0, 0.0)[..., None]
            highest, lowest = self.scores[queries, 0][..., None], torch.minimum(scores, elsewhere)
            at_least = highest >= scores[:, None]
            is_best = (self.ids[queries] == best.ids[:, :1])[..., None]
            by_row, by_group = (weights * (at_least | is_best)).sum(1), (weights * (highest >= lowest[:, None])).sum(1)
            own = torch.maximum(by_row, by_group) - (weights * at_least).sum(1)
        strict = ((1 + counts + own) / (self.num_groups + 1)).clamp_max(1.0)
        if self._is_strict:
            return strict
        ranks, shares = self._ranks
        # Sums of weights are equal up to rounding.
        sharp = shares[torch.searchsorted(ranks, counts + 1e-9, right=True)].clamp(1 / (self.num_groups + 1), 1.0)
        return sharp if self.rule == "sharp" else torch.maximum(sharp, strict / SLACK)

    @cached_property
    def _ranks(self) -> tuple[Tensor, Tensor]:
        """The Q_i of the sharp rule in increasing order, (C,), and the share of queries below each, (C + 1,)."""
        ranks = torch.empty(len(self.groups), dtype=torch.float64)
        for rows in torch.arange(len(ranks)).split(max(1, BLOCK // len(ranks))):
            own, scores = self.groups[rows, None], self.scores[rows, :1]
            others = self.scores[:, 1].where(self.match_groups[:, 0] == own, self.scores[:, 0])
            ranks[rows] = ((others >= scores) & (self.groups != own)).double() @ self._weights
        order = ranks.argsort()
        return ranks[order], F.pad(self._weights[order].cumsum(0), (1, 0)) / self.num_groups

    def threshold(self, level: float) -> float:
        """Return the smallest score that is accepted, even if the whole group of the best row counts."""
        own = 1.0 if self.needs_best else 0.0
        self.check_level(level, self._smallest(own))
        scores = self.scores[:, 0].sort(descending=True).values
        p_values = self.p_values(scores[:, None], own=own)[:, 0]
        # Just above the best score that is rejected; all are accepted if none is.
        highest = scores[p_values > level * ROUNDING][:1]
        return float(np.nextafter(highest.numpy(), np.inf)[0]) if len(highest) else -np.inf

    @cached_property
    def _weights(self) -> Tensor:
        """Weight of each query, (C,) float64: those of a group sum up to 1."""
        _, group, counts = self.groups.unique(return_inverse=True, return_counts=True)
        return 1 / counts[group].double()

    @cached_property
    def members(self) -> tuple[Tensor, Tensor]:
        """The groups (G,), in increasing order, and the queries of each, (G, m), filled up with -1."""
        names, counts = self.groups.unique(return_counts=True)
        columns = torch.arange(int(counts.max()))
        at = (counts.cumsum(0) - counts)[:, None] + columns
        queries = self.groups.argsort(stable=True)[at.clamp_max(len(self.groups) - 1)]
        return names, queries.where(columns < counts[:, None], -1)


def neutral_texts(language: str = "en") -> list[str]:
    """Return 400 short questions, statements and requests about everyday topics, as `calibration` of a space.

    Embedded by the model and the prompt of the queries, they are queries without a match: `EmbeddingSpace.fit` then
    limits how often an unrelated question is accepted, without a label. That is a promise for queries like these: a
    question of a topic near to those of the space is accepted more often. They were written for this library, and no
    two of them share four words in a row.

    Args:
        language: `en`, `de`, `es` or `fr`.

    Raises:
        ValueError: If there are no texts in the language.

    Example:
        >>> texts = neutral_texts()
        >>> len(texts), texts[0]
        (400, 'How long should I boil potatoes before mashing them?')
    """
    check_choice("language", language, LANGUAGES)
    file = resources.files(__package__) / "texts" / f"{language}.txt"
    return file.read_text(encoding="utf-8").splitlines()
