"""Whether vectors are of the model of a space, how they differ from it, and maps of a space to another model."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.checks import check_rows, shorten
from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.metrics.geometry import BLOCKS, effective_dimension_interval, energy_test
from hf_sphere.search.calibration import Calibration, mean_interval
from hf_sphere.search.matching import FEWEST
from hf_sphere.search.neighbor_search import NeighborSearch
from hf_sphere.search.rows import GroupedVectors
from hf_sphere.search.vectors import independent_rows, repeated_rows, unit_vectors
from hf_sphere.utils.checks import check_integer, check_number, check_seed
from hf_sphere.utils.pages import DataFrame, Table

logger = logging.getLogger(__name__)

LARGEST_SAMPLE = 500
"""Number of groups of each side that are compared."""

ROWS, CLUSTERS = 600, 8
"""Most rows that show the axes of a space, and its clusters; half are left out."""

RELATED, RECOGNIZED = 3.0, 6.0
"""Standard deviations above the mean of random rotations from which on vectors are of the model of a space, and those
that half of its own clusters must have: between the two of vectors on other topics, and of foreign ones."""

NEIGHBORS, FOLDS, FEWEST_ANCHORS = 10, 5, 100
"""Neighbors whose recall is measured, folds of the anchors, and fewest anchors."""

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Regularization of the maps, as multiples of the mean square of the old vectors along an axis."""

Interval = tuple[float, float, float]
"""Estimate, and lower and upper end of its 95 % interval."""


class ModelCheck(NamedTuple):
    """Whether vectors look like those of another model than that of a space; `str` returns it in words."""

    p_value: float  # that randomly rotated vectors have as much in common with the space; 1 if that is not known
    is_foreign: bool
    text: str

    def __str__(self) -> str:
        return self.text


class Axes(NamedTuple):
    """The principal axes of the rows of a space, and their mean squares."""

    directions: Tensor  # (r, d) float64
    squares: Tensor  # (r,)
    num_rows: int = 0  # of the space
    own: float = 0.0  # relation of the median cluster of rows to the others

    @classmethod
    def of(cls, points: Tensor) -> "Axes":
        """Return the axes of unit vectors (n, d), by the smaller one of their two matrices of inner products."""
        count, dim = points.shape
        squares, vectors = torch.linalg.eigh(points @ points.T if count < dim else points.T @ points)
        kept = squares > 1e-9 * squares[-1]
        vectors = vectors.T[kept]
        return cls(project_to_sphere(vectors @ points) if count < dim else vectors, squares[kept] / count)

    def relation(self, points: Tensor) -> float:
        r"""Return what unit vectors (n, d) have in common with the axes, in standard deviations of random rotations.

        Let $S$ be the second moments of the vectors, $M$ those of the rows, and $W = -(M + I / d)^{-1}$, which is small
        where rows have little variance. For an $S$ in a uniformly random orientation, $\mathrm{tr}(W S)$ has the mean
        $\mathrm{tr}(W) / d$ and the variance $2 |W_0|^2 |S_0|^2 / ((d - 1) (d + 2))$, where $W_0$ and $S_0$ have the
        trace zero (Schur's lemma): exactly, and whatever topics the vectors repeat.
        """
        count, dim = points.shape
        weights, rest = -1 / (self.squares + 1 / dim), -float(dim)
        mean = (float(weights.sum()) + (dim - len(weights)) * rest) / dim
        size = float((weights - mean).square().sum()) + (dim - len(weights)) * (rest - mean) ** 2
        product = rest + float(((points @ self.directions.T).square() @ (weights - rest)).mean())
        spread = float((points @ points.T).square().sum()) / count**2 - 1 / dim
        return (product - mean) * ((dim - 1) * (dim + 2) / (2 * size * spread + 1e-300)) ** 0.5


