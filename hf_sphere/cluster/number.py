"""Number of clusters of directions, found by merging too many clusters."""

import math

import numpy as np
import torch
from torch import Tensor

from hf_sphere.geometry import bessel
from hf_sphere.geometry.manifold import project_to_sphere


def merge_clusters(sums: Tensor, counts: Tensor) -> Tensor:
    """Merge clusters of directions until the Bayesian information criterion is lowest; return the centers (k, d).

    `sums` (m, d) and `counts` (m,) are the sums and the numbers of the rows of each cluster. Each step merges the pair
    that reduces the objective of spherical k-means, the total length of the sums, by the least. The criterion is that
    of a mixture of von Mises-Fisher distributions with one concentration, in which each row belongs to its cluster.
    """
    largest = min(1e8, 0.01 / torch.finfo(sums.dtype).eps)  # beyond, the rounding of the sums decides
    sums, counts = sums[counts > 0].cpu().double(), counts[counts > 0].cpu().double()
    count, dim = sums.shape
    products, sizes = (sums @ sums.T).numpy(), counts.numpy()
    lengths = np.sqrt(np.diag(products))
    is_left, labels = np.ones(count, bool), np.arange(count)

    def losses(index: int) -> np.ndarray:
        """Return how much the objective falls if a cluster is merged with each of the others."""
        squares = lengths[index] ** 2 + np.square(lengths) + 2 * products[index]
        values = lengths[index] + lengths - np.sqrt(squares.clip(min=0))
        return np.where(is_left & (np.arange(count) != index), values, np.inf)

    pairs = np.stack([losses(index) for index in range(count)])
    best, best_labels = math.inf, labels
    while True:
        score = _criterion(lengths[is_left], sizes[is_left], max(dim, 2), largest)
        if score <= best:
            best, best_labels = score, labels.copy()
        if is_left.sum() <= 1:
            numbers, indices = np.unique(best_labels, return_inverse=True)
            totals = torch.zeros(len(numbers), dim, dtype=sums.dtype)
            return project_to_sphere(totals.index_add_(0, torch.from_numpy(indices), sums))
        kept, merged = divmod(int(pairs.argmin()), count)
        labels[labels == merged], is_left[merged] = kept, False
        products[kept] += products[merged]
        products[:, kept] += products[:, merged]
        lengths[kept], sizes[kept] = math.sqrt(max(products[kept, kept], 0)), sizes[kept] + sizes[merged]
        pairs[merged] = pairs[:, merged] = np.inf
        pairs[kept] = pairs[:, kept] = losses(kept)


def _criterion(lengths: np.ndarray, sizes: np.ndarray, dim: int, largest: float) -> float:
    """Return the criterion of clusters with these lengths of their sums, relative to the uniform distribution."""
    total, pairs = sizes.sum(), (sizes * (sizes - 1)).sum()
    # The mean cosine of pairs of different rows of a cluster, unlike the mean length, is unbiased for few rows.
    squared = float((np.square(lengths) - sizes).sum() / max(pairs, 1))
    length = torch.tensor(squared, dtype=torch.float64).clamp(0, 1).sqrt()
    concentration = bessel.concentration_from_mean_resultant_length(length, dim).clamp(max=largest)
    peak = float(bessel.log_vmf_peak(concentration, dim))
    likelihood = total * peak + float(concentration) * (lengths.sum() - total) + (sizes * np.log(sizes / total)).sum()
    return len(sizes) * dim * math.log(total) - 2 * float(likelihood)
