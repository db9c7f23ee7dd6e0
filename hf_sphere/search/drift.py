"""Whether vectors differ from those of a space: a two-sample test, what has moved, and which rows are outside."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.metrics.two_sample import energy_test
from hf_sphere.metrics.uniformity_test import BLOCKS, effective_dimension_interval
from hf_sphere.search.calibration import Calibration
from hf_sphere.search.foreign import check_model
from hf_sphere.search.rows import GroupedVectors
from hf_sphere.search.sampling import independent_rows
from hf_sphere.utils.checks import check_seed
from hf_sphere.utils.pages import Table

if TYPE_CHECKING:
    from pandas import DataFrame

LARGEST_SAMPLE = 500
"""Number of groups of each side that are compared."""

Side = tuple[Tensor, Tensor]
"""Vectors (n, d) and the numbers of their groups (n,)."""

Interval = tuple[float, float, float]
"""Estimate, and lower and upper end of its 95 % interval."""


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
        text: What that means.
    """

    p_value: float
    sizes: tuple[int, int]
    angle: Interval
    dimensions: tuple[Interval, Interval]
    outside_p_values: Tensor
    outside: Tensor
    outside_ids: list[Any]
    is_foreign: bool  # of another model, see `EmbeddingSpace.check_model`
    text: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Comparison({self.text})"

    def to_pandas(self) -> "DataFrame":
        """Return a row per other row: row, p_value and outside; those least like the space first."""
        import pandas as pd

        is_outside = torch.zeros(len(self.outside_p_values), dtype=torch.bool).index_fill_(0, self.outside, True)
        columns = {"p_value": self.outside_p_values.tolist(), "outside": is_outside.tolist()}
        frame = pd.DataFrame({"row": range(len(is_outside)), **columns})
        return frame.sort_values("p_value", kind="stable", ignore_index=True)


def compare(space: GroupedVectors, other: Any, level: float, seed: int) -> Comparison:
    """Compare other vectors, or those of another space, with those of a space; see `EmbeddingSpace.compare`."""
    from scipy.stats import false_discovery_control  # slow to import

    seed = check_seed(seed)
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1; got {level}.")
    vectors = space._check("other", other.vectors if isinstance(other, GroupedVectors) else other)
    groups = other._groups if isinstance(other, GroupedVectors) else torch.arange(len(vectors))
    for name, numbers in (("the space", space._groups), ("other", groups)):
        if (count := len(numbers.unique())) < BLOCKS:
            raise ValueError(f"a comparison needs at least {BLOCKS} groups of each; {name} has {count}.")
    sides = (space.vectors, space._groups), (vectors, groups)
    samples = _draw_samples(space, sides, seed)
    p_value, (first, second) = energy_test(*samples, seed=seed)[1], map(len, samples)
    angle = _angle(samples)
    before, after = (effective_dimension_interval(points.double(), torch.arange(len(points))) for points in samples)
    rows, search = space._sample(), space.neighbor_search  # not approximate, which would find rows outside
    own = search.search_others(space.vectors[rows], 1, space._groups, space._groups[rows])[0][:, 0]
    nearest = search.search_others(vectors, 1, space._groups, torch.full((len(vectors),), -1))[0]
    # Searched in one group more, so that p-values are at most larger.
    unknown = torch.full_like(rows, -1)
    known = Calibration(space._groups[rows], unknown, own[:, None], unknown[:, None], unknown[:, None], 0, "strict")
    p_values = known.p_values(nearest, None)[:, 0]
    outside = (torch.from_numpy(false_discovery_control(p_values)) <= level * (1 + 1e-12)).nonzero()[:, 0]
    least = int(np.ceil(len(vectors) * known.smallest_p_value / level * (1 - 1e-12)))
    verdict = "the vectors differ, judged by" if p_value <= level else "no difference found among"
    rows_of = f"{first:,} rows of each" if first == second else f"{first:,} and {second:,} rows"
    moved = f"moved by {_interval(angle)} degrees" if angle[1:] != (0, 180) else "is unclear"
    those = f"{len(outside):,} of {len(vectors):,} rows are outside, up to {100 * level:.3g} % of them falsely"
    text = (
        f"{verdict} {rows_of}, one per group (p-value {p_value:.3g}). The mean direction {moved}, and the effective "
        f"dimension changed from {_interval(before)} to {_interval(after)}. "
        f"{those if len(outside) else f'None of {len(vectors):,} rows is outside'}"
    )
    fewer = f"fewer than {least:,}" if least <= len(vectors) else "any"
    text += f"; the space has too few groups to find {fewer}." if least > 1 else "."
    if space._names is not None and getattr(other, "_names", None) is None:
        text += " The others have no groups, so each row counts as one."
    check = check_model(space, vectors, getattr(other, "model", None))
    text = f"{check} So {text}" if check.is_foreign else text
    ids = other._ids_of(outside[None])[0] if isinstance(other, GroupedVectors) else []
    return Comparison(p_value, (first, second), angle, (before, after), p_values, outside, ids, check.is_foreign, text)


def _draw_samples(space: GroupedVectors, sides: Sequence[Side], seed: int) -> list[Tensor]:
    """Draw a row per group of vectors (n, d) with groups (n,), up to 500; directions if cosines are compared."""
    rows = [independent_rows(groups, LARGEST_SAMPLE, 2 * seed + side) for side, (_, groups) in enumerate(sides)]
    samples = [vectors[chosen] for chosen, (vectors, _) in zip(rows, sides, strict=True)]
    return [project_to_sphere(points) for points in samples] if space.metric["distance"] == "cosine" else samples


def _angle(samples: Sequence[Tensor]) -> Interval:
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
