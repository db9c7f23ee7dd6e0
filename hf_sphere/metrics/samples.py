"""Tests and intervals of samples of vectors: two distributions, uniformity, and the effective dimension."""

import math

import torch
from torch import Tensor

from hf_sphere.geometry.checks import check_embeddings
from hf_sphere.utils.checks import check_integer, check_seed

BLOCKS = 20
"""Number of blocks of rows of the jackknife."""


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
