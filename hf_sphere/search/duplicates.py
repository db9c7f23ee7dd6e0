"""Clusters of near-identical rows of a space, at a threshold that is given or chosen by a fitted model."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import breadth_first_order, connected_components, minimum_spanning_tree
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.search.neighbor_search import APPROXIMATE
from hf_sphere.search.vectors import check_names
from hf_sphere.utils.checks import check_choice, check_exclusive, check_number
from hf_sphere.utils.pages import Table

WINDOWS = (0.2, 0.6), (0.4, 0.8)
"""Fractions of the rows, those with the best matches first, between which the model is fitted. Duplicates are above the
first window, or above the second one if they are many."""

SAMPLE, LEAST_ROWS, ROUNDING = 5_000, 100, 1e-6
"""Limits of the rows to fit, and the distance 1 - s up to which rows are equal."""

NEIGHBORS, LEAD = 20, 0.6
"""Neighbors that vote for a label, and the lead of another label, as a fraction of them, that makes a row suspect."""

BLOCK, PENDING = 2_048, 4_000_000
"""Rows of a block of cosines, and pairs in memory before they are reduced to those that connect clusters."""

COARSE = 2**-6
"""Bound of the error of a cosine in bfloat16: both factors and the result are rounded, each by a fraction of 2^-8."""


@dataclass(frozen=True, repr=False)
class Duplicates(Table):
    """Clusters of rows, connected by pairs whose cosine is at least the threshold.

    Attributes:
        clusters: The rows of each cluster of two or more; large clusters first.
        pairs: (P, 2) int64, the most similar pairs that connect the clusters, n - 1 in a cluster of n rows.
            Without the second rows of all pairs, the first row of each cluster is left.
        cosines: (P,) float64.
        threshold: The smallest cosine of a duplicate.
        is_fitted: Whether the threshold was chosen by the fitted model.
        expected_false: Number of false pairs that the model expects; None if it cannot be fitted, or the threshold is
            below the similarities to which it is fitted.
        conflicts: Indices of the clusters that have several labels.
        suspects: (S,) int64, rows whose neighbors outside their cluster mostly have another label, the surest first.
        suggestions: The label of those neighbors, (S,).
        shared: Indices of the clusters that have rows of several parts.
        ids: The ids of all rows, or without ids a range of their numbers.

    Example:
        >>> found = EmbeddingSpace.fit(embeddings).duplicates(threshold=0.99)
        >>> len(found.clusters) <= len(found.to_pandas())
        True
    """

    clusters: list[Tensor]
    pairs: Tensor
    cosines: Tensor
    threshold: float
    is_fitted: bool
    expected_false: float | None
    conflicts: list[int]
    suspects: Tensor
    suggestions: list[Any]
    shared: list[int]
    ids: Sequence[Any] = field(repr=False)

    def __str__(self) -> str:
        rows = sum(map(len, self.clusters))
        text = f"{rows:,} rows in {len(self.clusters):,} clusters, threshold {self.threshold:.4g}"
        if self.expected_false is None:
            return f"{text}, expected number of false pairs unknown"
        if len(self.pairs) > self.expected_false >= 0.995:  # 1 but for rounding
            return f"{text}, one of {len(self.pairs) / self.expected_false:,.0f} pairs expected false"
        pairs = "pair" if f"{self.expected_false:.2g}" == "1" else "pairs"
        return f"{text}, {self.expected_false:.2g} false {pairs} expected"

    def to_pandas(self, columns: Mapping[str, Sequence[Any]] | None = None) -> Any:
        """Return a table with a row per pair: its cluster, its cosine, and both ids (without ids, rows).

        Args:
            columns: Columns (N,) of the rows, by name, such as texts or files, of which it has both cells.

        Raises:
            ValueError: If a column has another length.
        """
        from pandas import DataFrame

        return DataFrame(self.pairs_by_column(columns or {}))

    def pairs_by_column(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Return the columns of `to_pandas`."""
        named = {} if "id" in columns else {"row" if isinstance(self.ids, range) else "id": self.ids}
        numbers = {row: number for number, rows in enumerate(self.clusters, start=1) for row in rows.tolist()}
        clusters = np.array([numbers[row] for row in self.pairs[:, 0].tolist()], dtype=np.int64)
        order = np.lexsort((-self.cosines.numpy(), clusters))
        cells = {"cluster": clusters[order].tolist(), "cosine": self.cosines[order].tolist()}
        for name, column in (named | dict(columns)).items():
            if len(values := [*column]) != len(self.ids):
                raise ValueError(f"column {name!r} must have {len(self.ids):,} values; got {len(values):,}.")
            cells |= {f"{name}_{n + 1}": [values[row] for row in self.pairs[order, n].tolist()] for n in (0, 1)}
        return cells

    def __repr__(self) -> str:
        suspects = f"; {len(self.suspects):,} rows with a likely wrong label" * bool(len(self.suspects))
        return f"Duplicates({self}{suspects})"


