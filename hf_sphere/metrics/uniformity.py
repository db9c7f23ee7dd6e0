"""How near embeddings of one class are to each other, and how evenly all of them cover the sphere."""

import math

import torch
from torch import Tensor

from hf_sphere.metrics.checks import check_classes, check_directions

_NUMBERS_AT_A_TIME = 2**22


def alignment(points: Tensor, labels: Tensor, *, alpha: float = 2.0) -> float:
    """Mean of |x - y|^alpha over all pairs of points of one class, by their directions x and y.

    0 if each class is at one place. A class with one member has no pair and does not count. For alpha = 2 the time
    grows with the number of points, else with the squares of the numbers in the classes; the memory does not.

    Args:
        points: (N, d), of any norms but zero. A tensor, an array or lists.
        labels: (N,), class of each point; any integers.
        alpha: Exponent, positive.

    Returns:
        From 0 to 2^alpha, lower is better.

    Raises:
        TypeError: If the points are complex or the labels are not integers.
        ValueError: If a shape is wrong, a point is zero or not finite, no class has two members or `alpha` is not
            positive.

    Reference:
        Wang and Isola, "Understanding contrastive representation learning through alignment and uniformity on the
        hypersphere", ICML 2020, where two views of one image are a pair.
    """
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ValueError(f"alpha must be finite and positive, usually 2; got {alpha}.")
    unit = check_directions(points)
    classes = check_classes(labels, len(unit))
    sizes = torch.bincount(classes)
    pairs = (sizes * (sizes - 1)).sum().item() / 2
    if pairs == 0:
        raise ValueError(f"none of the {len(sizes)} classes has two members, so there is no pair to measure.")
    if alpha == 2:
        # The squared distances of n points sum up to n times those to their mean.
        means = torch.zeros(len(sizes), unit.shape[1], dtype=unit.dtype).index_add(0, classes, unit) / sizes[:, None]
        return ((unit - means[classes]).square().sum(1) * sizes[classes]).sum().item() / pairs
    total = 0.0
    for members in unit[classes.argsort(stable=True)].split(sizes.tolist()):
        for start, stop in _blocks(members):
            # Differences, not products: near points lose no digits.
            distances = torch.cdist(members[start:stop], members[start:], compute_mode="donot_use_mm_for_euclid_dist")
            total += distances.triu(1).pow(alpha).sum().item()
    return total / pairs


def uniformity(points: Tensor, *, t: float = 2.0) -> float:
    """Logarithm of the mean of exp(-t |x - y|^2) over all pairs of points, by their directions x and y.

    0 if all points are at one place; the lower, the more evenly they cover the sphere. Uniform points in many
    dimensions come near -2 t. The time grows with the square of the number of points, the memory does not.

    Args:
        points: (N, d), N at least 2, of any norms but zero. A tensor, an array or lists.
        t: How fast the weight of a pair falls with its distance, positive.

    Returns:
        From -4 t to 0.

    Raises:
        TypeError: If the points are complex.
        ValueError: If a shape is wrong, a point is zero or not finite, or `t` is not positive.

    Reference:
        Wang and Isola, "Understanding contrastive representation learning through alignment and uniformity on the
        hypersphere", ICML 2020.
    """
    if not (t > 0 and math.isfinite(t)):
        raise ValueError(f"t must be finite and positive, usually 2; got {t}.")
    unit = check_directions(points, least=2)
    count = len(unit)
    total = torch.tensor(-math.inf, dtype=unit.dtype)
    for start, stop in _blocks(unit):
        # |x - y|^2 = 2 - 2 x.y for unit vectors
        exponents = 2 * t * ((unit[start:stop] @ unit[start:].T).clamp(-1.0, 1.0) - 1)
        own = torch.ones_like(exponents, dtype=torch.bool).tril()
        total = torch.logaddexp(total, exponents.masked_fill(own, -math.inf).flatten().logsumexp(0))
    return total.item() - math.log(count * (count - 1) / 2)


def _blocks(points: Tensor) -> list[tuple[int, int]]:
    """Rows of points (n, d) to compare with all at a time, from where to where; the last row has no pair after it."""
    step = max(1, _NUMBERS_AT_A_TIME // len(points))
    return [(start, min(start + step, len(points))) for start in range(0, len(points) - 1, step)]
