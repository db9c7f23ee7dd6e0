"""Whether vectors differ from those of a space: a two-sample test, what has moved, and which rows are outside."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.metrics.geometry import effective_dimension
from hf_sphere.metrics.two_sample import energy_test
from hf_sphere.search.matching import Best, independent_rows
from hf_sphere.search.rows import GroupedVectors

if TYPE_CHECKING:
    from hf_sphere.search.space import EmbeddingSpace

LARGEST_SAMPLE, BLOCKS = 500, 20
"""Number of groups of each side that are compared, and of parts that the jackknife leaves out in turn."""

Interval = tuple[float, float, float]
"""Estimate, and lower and upper end of its 95 % interval."""


@dataclass(frozen=True)
class Comparison:
    """How other vectors differ from those of a space; as text, what that means.

    Test and intervals are for groups that are drawn independently. The intervals are by a jackknife, which also removes
    the part of an estimate that is due to the size of the sample.

    Attributes:
        p_value: p-value of `energy_test`: small if the vectors are not of one distribution.
        distance: The energy distance of the samples.
        sizes: Number of rows in the sample of the space and of the others, one per group.
        angle: Angle between the mean directions, degrees; up to 180 if a mean may be zero, which has no direction.
        dimensions: Effective dimension of the space, of the others, and the change.
        outside_p_values: (M,) float64, of each of the other rows: small if its best match in the space is less similar
            than those of the space's own rows in other groups.
        outside: Other rows that are outside, int64, at the false discovery rate `level` (Benjamini and Hochberg).
        smallest_p_value: The smallest possible one of a row.
        level: Level of the test and of the rows that are outside.
    """

    p_value: float
    distance: float
    sizes: tuple[int, int]
    angle: Interval
    dimensions: tuple[Interval, Interval, Interval]
    outside_p_values: Tensor
    outside: Tensor
    smallest_p_value: float
    level: float

    def __str__(self) -> str:
        first, second = self.sizes
        rows = f"{first:,} rows of each" if first == second else f"{first:,} and {second:,} rows"
        verdict = "the vectors differ, judged by" if self.p_value <= self.level else "no difference found among"
        (before, *_), (after, *_), (_, *change) = self.dimensions
        count = len(self.outside_p_values)
        text = (
            f"{verdict} {rows}, one per group (p-value {self.p_value:.3g}). The mean direction moved by "
            f"{self.angle[0]:.1f} degrees ({self.angle[1]:.1f} to {self.angle[2]:.1f}), and the effective dimension "
            f"from {before:.1f} to {after:.1f} (a change of {change[0]:.1f} to {change[1]:.1f}). "
            f"{len(self.outside):,} of {count:,} rows are outside, up to {100 * self.level:.3g} % of them falsely"
        )
        least = int(np.ceil(count * self.smallest_p_value / self.level * (1 - 1e-12)))
        return text + (f"; the space has too few groups to find fewer than {least:,}." if least > 1 else ".")


def compare(space: "EmbeddingSpace", other: Any, level: float, seed: int) -> Comparison:
    """Compare other vectors, or those of another space, with those of a space; see `EmbeddingSpace.compare`."""
    from scipy.stats import false_discovery_control  # slow to import

    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1; got {level}.")
    vectors = space._check("other", other.vectors if isinstance(other, GroupedVectors) else other)
    groups = other._groups if isinstance(other, GroupedVectors) else torch.arange(len(vectors))
    for name, numbers in (("the space", space._groups), ("other", groups)):
        if len(numbers.unique()) < 2:
            raise ValueError(f"{name} has one group; a comparison needs two of each, and hundreds to find much.")
    sides = (space.vectors, space._groups), (vectors, groups)
    samples = draw_samples(sides, is_cosine=space.metric["distance"] == "cosine", seed=seed)
    distance, p_value = energy_test(*samples, seed=seed)
    angle, dimensions = _differences(samples)
    known = space.calibration
    if known.is_separate or space.score != "cosine":  # best matches among other groups, by cosines
        cosines = type(space)(space.vectors, metric=space.metric)
        cosines._groups, cosines._search = space._groups, space._search
        cosines.calibrate(score="cosine")
        space, known = cosines, cosines.calibration
    # Exact, as the calibration is. The rows are searched in one group more, so that their p-values are at most larger.
    best, ids = space._best(vectors, torch.full((len(vectors),), -1))
    below = replace(known, scores=-known.scores, ids=torch.full_like(known.ids, -1))
    p_values = below.p_values(-best[:, None], Best(ids, ids, best))[:, 0]
    adjusted = torch.from_numpy(false_discovery_control(p_values))
    outside, smallest = (adjusted <= level * (1 + 1e-12)).nonzero()[:, 0], below.smallest_p_value
    sizes = len(samples[0]), len(samples[1])
    return Comparison(p_value, distance, sizes, angle, dimensions, p_values, outside, smallest, level)


def draw_samples(sides: Sequence[tuple[Tensor, Tensor]], *, is_cosine: bool, seed: int) -> list[Tensor]:
    """Draw a row per group of vectors (n, d) with groups (n,), up to 500; directions if cosines are compared."""
    rows = [independent_rows(groups, LARGEST_SAMPLE, 2 * seed + side) for side, (_, groups) in enumerate(sides)]
    samples = [vectors[chosen] for chosen, (vectors, _) in zip(rows, sides, strict=True)]
    return [project_to_sphere(points) for points in samples] if is_cosine else samples


def _differences(samples: Sequence[Tensor]) -> tuple[Interval, tuple[Interval, Interval, Interval]]:
    """Return the angle between the mean directions, and both effective dimensions and their difference."""
    from scipy.stats import t

    blocks, dim = min(BLOCKS, *map(len, samples)), samples[0].shape[1]
    values = []
    for left_out in range(-1, blocks):  # -1 for none
        x, y = (points[torch.arange(len(points)) % blocks != left_out] for points in samples)
        means = torch.stack([project_to_sphere(points.double()).mean(0) for points in (x, y)])
        # The bias of squared lengths and of an inverse dimension is inversely proportional to the number of rows.
        squares = torch.stack([*project_to_sphere(means).diff(dim=0), *means]).square().sum(1).tolist()
        values.append([*squares, *(1 / max(1.0, effective_dimension(points)) for points in (x, y))])
    parts = np.array(values[1:])
    estimates = blocks * np.array(values[0]) - (blocks - 1) * parts.mean(0)
    halves = t.ppf(0.975, blocks - 1) * np.sqrt(blocks - 1) * parts.std(0)
    # A mean that may be zero has no direction.
    half = halves[0] if (estimates > halves)[1:3].all() else 4
    chords = np.clip(estimates[0] + half * np.arange(-1, 2), 0, 4)
    sizes = 1 / np.clip(estimates[3:], 1 / dim, 1)
    ranges = halves[3:] * sizes**2
    changes = [*zip(sizes, ranges, strict=True), (sizes[1] - sizes[0], np.hypot(*ranges))]
    dimensions = [(float(size), float(size - half), float(size + half)) for size, half in changes]
    low, middle, high = np.degrees(2 * np.arcsin(np.sqrt(chords) / 2)).tolist()
    return (middle, low, high), (dimensions[0], dimensions[1], dimensions[2])