def find_duplicates(
    space: Any, threshold: float | None, expected_false: float | None, labels: Any, parts: Any
) -> Duplicates:
    """Find the duplicates of an `EmbeddingSpace`; the arguments are those of its method `duplicates`."""
    count = len(space)
    check_choice("the distance of vectors with duplicates", space.metric["distance"], ["cosine"])
    given = {"threshold": threshold is not None, "expected_false": expected_false is not None}
    check_exclusive("choose the pairs", given)
    if threshold is not None:
        check_number("threshold", threshold, "(-1, 1]")
    most = max(count, LEAST_ROWS) / 10
    expected_false = check_number("expected_false", 1.0 if expected_false is None else expected_false, f"(0, {most:g}]")
    labels, parts = (
        [""] * count if names is None else check_names(what, names, count)
        for what, names in (("labels", labels), ("parts", parts))
    )
    fits = _fit_best_matches(space)
    cosine = threshold
    if cosine is None:
        if not fits:
            needs = f"{LEAST_ROWS} rows of several groups, most of them different, to fit how unrelated rows match"
            raise ValueError(f"to choose the threshold takes {needs}. Give a cosine (threshold=, or --threshold).")
        largest = max(np.exp(-start - np.log(pairs / expected_false) / rate) for start, rate, pairs in fits)
        cosine = 1 - max(float(largest), ROUNDING)  # equal rows are duplicates
    value = -np.log(max(1 - cosine, ROUNDING))
    known = [float(pairs * np.exp(rate * (start - value))) for start, rate, pairs in fits if value >= start]
    pairs, cosines = _connect(_similar_pairs(space, min(cosine, 1 - ROUNDING)), count)
    graph = coo_matrix((np.ones(len(pairs)), pairs.T), shape=(count, count))
    numbers = torch.from_numpy(connected_components(graph, directed=False)[1]).long()
    members = numbers.argsort(stable=True).split(numbers.bincount().tolist())
    clusters = sorted((rows for rows in members if len(rows) > 1), key=len, reverse=True)
    if clusters:  # one more row, from which all clusters are reached by their first rows
        edges = np.concatenate([pairs, [[int(rows[0]), count] for rows in clusters]])
        linked = coo_matrix((np.ones(len(edges)), edges.T), shape=(count + 1, count + 1))
        before = breadth_first_order(linked.tocsr(), count, directed=False)[1]
        pairs = np.where(before[pairs[:, :1]] == pairs[:, 1:], pairs[:, ::-1], pairs)
    conflicts, shared = (
        [n for n, rows in enumerate(clusters) if len({names[row] for row in rows.tolist()}) > 1]
        for names in (labels, parts)
    )
    found = torch.from_numpy(pairs), torch.from_numpy(cosines), cosine, threshold is None, min(known, default=None)
    suspects = _find_suspects(space, labels, numbers) if len({*labels}) > 1 else (numbers[:0], [])
    ids = range(count) if space._ids is None else space._ids
    return Duplicates(clusters, *found, conflicts, *suspects, shared, ids)


def _fit_best_matches(space: Any) -> list[tuple[float, float, float]]:
    """Fit the largest cosines s of rows with rows of other groups; return a fit per window, as far as there is one.

    The model is that -log(1 - s) is exponential above a start, which holds for nearest neighbors where vectors have a
    density: the number of pairs up to a distance is a power of that. Its rate follows from the two quantiles of a
    window, whatever duplicates there are above it. The best matches of unrelated rows are mutual, so there are half as
    many pairs as rows. A fit is the start, the rate, and the number of pairs above the start.
    """
    if len(space) < LEAST_ROWS:
        return []
    rows = torch.randperm(len(space), generator=torch.Generator().manual_seed(0))[:SAMPLE]
    found = space.neighbor_search.search_others(space.vectors[rows], 1, space._groups, space._groups[rows])[0][:, 0]
    values, fits = -found.clamp_min(ROUNDING).log().sort().values.numpy(), []
    for lower, upper in WINDOWS:
        end, start = (float(values[round(fraction * len(rows)) - 1]) for fraction in (lower, upper))
        if np.isfinite(start) and end > start:
            fits.append((start, float(np.log(upper / lower)) / (end - start), upper * len(space) / 2))
    return fits


