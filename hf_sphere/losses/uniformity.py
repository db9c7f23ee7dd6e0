"""Distances of embeddings (B, d) from the uniform distribution on the sphere, as losses beside any other.

Embeddings can have any norm; those of all processes count. For independent uniform directions, the expectation of each
loss is 0, for any B > 1 and d > 1.
"""

import functools
import itertools
import math
from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor, distributed, nn

from hf_sphere.geometry.codes.bounds import nearest_others
from hf_sphere.geometry.decorators import WithGradients, opaque
from hf_sphere.losses.pairs import gather_points
from hf_sphere.nn.class_softmax import BLOCK, class_blocks
from hf_sphere.nn.heads.base import Head
from hf_sphere.nn.processes import count_processes

NUM_CIRCLES = 64
"""Circles of `SlicedUniformityLoss`, sampled in each call."""


class UniformityLoss(nn.Module):
    """Base class: normalizes embeddings, in float32 or better, and gathers those of all processes."""

    def forward(self, embeddings: Tensor) -> Tensor:
        """Compute the scalar loss of embeddings (B, d)."""
        with torch.autocast(embeddings.device.type, enabled=False):
            points = gather_points(Head.normalize(embeddings))[0] if embeddings.ndim else embeddings
            if points.ndim != 2 or min(points.shape) < 2:
                raise ValueError(f"embeddings must be (B, d) with B > 1 and d > 1; got {tuple(points.shape)}.")
            return self.compute_loss(points)

    @abstractmethod
    def compute_loss(self, points: Tensor) -> Tensor:
        """Compute the loss of the unit vectors (N, d) of all processes."""


class HeatKernelLoss(UniformityLoss):
    """Kernel discrepancy (squared MMD), unbiased: the mean of the heat kernel over pairs of embeddings, minus 1.

    The kernel is the density of Brownian motion relative to the uniform one, so its mean is 1. In many dimensions it is
    proportional to `exp(s cosine)` with `s = min(4, d / 2)`; s is 4 in `hf_sphere.metrics.uniformity`.

    Reference:
        Gretton et al., "A kernel two-sample test", JMLR 2012.

    Example:
        >>> HeatKernelLoss()(embeddings).shape
        torch.Size([])
    """

    def compute_loss(self, points: Tensor) -> Tensor:
        """Sum the harmonics over all pairs, in blocks."""
        return WithGradients.apply(*_mean_heat_kernel(points.detach()), points)


@functools.cache
def _heat_factors(dim: int) -> list[float]:
    """Return the factors of the Gegenbauer polynomials of degrees 1, 2, ... that are 1 at a cosine of 1."""
    time = math.log(max(dim / 4, 2)) / (dim - 1)  # of the motion, so that s = d exp((1 - d) time)
    factors = [math.inf]
    for k in itertools.count(1):
        # The number of harmonics, and their decay by the eigenvalue.
        log_count = math.log(2 * k + dim - 2) + math.lgamma(k + dim - 2) - math.lgamma(k + 1) - math.lgamma(dim - 1)
        factors.append(math.exp(min(log_count - time * k * (k + dim - 2), 700)))
        if factors[-1] < min(factors[-2], 1e-17):
            break
    return factors[1:]


@opaque(lambda points: (points.new_empty(()), torch.empty_like(points)))
def _mean_heat_kernel(points: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of the kernel, minus 1, over pairs of points (N, d), by a recurrence, and its gradient."""
    total, gradient, dim = points.new_zeros(()), torch.empty_like(points), points.shape[1]
    factors = _heat_factors(dim)
    pairs = len(points) * (len(points) - 1)
    for block in class_blocks(len(points), len(points), points.device, BLOCK):
        cosines = (points[block] @ points.T).clamp_(-1, 1)
        before, value = torch.ones_like(cosines), cosines
        slope_before, slope = torch.zeros_like(cosines), before
        sums = torch.stack([value, slope]).mul_(factors[0])  # of the kernel and its derivative
        for k, factor in enumerate(factors[1:], 1):
            a, b = (2 * k + dim - 2) / (k + dim - 2), k / (k + dim - 2)
            slope_before, slope = slope, a * (value + cosines * slope) - b * slope_before
            before, value = value, a * cosines * value - b * before
            sums[0].add_(value, alpha=factor), sums[1].add_(slope, alpha=factor)
        sums.diagonal(block.start, 1, 2).zero_()
        total += sums[0].sum() / pairs
        gradient[block] = sums[1] @ points * (2 / pairs)
    return total, gradient


class KoLeoLoss(UniformityLoss):
    """Entropy estimate: minus the mean log distance to the nearest other embedding, plus its expectation, a number.

    Reference:
        Sablayrolles et al., "Spreading vectors for similarity search", ICLR 2019.

    Example:
        >>> KoLeoLoss()(embeddings).shape
        torch.Size([])
    """

    def compute_loss(self, points: Tensor) -> Tensor:
        """Find the nearest ones in blocks."""
        nearest, expected = _find_nearest(points.detach())
        distances = torch.linalg.vector_norm(points - points[nearest], dim=1)
        return expected - distances.clamp_min(1e-8).log().mean()


@opaque(lambda points: (points.new_empty(len(points), dtype=torch.int64), points.new_empty(())))
def _find_nearest(points: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the nearest other points (N,), and `expected_log_distance`."""
    return nearest_others(points)[1], points.new_full((), expected_log_distance(*points.shape))


@functools.lru_cache(maxsize=1024)
def expected_log_distance(count: int, dim: int) -> float:
    """Return the expected log distance of a uniform point to the nearest of `count - 1` others."""
    from scipy.special import betaincinv

    # Its quantile is 1 - (1 - v)^(1 / n), v uniform; with 1 - v = 1 / (1 + exp(y)) the trapezoidal rule converges
    # exponentially. A squared distance is 4 times a beta variable.
    y = np.arange(-40.0, 40.0, 0.25)
    quantile = -np.expm1(-np.logaddexp(0.0, y) / (count - 1))
    logs = np.log(4 * betaincinv((dim - 1) / 2, (dim - 1) / 2, quantile)) / 2
    return float(0.25 * logs @ (0.5 / (1 + np.cosh(y))))


class SlicedUniformityLoss(UniformityLoss):
    """Mean squared transport distance on random great circles, of length 1, minus its expectation, 1 / (12 B).

    Uniform directions are uniform on each circle, so the distance is Watson's statistic, divided by B.

    Reference:
        Bonet et al., "Spherical sliced-Wasserstein", ICLR 2023; Watson, "Goodness-of-fit tests on a circle", 1961.

    Example:
        >>> SlicedUniformityLoss()(embeddings).shape
        torch.Size([])
    """

    def compute_loss(self, points: Tensor) -> Tensor:
        """Compute the distances from the sorted positions on each circle."""
        count, dim = points.shape
        axes = torch.randn(2, dim, NUM_CIRCLES, dtype=points.dtype, device=points.device)
        if count_processes() > 1:
            distributed.broadcast(axes, 0)
        first, second = nn.functional.normalize(axes[0], dim=0), axes[1]
        second = nn.functional.normalize(second - (first * second).sum(0) * first, dim=0)
        turns = torch.atan2(points @ second, points @ first).sort(0).values / (2 * math.pi)
        grid = torch.arange(count, dtype=points.dtype, device=points.device)[:, None] / count
        return (turns - grid).var(0, correction=0).mean() + (1 / count - 1) / (12 * count)
