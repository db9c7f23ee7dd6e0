"""Two-sample test: whether two sets of vectors look like samples of one distribution."""

import math

import torch
from torch import Tensor

from hf_sphere.geometry.checks import check_embeddings
from hf_sphere.utils.checks import check_integer, check_seed


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