def _similar_pairs(space: Any, threshold: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of rows (P, 2) whose cosine is at least the threshold, of equal rows only those that connect them.

    An approximate search finds the nearest rows of each. Only rows that have more duplicates than that can have missed
    some, and all pairs of these are compared.
    """
    search = space.neighbor_search
    points, rows = project_to_sphere(space.vectors.float()), search._first
    repeated = torch.ones(len(points), dtype=torch.bool).index_fill_(0, search._starts[:-1], False).nonzero()[:, 0]
    yield torch.stack([search._order[repeated - 1], search._order[repeated]], 1), torch.ones(len(repeated))
    if search.kind in APPROXIMATE:
        full = []
        for block in rows.split(BLOCK):
            distances, found = search.search(space.vectors[block], min(NEIGHBORS, len(points)))
            at = (1 - distances >= threshold) & (found >= 0) & (found != block[:, None])
            yield torch.stack([block[at.nonzero()[:, 0]], found[at]], 1), 1 - distances[at]
            full.append(block[1 - distances[:, -1] >= threshold])
        rows = torch.cat(full)
    # Where products of bfloat16 are several times faster, they show which rows can have a pair in another block.
    coarse = points.bfloat16()[rows] if torch.cpu._is_avx512_bf16_supported() else None
    for start in range(0, len(rows), BLOCK):
        for end in range(start, len(rows), BLOCK):
            left, right = rows[start : start + BLOCK], rows[end : end + BLOCK]
            if coarse is not None:
                largest = (coarse[start : start + BLOCK] @ coarse[end : end + BLOCK].T).amax(1)
                left = left[largest >= threshold - COARSE]
            cosines = points[left] @ points[right].T
            if len(left) and cosines.amax() >= threshold:
                at = (cosines >= threshold) & (left[:, None] != right)
                row, column = at.nonzero().T
                yield torch.stack([left[row], right[column]], 1), cosines[at]


def _connect(found: Iterator[tuple[Tensor, Tensor]], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the most similar pairs that connect whatever is connected (a maximum spanning forest), and cosines."""
    pairs, cosines, pending = np.empty((0, 2), np.int64), np.empty(0), list[tuple[Tensor, Tensor]]()
    for block in itertools.chain(found, [None]):
        pending += [] if block is None else [block]
        if block is None or sum(len(rows) for rows, _ in pending) > PENDING:
            both = np.concatenate([pairs, *(rows.sort(dim=1).values.numpy() for rows, _ in pending)])
            _, first = np.unique(both[:, 0] * count + both[:, 1], return_index=True)
            weights = 2 - np.concatenate([cosines, *(values.clamp_max(1).double() for _, values in pending)])[first]
            forest = minimum_spanning_tree(coo_matrix((weights, both[first].T), (count, count)).tocsr()).tocoo()
            pairs, cosines = np.stack([forest.row, forest.col], 1).astype(np.int64), 2 - forest.data
            pending = []
    return pairs, cosines


def _find_suspects(space: Any, labels: list[Any], clusters: Tensor) -> tuple[Tensor, list[Any]]:
    """Return the rows whose neighbors in other clusters mostly have another label, and that label."""
    names = list(dict.fromkeys(labels))
    numbers = {name: number for number, name in enumerate(names)}
    own, leads, others = torch.tensor([numbers[name] for name in labels]), [], []
    for block in torch.arange(len(own)).split(BLOCK):
        found = space.neighbor_search.search(space.vectors[block], min(2 * NEIGHBORS, len(own)))[1]
        is_voter = (found >= 0) & (clusters[found] != clusters[block, None])
        is_voter &= is_voter.cumsum(1) <= NEIGHBORS
        voted = own[found.clamp_min(0)].where(is_voter, -1)  # a column per label would be large if there are many
        is_other = is_voter & (voted != own[block, None])
        best, at = (voted[:, :, None] == voted[:, None]).sum(2).where(is_other, 0).max(1)
        leads.append((best - (voted == own[block, None]).sum(1)) / NEIGHBORS)
        others.append(voted.gather(1, at[:, None])[:, 0])
    lead, order = torch.cat(leads).sort(descending=True, stable=True)
    rows = order[lead > LEAD - 1e-6]
    return rows, [names[number] for number in torch.cat(others)[rows].tolist()]
