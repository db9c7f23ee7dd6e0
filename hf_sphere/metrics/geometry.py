"""Geometry of embeddings: class angles, overlap, alignment, uniformity, dimension; tests and intervals of samples."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from hf_sphere.geometry.checks import check_classes, check_correct, check_embeddings
from hf_sphere.geometry.manifold import check_directions, geodesic_distance
from hf_sphere.utils.checks import check_choice, check_integer, check_number, check_seed

OverlapDistance = Literal["angular", "euclidean"]

MAX_PAIRS = 500_000  # default number of pairs, approximately all pairs of 1000 embeddings
_BLOCK_NUMEL = 2**22

BLOCKS = 20
"""Number of blocks of rows of the jackknife."""


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

    Example:
        >>> within, between = class_angles(embeddings, labels)
        >>> len(within), len(between)
        (570, 1200)
    """
    check_integer("max_pairs", max_pairs, 1)
    seed = check_seed(seed)
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
    """Sample pairs within and between classes of sorted embeddings, by the `start` and `size` (N,) of their classes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(others: Tensor) -> tuple[Tensor, Tensor]:
        """Sample first embeddings in proportion to their number of partners, and the numbers of their partners."""
        ends = others.cumsum(0)
        first = torch.searchsorted(ends, torch.randint(int(ends[-1]), (count,), generator=generator), right=True)
        partner = (torch.rand(count, dtype=torch.float64, generator=generator) * others[first]).long()
        return first, partner

    first, partner = draw(size - 1)
    second = start[first] + partner
    within = first, second + (second >= first)  # skip the embedding itself
    first, partner = draw(len(size) - size)
    between = first, partner + size[first] * (partner >= start[first])  # skip the class
    return within, between


def _angles(unit: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the angles in degrees, (P,), between the unit vectors (N, d) at the indices (P,) and (P,)."""
    step = max(1, _BLOCK_NUMEL // unit.shape[1])
    blocks = zip(first.split(step), second.split(step), strict=True)
    return torch.cat([geodesic_distance(unit[rows], unit[columns]) for rows, columns in blocks]).rad2deg()


@torch.no_grad()
def class_overlap(
    embeddings: Tensor, labels: Tensor, correct: Tensor, *, threshold: float, distance: OverlapDistance = "angular"
) -> dict[str, float]:
    """Count the examples that overlap with another class, and the errors among them.

    An example overlaps if an example of another class is nearer than the threshold. The error rate among overlapping
    examples measures how well a classifier still separates their classes. The paper reports these counts, but neither
    the threshold nor the code, so compare only numbers for the same threshold.

    The computation is on the CPU, in blocks. The comparison with the threshold is accurate to the rounding of float64,
    however small the distance.

    Args:
        embeddings: (N, d), finite, of any real dtype.
        labels: (N,), class of each example; any integers.
        correct: (N,), whether each example is classified correctly; boolean, or 0 and 1.
        threshold: In degrees, up to 180, for `angular`; in the units of the embeddings for `euclidean`.
        distance: `angular`, the angle between two embeddings, or `euclidean`.

    Returns:
        `num_overlaps`, the number of overlapping examples; `num_pairs`, the number of pairs of different classes that
        are nearer than the threshold; `num_errors`, the number of misclassified overlapping examples; `ratio`, their
        fraction of the overlapping examples, in [0, 1], and 0 if there are none.

    Raises:
        TypeError: If the embeddings are complex or the labels are not integers.
        ValueError: If a shape is wrong, an embedding is not finite or, for `angular`, zero, `correct` has values other
            than 0 and 1, the threshold is out of range, or the distance is unknown.

    Reference:
        Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022, comparison with angle-based
        operators.

    Example:
        >>> class_overlap(embeddings, labels, labels == 0, threshold=0.5)["num_overlaps"]
        0
    """
    check_choice("distance", distance, get_args(OverlapDistance))
    check_number("threshold", threshold, "(0, 180]" if distance == "angular" else "(0, inf)")
    points = check_directions(embeddings) if distance == "angular" else check_embeddings(embeddings).cpu().double()
    labels = check_classes(labels, len(points))
    correct = check_correct(correct, len(points))
    if distance == "angular":
        threshold = 2 * math.sin(math.radians(threshold) / 2)  # chord length, which is also accurate for small angles
    overlaps, num_pairs = torch.zeros(len(points), dtype=torch.bool), 0
    for first, last in _blocks(points):
        # Computed from differences: products lose the digits of small distances.
        distances = torch.cdist(points[first:last], points[first:], compute_mode="donot_use_mm_for_euclid_dist")
        near = (distances < threshold) & (labels[first:last, None] != labels[first:])
        near.triu_()  # each pair once
        num_pairs += int(near.sum())
        overlaps[first:last] |= near.any(1)
        overlaps[first:] |= near.any(0)
    num_overlaps, num_errors = int(overlaps.sum()), int((overlaps & (correct == 0)).sum())
    counts = {"num_overlaps": num_overlaps, "num_pairs": num_pairs, "num_errors": num_errors}
    return counts | {"ratio": num_errors / num_overlaps if num_overlaps else 0.0}


def alignment(embeddings: Tensor, labels: Tensor) -> float:
    """Compute the mean of |x - y|^2 over all pairs of the same class, with x and y the normalized embeddings.

    It is 0 if every class is collapsed to a point. Classes with a single member have no pairs and do not count.

    Args:
        embeddings: (N, d), of any nonzero norms. A tensor, an array or lists.
        labels: (N,), class of each embedding; any integers.

    Returns:
        The alignment, from 0 to 4; lower is better.

    Raises:
        TypeError: If the embeddings are complex or the labels are not integers.
        ValueError: If a shape is wrong, an embedding is zero or not finite, or no class has two members.

    Reference:
        Wang and Isola, "Understanding contrastive representation learning through alignment and uniformity on the
        hypersphere", ICML 2020, with the exponent 2. There, the pairs are two views of an image.

    Example:
        >>> alignment(torch.eye(4)[labels], labels)
        0.0
    """
    unit = check_directions(embeddings)
    classes = check_classes(labels, len(unit))
    sizes = torch.bincount(classes)
    pairs = (sizes * (sizes - 1)).sum().item() / 2
    if pairs == 0:
        raise ValueError(f"none of the {len(sizes)} classes has two members, so there are no pairs.")
    # The squared distances of all pairs of n points sum to n times those to their mean.
    means = torch.zeros(len(sizes), unit.shape[1], dtype=unit.dtype).index_add(0, classes, unit) / sizes[:, None]
    return ((unit - means[classes]).square().sum(1) * sizes[classes]).sum().item() / pairs


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

    Example:
        >>> uniformity(torch.eye(4))
        -4.0
    """
    check_number("t", t, "(0, inf)")
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

    Example:
        >>> round(effective_dimension(torch.eye(4)))
        3
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


def energy_test(x: Tensor, y: Tensor, *, permutations: int = 999, seed: int = 0) -> tuple[float, float]:
    r"""Compare two samples by the energy distance and a permutation test.

    $2 E|x - y| - E|x - x'| - E|y - y'|$ is 0 only for equal distributions (Szekely and Rizzo, "Energy statistics: A
    class of statistics based on distances", Journal of Statistical Planning and Inference 2013). The matrix of all
    distances is in memory.

    Args:
        x: (N, d), independent vectors, such as unit vectors.
        y: (M, d).
        permutations: Number of random divisions of all vectors into N and M, which are compared with the given one.
        seed: Seed of the permutations.

    Returns:
        The energy distance, at least 0, and the p-value, from 1 / (permutations + 1) to 1.

    Raises:
        ValueError: If the vectors are not finite, have different dimensions, one sample has fewer than 2, or
            `permutations` is not a positive integer.

    Example:
        >>> distance, p_value = energy_test(embeddings, embeddings)
        >>> distance, p_value
        (0.0, 1.0)
    """
    permutations = check_integer("permutations", permutations, 1)
    samples = [check_embeddings(points, 2, name).cpu().double() for name, points in (("x", x), ("y", y))]
    if samples[0].shape[1] != samples[1].shape[1]:
        raise ValueError(f"x and y must have one dimension; got {samples[0].shape[1]} and {samples[1].shape[1]}.")
    points = torch.cat(samples)
    # By a power of two, without rounding: the squares of very large numbers are infinite, of small ones zero.
    unit = 2.0 ** (math.frexp(float(points.abs().max()))[1] - 1)
    points, size, total = points / unit, len(samples[0]), len(points)
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    generator = torch.Generator().manual_seed(check_seed(seed))
    # The columns are 1 / N in the first sample and -1 / M in the second, of each division.
    order = torch.rand(total, permutations, generator=generator, dtype=torch.float64).argsort(dim=0)
    order = torch.cat([torch.arange(total)[:, None], order], dim=1)
    signs = torch.where(order < size, 1 / size, -1 / (total - size)).double()
    energies = -(signs * (distances @ signs)).sum(0)
    as_large = energies[1:] >= energies[0] - 1e-12 * distances.max()
    return unit * max(0.0, float(energies[0])), (1 + int(as_large.sum())) / (permutations + 1)


def uniformity_test(points: Tensor) -> list[float]:
    """Return p-values of the uniformity of the mean of unit vectors, and of their axes.

    The statistics are the means over pairs of the cosine c (Rayleigh) and of (c^2 - 1/d) / (1 - 1/d) (Bingham; see
    Mardia and Jupp, "Directional statistics", Wiley 2000, chapter 10). Under uniformity pairs are uncorrelated even if
    they share a vector, so that the first three moments are exact for any N and d; the p-values are those of the
    shifted gamma distribution with these moments. The vectors (N, d) are independent and float64, N > 2 and d > 1.
    """
    from scipy.stats import pearson3

    (count, dim), squares = points.shape, points.square().sum(1)
    products = points.T @ points if count > dim else points @ points.T
    pairs = count * (count - 1) / 2
    cosine = float(points.sum(0).square().sum() - squares.sum()) / pairs / 2
    square = float(products.square().sum() - squares.square().sum()) / pairs / 2
    scale, cube = 1 - 1 / dim, 15 / (dim * (dim + 2) * (dim + 4)) - 9 / (dim**2 * (dim + 2)) + 2 / dim**3
    # Mean, number of harmonics of degree 1 and 2, and third moment of one pair.
    tests = ((cosine, dim, 0.0), ((square - 1 / dim) / scale, (dim - 1) * (dim + 2) / 2, cube / scale**3))
    p_values = []
    for mean, size, third in tests:
        spread = 1 / math.sqrt(size * pairs)
        moment = (2 * (count - 2) / size**2 + third) / pairs**2  # of triangles and of pairs
        p_values.append(float(pearson3.sf(mean / spread, moment / spread**3)))
    return p_values


def effective_dimension_interval(points: Tensor, groups: Tensor) -> tuple[float, float, float]:
    """Return the effective dimension of the distribution that vectors are from, and the ends of its 95 % interval.

    That of `hf_sphere.metrics.effective_dimension` is of the vectors themselves, less than N. Here the moments of the
    covariance are unbiased (Himeno and Yamada, Journal of Multivariate Analysis 2014), and a jackknife by blocks of
    groups has the interval and corrects the bias of rows of a group, which are alike. The rows (N, d), float64, of
    different groups (N,), numbered from 0, are independent.
    """
    from scipy.stats import t

    shifted = points - points.mean(0)

    def ratio(rows: Tensor, products: Tensor) -> float:
        """Return tr(C^2) / (tr C)^2 with the covariance C."""
        n, centered = len(rows), rows - rows.mean(0)
        covariance = (products - n * torch.outer(rows.mean(0), rows.mean(0))) / (n - 1)
        trace, squares = float(covariance.trace()) ** 2, float(covariance.square().sum())
        fourth = n * float(centered.square().sum(1).square().sum()) / (n - 1)
        of_square = (n - 1) * (n - 2) * squares + trace - fourth
        of_trace = 2 * squares + (n * n - 3 * n + 1) * trace - fourth
        return of_square / of_trace if of_trace > 0 else 1.0  # of equal rows

    products, blocks = shifted.T @ shifted, groups % BLOCKS
    parts = [shifted[blocks == block] for block in range(BLOCKS)]
    without = [ratio(shifted[blocks != block], products - part.T @ part) for block, part in enumerate(parts)]
    values = BLOCKS * ratio(shifted, products) - (BLOCKS - 1) * torch.tensor(without, dtype=torch.float64)
    mean, error = float(values.mean()), t.ppf(0.975, BLOCKS - 1) * float(values.std()) / math.sqrt(BLOCKS)
    dim = float(points.shape[1])
    value, low, high = (min(dim, max(1.0, 1 / x)) if x > 0 else dim for x in (mean, mean + error, mean - error))
    return value, low, high


def _blocks(points: Tensor) -> list[tuple[int, int]]:
    """Split the rows of points (n, d), except the last, into blocks (start, stop) to compare with all later rows."""
    step = max(1, _BLOCK_NUMEL // len(points))
    return [(start, min(start + step, len(points))) for start in range(0, len(points) - 1, step)]
