"""Whether vectors differ from those of a space: a two-sample test, what has moved, and which rows are outside."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.metrics.geometry import effective_dimension
from hf_sphere.metrics.two_sample import energy_test
from hf_sphere.search.matching import Calibration, independent_rows
from hf_sphere.search.rows import GroupedVectors

if TYPE_CHECKING:
    from hf_sphere.search.space import EmbeddingSpace

LARGEST_SAMPLE, BLOCKS = 500, 20
"""Number of groups of each side that are compared, and of parts that the jackknife leaves out in turn."""

Interval = tuple[float, float, float]
"""Estimate, and lower and upper end of its 95 % interval."""


@dataclass(frozen=True)
class Comparison:
    """How other vectors differ from those of a space; `str` returns it in words.

    Test and intervals are for groups that are drawn independently. Estimates are freed of the part that is due to the
    size of the sample, by a jackknife.

    Attributes:
        p_value: p-value of `energy_test`: small if the vectors are not of one distribution.
        sizes: Number of rows in the sample of the space and of the others, one per group.
        angle: Angle between the mean directions, degrees; up to 180 if a mean may be zero, which has no direction.
        dimensions: Effective dimension of the space, of the others, and the change.
        outside_p_values: (M,) float64, of each of the other rows: small if its nearest row in the space is farther than
            those of the space's own rows in other groups.
        outside: Other rows that are outside, int64, at a false discovery rate (Benjamini and Hochberg).
        text: What that means.
    """

    p_value: float
    sizes: tuple[int, int]
    angle: Interval
    dimensions: tuple[Interval, Interval, Interval]
    outside_p_values: Tensor
    outside: Tensor
    text: str

    def __str__(self) -> str:
        return self.text


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
    p_value, (first, second) = energy_test(*samples, seed=seed)[1], map(len, samples)
    angle, dimensions = _differences(samples)
    rows, search = space._sample(), space.neighbor_search  # not approximate, which would find rows outside
    own = search.search_others(space.vectors[rows], 1, space._groups, space._groups[rows])[0][:, 0]
    nearest = search.search_others(vectors, 1, space._groups, torch.full((len(vectors),), -1))[0]
    # Searched in one group more, so that p-values are at most larger.
    unknown = torch.full_like(rows, -1)
    known = Calibration(space._groups[rows], own, unknown, unknown, next_id=0)
    p_values = known.p_values(nearest, None)[:, 0]
    outside = (torch.from_numpy(false_discovery_control(p_values)) <= level * (1 + 1e-12)).nonzero()[:, 0]
    least = int(np.ceil(len(vectors) * known.smallest_p_value / level * (1 - 1e-12)))
    text = (
        f"{'the vectors differ, judged by' if p_value <= level else 'no difference found among'} "
        f"{f'{first:,} rows of each' if first == second else f'{first:,} and {second:,} rows'}, one per group "
        f"(p-value {p_value:.3g}). The mean direction moved by {angle[0]:.1f} degrees ({angle[1]:.1f} to "
        f"{angle[2]:.1f}), and the effective dimension from {dimensions[0][0]:.1f} to {dimensions[1][0]:.1f} (a change "
        f"of {dimensions[2][1]:.1f} to {dimensions[2][2]:.1f}). {len(outside):,} of {len(vectors):,} rows are outside, "
        f"up to {100 * level:.3g} % of them falsely"
        f"{f'; the space has too few groups to find fewer than {least:,}' if least > 1 else ''}."
    )
    return Comparison(p_value, (first, second), angle, dimensions, p_values, outside, text)


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
