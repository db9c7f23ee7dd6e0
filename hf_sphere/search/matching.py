"""Matches at a false-accept level: conformal p-values of similarities, by groups that are exchangeable."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Matches:
    """The nearest rows of queries, nearest first.

    Attributes:
        rows: (Q, k) int64, rows of the space; -1 where an approximate search found none.
        scores: (Q, k) float64, larger for better matches: the cosine, the density-corrected cosine, or for another
            distance its negative.
        p_values: (Q, k) float64, or None if the space has no calibration yet and no level was given.
        accepted: (Q, k) bool, whether the p-value is at most the level; None without a level.
    """

    rows: Tensor
    scores: Tensor
    p_values: Tensor | None = None
    accepted: Tensor | None = None


@dataclass(frozen=True)
class Calibration:
    r"""Best scores of queries whose group is not searched, and the p-values that follow from them.

    Let $s$ be the best score of a query of a new group, and $S_1, ..., S_C$ those of the calibration queries, each
    among the rows of other groups. Each of the $G$ groups has the weight 1, divided among its queries. Then
    $p = (1 + \sum_i w_i [S_i \geq s]) / (G + 1)$.

    If the calibration queries are rows of the gallery, they are searched among one group fewer than the new query. With
    the new query $q$ as one more row of the gallery all scores would be exchangeable, and so $p$ uniform or larger for
    one row per group. That changes $S_i$ to $\max(S_i, s(x_i, q))$, which is at least $s$ only for the row that matches
    $q$ best. So that row is counted as $\geq s$ if it is a calibration query, and nothing else changes.

    Attributes:
        groups: (C,) int64, number of the group of each query.
        scores: (C,) float64, its best score among other groups.
        matches: (C,) int64, id of the row with that score.
        ids: (C,) int64, the id of the row that is the query; -1 for separate queries.
        next_id: The id of the next new row when the scores were computed: rows from it on are not searched yet.
    """

    groups: Tensor
    scores: Tensor
    matches: Tensor
    ids: Tensor
    next_id: int

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.groups.unique())

    @property
    def weights(self) -> Tensor:
        """Weight of each query, (C,) float64: those of a group sum up to 1."""
        _, group, counts = self.groups.unique(return_inverse=True, return_counts=True)
        return 1 / counts[group].double()

    @property
    def own_weight(self) -> float:
        """The largest weight of a row that is a query itself, and so counts if it matches best; 0 for separate ones."""
        return float(self.weights.where(self.ids >= 0, 0.0).amax())

    @property
    def smallest_p_value(self) -> float:
        """The p-value of a query that matches better than all calibration queries do, whatever its best row is."""
        return (1 + self.own_weight) / (self.num_groups + 1)

    def check_level(self, level: float) -> None:
        """Raise an error if a level is not in (0, 1), or below the smallest p-value."""
        if not 0 < level < 1:
            raise ValueError(f"false_accept must be between 0 and 1; got {level}.")
        if level < self.smallest_p_value:
            needed = int(np.ceil((1 + self.own_weight) / level * (1 - 1e-12))) - 1
            raise ValueError(
                f"false_accept={level:g} needs {needed:,} calibration groups; there are {self.num_groups:,}, whose "
                f"smallest p-value is {self.smallest_p_value:.3g}. Choose a higher level, or fit with more groups or "
                "with separate calibration queries (calibration=)."
            )

    def p_values(self, scores: Tensor, matches: Tensor) -> Tensor:
        """Return the p-values of scores (Q, k), given the ids (Q,) of the best rows of the queries, (Q, k) float64."""
        order = self.scores.argsort()
        below = torch.cat([torch.zeros(1, dtype=torch.float64), self.weights[order].cumsum(0)])
        smaller = torch.searchsorted(self.scores[order], scores.contiguous())
        counts = self.num_groups - below[smaller]
        by_id = self.ids.argsort()
        position = torch.searchsorted(self.ids[by_id], matches.contiguous()).clamp_max(len(self.ids) - 1)
        best = by_id[position]  # the calibration query that is the best row, if it is one
        is_query = (self.ids[best] == matches) & (matches >= 0)
        counts = counts + self.weights[best, None] * (is_query[:, None] & (self.scores[best, None] < scores))
        return ((1 + counts) / (self.num_groups + 1)).clamp_max(1.0)

    def threshold(self, level: float) -> float:
        """Return the smallest score that is accepted whatever row matches best."""
        order = self.scores.argsort(descending=True)
        counts = 1 + self.own_weight + self.weights[order].cumsum(0)  # of a score equal to each
        rejected = counts > level * (self.num_groups + 1) * (1 + 1e-12)
        # Just above the best score that is rejected; all are accepted if none is.
        highest = self.scores[order][rejected][:1]
        return float(np.nextafter(highest.numpy(), np.inf)[0]) if len(highest) else -np.inf


def sample_rows(groups: Tensor, keys: np.ndarray, ids: Tensor, per_group: int, most: int) -> Tensor:
    """Draw groups, and rows of each, by their keys: those of groups that stay do not change when others are added.

    Args:
        groups: (N,) int64.
        keys: (N,) uint64, pseudo-random and equal within a group.
        ids: (N,) int64.
        per_group: Maximum number of rows per group.
        most: Maximum number of rows; at least one group is drawn.

    Returns:
        Rows in increasing order, int64.
    """
    order = torch.from_numpy(np.lexsort((mix(ids.numpy()), groups.numpy(), keys)))
    _, counts = groups[order].unique_consecutive(return_counts=True)
    rank = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    end = counts.clamp_max(per_group).cumsum(0).repeat_interleave(counts)  # of the rows of complete groups so far
    chosen = (rank < per_group) & (end <= max(most, int(end[0])))
    return order[chosen].sort().values


def mix(values: np.ndarray) -> np.ndarray:
    """Return pseudo-random numbers, uint64, that follow from integers (the finalizer of SplitMix64)."""
    bits = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def name_keys(names: Sequence[str | int]) -> np.ndarray:
    """Return a pseudo-random number for each name, uint64."""
    digests = b"".join(hashlib.blake2b(repr(name).encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(digests, np.uint64)
