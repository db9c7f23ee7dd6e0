"""Angles between embeddings of one class and of two."""

import torch
from torch import Tensor

from hf_sphere.metrics.checks import check_classes, check_directions

MAX_PAIRS = 500_000
"""Pairs that are measured unless said otherwise: all of 1000 points."""

_NUMBERS_AT_A_TIME = 2**22


def class_angles(points: Tensor, labels: Tensor, *, max_pairs: int = MAX_PAIRS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Measure the angles between points of one class, and between points of two.

    Of all pairs, if they are at most `max_pairs`. Else as many of each kind are drawn, with replacement, each pair as
    likely as every other of its kind, by a generator of its own.

    Args:
        points: (N, d), of any norms but zero. A tensor, an array or lists.
        labels: (N,), class of each point; any integers.
        max_pairs: How many pairs to measure, of each kind, where there are more in all.
        seed: Of the pairs that are drawn.

    Returns:
        Angles in degrees, from 0 to 180, float64 on the CPU: of the pairs within classes and of those between.

    Raises:
        TypeError: If the points are complex or the labels are not integers.
        ValueError: If a shape is wrong, a point is zero or not finite, there is one class only, no class has two
            members or `max_pairs` is not positive.
    """
    if max_pairs < 1:
        raise ValueError(f"max_pairs must be at least 1; got {max_pairs}.")
    unit = check_directions(points)
    classes = check_classes(labels, len(unit))
    sizes = torch.bincount(classes)
    if len(sizes) < 2:
        raise ValueError("angles between classes need points of two classes at least; got one class.")
    if sizes.max() < 2:
        raise ValueError(f"none of the {len(sizes)} classes has two members, so there is no angle within a class.")
    if len(unit) * (len(unit) - 1) // 2 <= max_pairs:
        first, second = torch.triu_indices(len(unit), len(unit), 1)
        same = classes[first] == classes[second]
        return _angles(unit, first[same], second[same]), _angles(unit, first[~same], second[~same])
    order = classes.argsort(stable=True)
    start = (sizes.cumsum(0) - sizes)[classes[order]]
    within, between = _draw_pairs(start, sizes[classes[order]], max_pairs, seed)
    return _angles(unit[order], *within), _angles(unit[order], *between)


def _draw_pairs(
    start: Tensor, size: Tensor, count: int, seed: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Draw pairs of points that are sorted by class, (count,) indices each: of one class, and of two.

    Args:
        start: (N,), where the class of each point begins.
        size: (N,), number of its members.
        count: Pairs of each kind.
        seed: Of the generator.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(others: Tensor) -> tuple[Tensor, Tensor]:
        """First points, each as often as it has partners, and the numbers of their partners."""
        ends = others.cumsum(0)
        first = torch.searchsorted(ends, torch.randint(int(ends[-1]), (count,), generator=generator), right=True)
        number = (torch.rand(count, dtype=torch.float64, generator=generator) * others[first]).long()
        return first, number

    first, number = draw(size - 1)
    second = start[first] + number
    within = first, second + (second >= first)  # all of the class but the point itself
    first, number = draw(len(size) - size)
    between = first, number + size[first] * (number >= start[first])  # all that are not of its class
    return within, between


def _angles(unit: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Angles in degrees between unit vectors (N, d) of the indices (P,) and (P,)."""
    parts = []
    step = max(1, _NUMBERS_AT_A_TIME // unit.shape[1])
    for rows, columns in zip(first.split(step), second.split(step), strict=True):
        x, y = unit[rows], unit[columns]
        # Exact for small angles as well, where the cosine hardly changes.
        parts.append(2 * torch.atan2((x - y).norm(dim=1), (x + y).norm(dim=1)))
    return torch.cat(parts).rad2deg()
