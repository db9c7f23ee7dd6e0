"""Alignment and uniformity on the unit sphere (Wang and Isola, ICML 2020), and the effective dimension."""

import math

import torch
from torch import Tensor

from hf_sphere.metrics.checks import check_classes, check_directions, check_embeddings

_BLOCK_NUMEL = 2**22


def alignment(embeddings: Tensor, labels: Tensor, *, alpha: float = 2.0) -> float:
    """Compute the mean of |x - y|^alpha over all pairs of the same class, with x and y the normalized embeddings.

    It is 0 if every class is collapsed to a point. Classes with a single member have no pairs and do not count. The
    time is linear in N for alpha = 2, and otherwise quadratic in the class sizes; the memory is bounded.

    Args:
        embeddings: (N, d), of any nonzero norms. A tensor, an array or lists.
        labels: (N,), class of each embedding; any integers.
        alpha: Exponent, positive.

    Returns:
        The alignment, from 0 to 2^alpha; lower is better.

    Raises:
        TypeError: If the embeddings are complex or the labels are not integers.
        ValueError: If a shape is wrong, an embedding is zero or not finite, no class has two members or `alpha` is not
            positive.

    Reference:
        Wang and Isola, "Understanding contrastive representation learning through alignment and uniformity on the
        hypersphere", ICML 2020, where the pairs are two views of an image.
    """
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ValueError(f"alpha must be finite and positive, usually 2; got {alpha}.")
    unit = check_directions(embeddings)
    classes = check_classes(labels, len(unit))
    sizes = torch.bincount(classes)
    pairs = (sizes * (sizes - 1)).sum().item() / 2
    if pairs == 0:
        raise ValueError(f"none of the {len(sizes)} classes has two members, so there are no pairs.")
    if alpha == 2:
        # The squared distances of all pairs of n points sum to n times those to their mean.
        means = torch.zeros(len(sizes), unit.shape[1], dtype=unit.dtype).index_add(0, classes, unit) / sizes[:, None]
        return ((unit - means[classes]).square().sum(1) * sizes[classes]).sum().item() / pairs
    total = 0.0
    for members in unit[classes.argsort(stable=True)].split(sizes.tolist()):
        for start, stop in _blocks(members):
            # Computed from differences, since products lose digits for close points.
            distances = torch.cdist(members[start:stop], members[start:], compute_mode="donot_use_mm_for_euclid_dist")
            total += distances.triu(1).pow(alpha).sum().item()
    return total / pairs


def uniformity(embeddings: Tensor, *, t: float = 2.0) -> float:
    """Compute the logarithm of the mean of exp(-t |x - y|^2) over all pairs, with x and y the normalized embeddings.

    It is 0 if all directions are equal, and lower the more uniformly they cover the sphere. For the uniform
    distribution it approaches -2 t as d grows. The time is quadratic in N; the memory is bounded.

    Args:
        embeddings: (N, d), N at least 2, of any nonzero norms. A tensor, an array or lists.
        t: Decay of the weight of a pair with its squared distance, positive.

    Returns:
        The uniformity, from -4 t to 0.

    Raises:
        TypeError: If the embeddings are complex.
        ValueError: If a shape is wrong, an embedding is zero or not finite, or `t` is not positive.

    Reference:
        Wang and Isola, "Understanding contrastive representation learning through alignment and uniformity on the
        hypersphere", ICML 2020.
    """
    if not (t > 0 and math.isfinite(t)):
        raise ValueError(f"t must be finite and positive, usually 2; got {t}.")
    unit = check_directions(embeddings, min_count=2)
    count = len(unit)
    total = torch.tensor(-math.inf, dtype=unit.dtype)
    for start, stop in _blocks(unit):
        # |x - y|^2 = 2 - 2 x.y for unit vectors
        exponents = 2 * t * ((unit[start:stop] @ unit[start:].T).clamp(-1.0, 1.0) - 1)
        counted = torch.ones_like(exponents, dtype=torch.bool).tril()  # each pair once
        total = torch.logaddexp(total, exponents.masked_fill(counted, -math.inf).flatten().logsumexp(0))
    return total.item() - math.log(count * (count - 1) / 2)


def effective_dimension(embeddings: Tensor) -> float:
    """Compute the participation ratio (sum l)^2 / sum l^2 of the eigenvalues l of the embeddings' covariance.

    It is d if the variance is the same in all d directions, 1 if all embeddings lie on a line, and 0 if they are equal.
    Embeddings are not normalized; normalize them first if only directions matter.

    Args:
        embeddings: (N, d). A tensor, an array or lists.

    Returns:
        0, or from 1 to min(N - 1, d).

    Raises:
        TypeError: If the embeddings are complex.
        ValueError: If the shape is wrong or an embedding is not finite.

    Reference:
        Gao et al., "A theory of multineuronal dimensionality, dynamics and measurement", bioRxiv 214262, 2017.
    """
    embeddings = check_embeddings(embeddings).cpu().double()
    if (embeddings == embeddings[0]).all():
        return 0.0
    # The ratio does not depend on the scale; this scale avoids overflow and underflow in float64.
    centered = embeddings / embeddings.abs().max()
    centered = centered - centered.mean(0)
    centered = centered / centered.abs().max()
    # The covariance and the smaller Gram matrix have the same trace, and so have their squares.
    gram = centered.T @ centered if embeddings.shape[0] > embeddings.shape[1] else centered @ centered.T
    return (gram.trace().square() / gram.square().sum()).item()


def _blocks(points: Tensor) -> list[tuple[int, int]]:
    """Split the rows of points (n, d), except the last, into blocks (start, stop) to compare with all later rows."""
    step = max(1, _BLOCK_NUMEL // len(points))
    return [(start, min(start + step, len(points))) for start in range(0, len(points) - 1, step)]