def axes_of(space: Any) -> Axes:
    """Return the axes of a space, computed again if it has become twice or half as large.

    Their relation to itself is that of clusters to the other rows, as of new topics of the same model.
    """
    if space._axes is not None and space._axes.num_rows / 2 <= len(space) <= space._axes.num_rows * 2:
        return space._axes
    rows = space._sample()
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:ROWS]]
    points = project_to_sphere(space.vectors[rows].double())
    centers, found = points[:CLUSTERS], list[float]()
    for _ in range(5):
        labels = (points @ centers.T).argmax(1)
        centers = project_to_sphere(torch.zeros_like(centers).index_add(0, labels, points) + 1e-9 * centers)
    for label in range(len(centers) // 2):  # which takes time in many dimensions
        inside = labels == label
        if 1 < int(inside.sum()) < len(points) - 1:
            found.append(Axes.of(points[~inside]).relation(points[inside][:FEWEST]))
    own = float(torch.tensor(found).median()) if found else 0.0
    space._axes = Axes.of(points)._replace(num_rows=len(space), own=own)
    return space._axes


@dataclass(frozen=True, repr=False)
class Comparison(Table):
    """How other vectors differ from those of a space; `str` returns it in words, whether of another model first.

    Test and intervals are for groups that are drawn independently. The estimates do not depend on the number of rows.

    Attributes:
        p_value: p-value of `energy_test`: small if the vectors are not of one distribution.
        sizes: Number of rows in the sample of the space and of the others, one per group.
        angle: Angle between the mean directions, degrees; up to 180 if a mean may be zero, which has no direction.
        dimensions: Effective dimension of the space and of the others.
        outside_p_values: (M,) float64, of each of the other rows: small if its nearest row in the space is farther than
            those of the space's own rows in other groups.
        outside: Other rows that are outside, int64, at a false discovery rate (Benjamini and Hochberg).
        outside_ids: Their ids, if the others are an `EmbeddingSpace`.
        is_foreign: Whether they are of another model, see `EmbeddingSpace.check_model`.
        text: What that means.
    """

    p_value: float
    sizes: tuple[int, int]
    angle: Interval
    dimensions: tuple[Interval, Interval]
    outside_p_values: Tensor
    outside: Tensor
    outside_ids: list[Any]
    is_foreign: bool
    text: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Comparison({self.text})"

    def to_pandas(self) -> DataFrame:
        """Return a row per other row: row, p_value and outside; those least like the space first."""
        import pandas as pd

        is_outside = torch.zeros(len(self.outside_p_values), dtype=torch.bool).index_fill_(0, self.outside, True)
        columns = {"p_value": self.outside_p_values.tolist(), "outside": is_outside.tolist()}
        frame = pd.DataFrame({"row": range(len(is_outside)), **columns})
        return frame.sort_values("p_value", kind="stable", ignore_index=True)


def draw_samples(space: Any, sides: list[tuple[Tensor, Tensor]], seed: int) -> list[Tensor]:
    """Draw a row per group of vectors (n, d) with groups (n,), up to 500; directions if cosines are compared."""
    rows = [independent_rows(groups, LARGEST_SAMPLE, 2 * seed + side) for side, (_, groups) in enumerate(sides)]
    samples = [vectors[chosen] for chosen, (vectors, _) in zip(rows, sides, strict=True)]
    return [project_to_sphere(points) for points in samples] if space.metric["distance"] == "cosine" else samples


def _angle(samples: list[Tensor]) -> Interval:
    """Return the angle between the mean directions, by a jackknife that leaves out blocks of rows in turn."""
    from scipy.stats import t

    means = []
    for points in samples:
        points, blocks = project_to_sphere(points.double()), torch.arange(len(points)) % BLOCKS
        means.append(torch.stack([points[blocks != block].mean(0) for block in range(-1, BLOCKS)]))  # first of all rows
    # The bias of squared lengths is inversely proportional to the number of rows.
    squares = torch.stack([project_to_sphere(means[0]) - project_to_sphere(means[1]), *means]).square().sum(2)
    estimates = BLOCKS * squares[:, 0] - (BLOCKS - 1) * squares[:, 1:].mean(1)
    halves = t.ppf(0.975, BLOCKS - 1) * (BLOCKS - 1) ** 0.5 * squares[:, 1:].std(1, correction=0)
    half = halves[0] if (estimates > halves)[1:].all() else 4.0  # a mean that may be zero has no direction
    chords = (estimates[0].clamp_min(0) + half * torch.tensor([0.0, -1.0, 1.0])).clamp(0, 4)
    angle, low, high = torch.rad2deg(2 * torch.asin(chords.sqrt() / 2)).tolist()
    return angle, low, high


def _interval(values: Interval) -> str:
    return "{:.1f} ({:.1f} to {:.1f})".format(*values)


class Migration(NamedTuple):
    """How the vectors of a space were mapped; `str` returns it in words."""

    kind: str
    recall: float  # recall@10 of held-out anchors, against embedding again
    low: float  # of its 95 % interval over anchors
    high: float
    num_anchors: int

    def __str__(self) -> str:
        recall, low, high = (100 * value for value in self[1:4])
        text = f"finds {recall:.1f} ({low:.1f} to {high:.1f}) % of what embedding again would"
        return f"the {self.kind} map {text}, by recall@10 among {self.num_anchors:,} anchors"


def _maps(old: Tensor, new: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the matrix (d, e) of each map, fitted to anchors (n, d) and (n, e)."""
    left, _, right = torch.linalg.svd(old.T @ new, full_matrices=False)
    yield "orthogonal", left @ right
    square, products = old.T @ old, old.T @ new
    for ridge in RIDGES:
        penalty = ridge * square.trace() / len(square)
        yield f"ridge {ridge:g}", torch.linalg.solve(square + penalty * torch.eye(len(square)).double(), products)


def _recalls(mapped: Tensor, new: Tensor) -> Tensor:
    """Return the recall@10 of each new anchor among the mapped others, (n,), against the new others."""
    rows = torch.arange(len(new))
    truth, found = (NeighborSearch(x, kind="torch").search_others(new, NEIGHBORS, rows, rows)[1] for x in (new, mapped))
    return (found[:, :, None] == truth[:, None]).any(1).double().mean(1)


class ComparedVectors(GroupedVectors):
    """The rows of an `EmbeddingSpace`, which are compared with other vectors and mapped to other models."""

    migration: Migration | None = None
    _axes: Axes | None = None

    def check_model(self, vectors: Any, model: str | None = None) -> ModelCheck:
        """Test whether vectors are of another model than those of the space; `print` shows the result as text.

        Of the same model, texts on other topics have axes in common with the space, and vectors of another model, or
        rotated ones, have not. Where directions are about uniform, nothing can be found. `add` and `search` do this.

        Args:
            vectors: (n, d): fewer than 64 are compared by the name only.
            model: Name of their model, if it is known.

        Raises:
            ValueError: If a vector is invalid.
        """
        return self._test_model(self._check("vectors", vectors), model)

    def _test_model(self, vectors: Tensor, model: str | None = None) -> ModelCheck:
        what, count = f"the {len(vectors):,} vectors", len(vectors)
        if model is not None and self.model is not None and model != self.model:
            hint = f"embed them with {self.model!r}, or see EmbeddingSpace.migrate"
            return ModelCheck(1.0, True, f"{what} are of the model {model!r}, and the space of {self.model!r}; {hint}.")
        has_enough = count >= FEWEST and self.metric["distance"] == "cosine" and vectors.shape[1] > 1
        if not has_enough or (axes := axes_of(self)).own < RECOGNIZED:
            text = f"{what} are not tested, which takes {FEWEST}, cosines, and a space of enough rows whose directions"
            return ModelCheck(1.0, False, f"{text} are not about uniform.")
        z = axes.relation(project_to_sphere(vectors[:: -(-count // ROWS)].double()))
        p_value = float(torch.special.erfc(torch.tensor(z / 2**0.5)) / 2)
        if z >= RELATED:
            return ModelCheck(p_value, False, f"{what} have axes in common with the space (p-value {p_value:.1g}).")
        text = f"{what} look like those of another model: they have no more in common with the space than random"
        hint = f"Embed them with its model{f' {self.model!r}' if self.model else ''}, or see EmbeddingSpace.migrate."
        return ModelCheck(p_value, True, f"{text} directions (p-value {p_value:.2g}). {hint}")

    def _refuse_foreign(self, vectors: Tensor, model: str | None = None) -> None:
        if (result := self._test_model(vectors, model)).is_foreign:
            raise ValueError(f"{result} If they are right, add them with check=False.")

    def _warn_of_foreign(self, queries: Tensor) -> None:
        if (result := self._test_model(queries)).is_foreign:
            logger.warning("%s", result)

    def compare(self, other: Any, *, level: float = 0.05, seed: int = 0) -> Comparison:
        """Test whether other vectors differ from the space; `print` shows the result as text.

        Args:
            other: (M, d) vectors, each its own group, or another `EmbeddingSpace` with its groups.
            level: Level of the test, and false discovery rate of the rows that are outside.
            seed: Seed of the samples, up to 500 rows of each, one per group, and of the test.

        Raises:
            ValueError: If an argument is invalid, or one side has fewer than 20 groups.
        """
        from scipy.stats import false_discovery_control  # slow to import

        seed, level, is_space = check_seed(seed), check_number("level", level, "(0, 1)"), isinstance(other, type(self))
        vectors = self._check("other", other.vectors if is_space else other)
        groups = other._groups if is_space else torch.arange(len(vectors))
        for name, numbers in (("the space", self._groups), ("other", groups)):
            check_integer(f"the number of groups of {name}", len(numbers.unique()), BLOCKS)
        samples = draw_samples(self, [(self.vectors, self._groups), (vectors, groups)], seed)
        p_value, first, second = energy_test(*samples, seed=seed)[1], *map(len, samples)
        angle = _angle(samples)
        before, after = (effective_dimension_interval(points.double(), torch.arange(len(points))) for points in samples)
        rows, search = self._sample(), self.neighbor_search  # not approximate, which would find rows outside
        own = search.search_others(self.vectors[rows], 1, self._groups, self._groups[rows])[0][:, 0]
        nearest = search.search_others(vectors, 1, self._groups, torch.full((len(vectors),), -1))[0]
        # Searched in one group more, so that p-values are at most larger.
        unknown = torch.full_like(rows, -1)
        known = Calibration(self._groups[rows], unknown, own[:, None], unknown[:, None], unknown[:, None], 0, "strict")
        p_values = known.p_values(nearest)[:, 0]
        outside = (torch.from_numpy(false_discovery_control(p_values)) <= level * (1 + 1e-12)).nonzero()[:, 0]
        verdict = "the vectors differ, judged by" if p_value <= level else "no difference found among"
        rows_of = f"{first:,} rows of each" if first == second else f"{first:,} and {second:,} rows"
        moved = f"moved by {_interval(angle)} degrees" if angle[1:] != (0, 180) else "is unclear"
        text = (
            f"{verdict} {rows_of}, one per group (p-value {p_value:.3g}). The mean direction {moved}, and the "
            f"effective dimension changed from {_interval(before)} to {_interval(after)}. "
        )
        if len(outside):
            text += f"{len(outside):,} of {len(vectors):,} rows are outside, up to {100 * level:.3g} % of them falsely"
        else:
            text += f"None of {len(vectors):,} rows is outside"
        least = int(np.ceil(len(vectors) * known.smallest_p_value / level * (1 - 1e-12)))
        fewer = f"fewer than {least:,}" if least <= len(vectors) else "any"
        text += f"; the space has too few groups to find {fewer}." if least > 1 else "."
        if self._names is not None and (not is_space or other._names is None):
            text += " The others have no groups, so each row counts as one."
        check = self._test_model(vectors, other.model if is_space else None)
        text = f"{check} So {text}" if check.is_foreign else text
        ids = other._ids_of(outside[None])[0] if is_space else []
        found = p_values, outside, ids, check.is_foreign, text
        return Comparison(p_value, (first, second), angle, (before, after), *found)

    def migrate(
        self, old: Any, new: Any, *, max_recall_loss: float | None = None, model: str | None = None, seed: int = 0
    ) -> Self:
        """Return a space whose rows are mapped to another model, for queries by that one; it is calibrated again.

        An orthogonal map and ridge regressions are fitted to anchors, texts that both models embedded, and the one with
        the best recall@10 of held-out anchors is used. The attribute `migration` has that, with its interval.

        Args:
            old: (n, d) vectors of the anchors by the model of the space, at least as many as dimensions.
            new: (n, e) vectors of the same anchors by the new model, in the same order.
            max_recall_loss: Largest loss that is accepted, by the 95 % interval: 0.1 for a recall of 0.9.
            model: Name of the new model.
            seed: Seed of the folds of the anchors.

        Raises:
            ValueError: If the loss may be larger, or the anchors do not fit each other or the space.
        """
        if max_recall_loss is not None:
            check_number("max_recall_loss", max_recall_loss, "[0, 1)")
        if self.metric["distance"] != "cosine" or self._queries is not None:
            raise ValueError("only cosines that rows calibrate are migrated; calibrate the space without queries first")
        old, new = self._check("old", old), unit_vectors("new", new)
        count, dim = old.shape
        check_integer("the number of anchors, one per dimension at least,", count, max(FEWEST_ANCHORS, dim))
        for name, anchors in (("old", old), ("new", new)):
            if repeated := repeated_rows(anchors):
                raise ValueError(f"anchors must differ; of {name}, {len(repeated):,} repeat: rows {shorten(repeated)}.")
        if (check := self._test_model(old)).is_foreign:
            raise ValueError(f"old are no vectors of the space: {check}")
        kinds: dict[str, Tensor] = {}
        fold = torch.randperm(count, generator=torch.Generator().manual_seed(check_seed(seed))) % FOLDS
        for number in range(FOLDS):
            for kind, weights in _maps(old[fold != number].double(), new[fold != number].double()):
                mapped = kinds.setdefault(kind, torch.empty(new.shape))
                mapped[fold == number] = F.normalize(old[fold == number].double() @ weights).float()
        recalls = {kind: _recalls(mapped, new) for kind, mapped in kinds.items()}
        best = max(recalls, key=lambda kind: float(recalls[kind].mean()))
        low, mean, high = mean_interval(recalls[best])
        migration = Migration(best, mean, low, high, count)
        if migration.high < 3 * NEIGHBORS / count:
            raise ValueError(f"{migration}, no more than by chance. Are old and new of the same anchors, in one order?")
        if max_recall_loss is not None and 1 - migration.low > max_recall_loss:
            raise ValueError(f"{migration}, so the loss may exceed max_recall_loss={max_recall_loss}. Embed again.")
        weights = dict(_maps(old.double(), new.double()))[best]
        vectors = torch.cat([F.normalize(block.double() @ weights).float() for block in self.vectors.split(1 << 15)])
        check_rows(vectors.any(1), "a mapped vector has no direction", "are zero", self.ids)
        options: Any = {"numbers": self._numbers, "ids": self._ids, "kind": self.kind} | self._options
        moved = type(self)(vectors, self.groups, **options)
        moved._next, moved.model, moved.migration = self._next, model, migration
        if self.is_calibrated:
            moved.calibrate(score=self.score, rule=self.rule)
        return moved
