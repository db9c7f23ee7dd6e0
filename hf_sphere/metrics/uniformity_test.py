"""Whether directions are uniform on the sphere, and how many dimensions they fill, with an interval."""

import math

import torch
from torch import Tensor

BLOCKS = 20
"""Number of blocks of rows of the jackknife."""


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
