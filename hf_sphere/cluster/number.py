"""Number of clusters of directions, found by merging too many clusters."""

import math

import numpy as np
import torch
from torch import Tensor

from hf_sphere.geometry import bessel
from hf_sphere.geometry.manifold import project_to_sphere


def merge_clusters(
    sums: Tensor, counts: Tensor, sample: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, int | None]:
    """Merge clusters of directions to as many as the rows support; return their centers (k, d).

    `sums` (m, d) and `counts` (m,) are those of the rows of each cluster, `sample` (b, d) some rows as unit vectors,
    and `labels` and `weights` (b,) their clusters and how often they count. Each step merges the pair that reduces the
    total length of the sums by the least; see `SphericalKMeans`. A larger number that has the highest silhouette, with
    too few rows for the criterion to decide, is returned too.
    """
    largest = min(1e8, 0.01 / torch.finfo(sums.dtype).eps)  # beyond, the rounding of the sums decides
    has_rows = (counts > 0).cpu()
    is_left = has_rows.numpy().copy()
    sums, sizes = sums.cpu().double(), counts.cpu().double().numpy()
    products, cosines = (sums @ sums.T).numpy(), (sample.cpu().double() @ sums.T).numpy()
    lengths, merged_into, rows = np.sqrt(np.diag(products)), np.arange(len(sums)), labels.cpu().numpy()
    shares, total = weights.cpu().double().numpy(), float(sizes.sum())

    def losses(index: int) -> np.ndarray:
        """Return how much the objective falls if a cluster is merged with each of the others."""
        squares = lengths[index] ** 2 + np.square(lengths) + 2 * products[index]
        values = lengths[index] + lengths - np.sqrt(squares.clip(min=0))
        return np.where(is_left & is_left[index] & (np.arange(len(values)) != index), values, np.inf)

    pairs = np.stack([losses(index) for index in range(len(sums))])
    criteria, silhouettes, states = [], [], []
    while True:
        criteria.append(_criterion(lengths[is_left], sizes[is_left], max(sums.shape[1], 2), largest))
        current = (is_left.cumsum() - 1)[merged_into[rows]]
        silhouettes.append(_silhouette(cosines[:, is_left], sizes[is_left], current, shares))
        states.append(merged_into.copy())
        if is_left.sum() <= 1:
            break
        kept, merged = divmod(int(pairs.argmin()), len(sums))
        merged_into[merged_into == merged], is_left[merged] = kept, False
        products[kept] += products[merged]
        products[:, kept] += products[:, merged]
        cosines[:, kept] += cosines[:, merged]
        lengths[kept], sizes[kept] = math.sqrt(max(products[kept, kept], 0)), sizes[kept] + sizes[merged]
        pairs[merged] = pairs[:, merged] = np.inf
        pairs[kept] = pairs[:, kept] = losses(kept)
    first = int(np.argmin(criteria))
    fewer = first + int(np.argmax(silhouettes[first:]))
    state = torch.from_numpy(states[fewer if silhouettes[fewer] > 0.25 else first])
    best = int(np.argmax(silhouettes))
    more = len(np.unique(states[best][has_rows.numpy()]))
    is_doubtful = best < first and silhouettes[best] > 0.25 and total / more < sums.shape[1] / 4
    centers = project_to_sphere(torch.zeros_like(sums).index_add_(0, state, sums)[state[has_rows].unique()])
    return centers, more if is_doubtful else None


def _criterion(lengths: np.ndarray, sizes: np.ndarray, dim: int, largest: float) -> float:
    """Return the criterion of von Mises-Fisher distributions with one concentration, by the lengths of the sums."""
    total, pairs = sizes.sum(), (sizes * (sizes - 1)).sum()
    # The mean cosine of pairs of different rows of a cluster, unlike the mean length, is unbiased for few rows.
    squared = float((np.square(lengths) - sizes).sum() / max(pairs, 1))
    length = torch.tensor(squared, dtype=torch.float64).clamp(0, 1).sqrt()
    concentration = bessel.concentration_from_mean_resultant_length(length, dim).clamp(max=largest)
    peak = float(bessel.log_vmf_peak(concentration, dim))
    likelihood = total * peak + float(concentration) * (lengths.sum() - total) + (sizes * np.log(sizes / total)).sum()
    return len(sizes) * dim * math.log(total) - 2 * float(likelihood)


def _silhouette(cosines: np.ndarray, sizes: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> float:
    """Return the weighted mean silhouette of rows by their summed cosines (b, k) with clusters of these sizes."""
    if len(sizes) < 2:
        return 0.0
    own = np.arange(len(labels)), labels
    distances = 1 - cosines / sizes
    # Of weights below 1 there may be less than one other row.
    within = 1 - (cosines[own] - 1) / np.where(sizes[labels] > 1, sizes[labels] - 1, 1)
    distances[own] = np.inf
    between = distances.min(1)
    values = (between - within) / np.maximum(between, within).clip(1e-12)
    return float((np.where(sizes[labels] > 1, values, 0) * weights).sum() / weights.sum())
