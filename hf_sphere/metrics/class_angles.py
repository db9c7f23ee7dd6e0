"""Angles between embeddings within a class and between classes."""

import torch
from torch import Tensor

from hf_sphere.metrics.checks import check_classes, check_directions

MAX_PAIRS = 500_000  # default number of pairs, approximately all pairs of 1000 embeddings
_BLOCK_NUMEL = 2**22


def class_angles(
    embeddings: Tensor, labels: Tensor, *, max_pairs: int = MAX_PAIRS, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute the angles between embeddings of the same class, and between embeddings of different classes.

    All pairs are used if there are at most `max_pairs`. Otherwise `max_pairs` pairs of each kind are sampled uniformly
    with replacement; the global random state does not change.

    Args:
        embeddings: (N, d), of any nonzero norms. A tensor, an array or lists.
        labels: (N,), class of each embedding; any integers.
        max_pairs: Number of pairs of each kind to sample, if there are more pairs in total.
        seed: Seed of the sampling.

    Returns:
        Angles in degrees, from 0 to 180, float64 on the CPU: those within classes, and those between classes.

    Raises:
        TypeError: If the embeddings are complex or the labels are not integers.
        ValueError: If a shape is wrong, an embedding is zero or not finite, there is only one class, no class has two
            members or `max_pairs` is not positive.
    """
    if max_pairs < 1:
        raise ValueError(f"max_pairs must be at least 1; got {max_pairs}.")
    unit = check_directions(embeddings)
    classes = check_classes(labels, len(unit))
    sizes = torch.bincount(classes)
    if len(sizes) < 2:
        raise ValueError("angles between classes need at least two classes; got one.")
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
    """Sample pairs of embeddings that are sorted by class: indices (count,) and (count,) of each kind.

    `start` and `size` are the index of the first member of each embedding's class and their number, (N,) each.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(others: Tensor) -> tuple[Tensor, Tensor]:
        """Sample first embeddings in proportion to their number of partners, and the numbers of their partners."""
        ends = others.cumsum(0)
        first = torch.searchsorted(ends, torch.randint(int(ends[-1]), (count,), generator=generator), right=True)
        number = (torch.rand(count, dtype=torch.float64, generator=generator) * others[first]).long()
        return first, number

    first, number = draw(size - 1)
    second = start[first] + number
    within = first, second + (second >= first)  # skip the embedding itself
    first, number = draw(len(size) - size)
    between = first, number + size[first] * (number >= start[first])  # skip the class
    return within, between


def _angles(unit: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the angles in degrees, (P,), between the unit vectors (N, d) at the indices (P,) and (P,)."""
    parts = []
    step = max(1, _BLOCK_NUMEL // unit.shape[1])
    for rows, columns in zip(first.split(step), second.split(step), strict=True):
        x, y = unit[rows], unit[columns]
        # Unlike the arc cosine, this is accurate for small angles too.
        parts.append(2 * torch.atan2((x - y).norm(dim=1), (x + y).norm(dim=1)))
    return torch.cat(parts).rad2deg()
