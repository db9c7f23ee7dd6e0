"""Spherical k-means: clusters of directions around unit vectors."""

import math
import numbers
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import (
    BaseEstimator,
    ClassNamePrefixFeaturesOutMixin,
    ClusterMixin,
    TransformerMixin,
    _fit_context,
    clone,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from hf_sphere.cluster.rows import DirectionRows, all_sums_by_label, products
from hf_sphere.geometry import bessel
from hf_sphere.geometry.checks import check_embeddings
from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.utils.modules import widest_dtype

POSITIVE_INTEGER = Interval(numbers.Integral, 1, None, closed="left")


class SphericalKMeans(ClusterMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """k-means on the sphere, which maximizes the sum of the cosines between rows and the centers of their clusters.

    Rows are used by their directions only; they need not be normalized. Rows of zeros have no direction: they do not
    influence the centers and the inertia, and get the label 0, with a warning. X may be a dense or sparse matrix, or a
    tensor, whose device is used; results are tensors if X is one.

    Args:
        n_clusters: Number of clusters, or `auto`: small clusters (one per 10 rows, at most 500) are merged to the
            number with the lowest Bayesian information criterion, or on to that with the highest silhouette by cosine
            of 1,000 rows if it is above 0.25. If one or more than half of them remain, it starts again with one per 2
            rows, at most 500; a number near that bound gets a warning. So does one that is in doubt: the criterion
            needs rows for each dimension of a center, and more clusters, with less than a quarter row each, have a
            silhouette above 0.25 that is higher. It is the length of `cluster_centers_`.
        init: `k-means++` (by cosine, on a sample of at least 100 rows per cluster), or initial centers (k, d).
        n_init: Number of starts; the best is kept. 1 if initial centers are given.
        max_iter: Maximum number of passes over the rows.
        tol: Iterations end if the squared shifts of the centers sum to at most this.
        random_state: Seed or `RandomState`, as in scikit-learn.

    Attributes:
        cluster_centers_: Unit vectors, (k, d).
        labels_: Cluster of each row, (n,).
        inertia_: Weighted sum of the squared Euclidean distances between directions and centers, 2 (1 - cosine) each.
        n_iter_: Number of passes.
        n_features_in_: Number of columns d.

    Example:
        >>> labels = SphericalKMeans(n_clusters=3, random_state=0).fit_predict(embeddings)

    Reference:
        Dhillon and Modha, "Concept decompositions for large sparse text data using clustering", Machine Learning 2001;
        Arthur and Vassilvitskii, "k-means++: the advantages of careful seeding", SODA 2007; Kaufman and Rousseeuw,
        "Finding groups in data", 1990 (the bound of 0.25).
    """

    _parameter_constraints: dict = {
        "n_clusters": [POSITIVE_INTEGER, StrOptions({"auto"})],
        "init": [StrOptions({"k-means++"}), "array-like", Tensor],
        "n_init": [POSITIVE_INTEGER],
        "max_iter": [POSITIVE_INTEGER],
        "tol": [Interval(numbers.Real, 0, None, closed="left")],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        n_clusters: int | Literal["auto"] = 8,
        *,
        init: Any = "k-means++",
        n_init: int = 1,
        max_iter: int = 300,
        tol: float = 1e-4,
        random_state: Any = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.init = init
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        """Return the tags of the estimator."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Find the clusters of the rows of X (n, d), which count as often as their weights (n,) say; y is ignored."""
        rows = DirectionRows(self, X, reset=True, sample_weight=sample_weight)
        if self.n_clusters != "auto" and len(rows) < self.n_clusters:
            raise ValueError(f"n_samples={len(rows)} must be at least n_clusters={self.n_clusters}.")
        random, initial = check_random_state(self.random_state), None
        if not isinstance(self.init, str):
            initial = check_embeddings(self.init, what="init").to(rows.device, rows.dtype)
            if initial.shape != (self.n_clusters, rows.dim):  # also of "auto", which chooses the centers
                shape = f"({self.n_clusters}, {rows.dim})"
                raise ValueError(f"init must have the shape {shape}, without 'auto'; got {tuple(initial.shape)}.")
            initial = project_to_sphere(initial)
        elif self.n_clusters == "auto":
            initial = self._merged_centers(rows, random)
        labels, cosines, centers, self.n_iter_ = self._best_run(rows, initial, random)
        if (used := int(labels.cpu().bincount().count_nonzero())) < len(centers):
            text = f"only {used} of {len(centers)} clusters have rows; X may have fewer distinct directions."
            warnings.warn(text, ConvergenceWarning, stacklevel=3)
        self.cluster_centers_, self.labels_ = rows.output(centers), rows.output(labels)
        self.inertia_ = _inertia(rows, cosines)
        return self

    def predict(self, X: Any) -> Any:
        """Return the cluster of each row of X: (n,)."""
        rows, centers = self._compared(X)
        return rows.output(assign(rows, centers)[0])

    def transform(self, X: Any) -> Any:
        """Return the Euclidean distances between the directions of the rows of X and the centers: (n, k).

        A distance is sqrt(2 (1 - cosine)), and for rows of zeros sqrt(2).
        """
        rows, centers = self._compared(X)
        blocks = rows.parts(rows.dim + len(centers))
        cosines = torch.cat([products(rows[block][0], centers) * rows.scales[block, None] for block in blocks])
        return rows.output((2 * (1 - cosines)).clamp_min(0).sqrt())

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return the negative inertia of X; y is ignored."""
        rows, centers = self._compared(X, sample_weight)
        return -_inertia(rows, assign(rows, centers)[1])

    @property
    def _n_features_out(self) -> int:
        return len(self.cluster_centers_)

    def _compared(self, X: Any, sample_weight: Any = None) -> tuple[DirectionRows, Tensor]:
        check_is_fitted(self)
        rows = DirectionRows(self, X, reset=False, sample_weight=sample_weight)
        return rows, torch.as_tensor(self.cluster_centers_).to(rows.device, rows.dtype)

    def _merged_centers(self, rows: DirectionRows, random: np.random.RandomState) -> Tensor:
        """Return the centers of the clusters that are left after small clusters have been merged."""
        rows.warn_of_shares()
        used = rows.used_weights.nonzero().squeeze(1)
        most = min(len(used) // 2, 500)
        if most < 2:
            return choose_centers(rows, 1, random)
        for count in sorted({min(most, max(20, len(used) // 10)), most}):
            k_means = clone(self).set_params(n_clusters=count, max_iter=min(self.max_iter, 20))
            labels, *_ = k_means._best_run(rows, None, random)
            sample = used[torch.from_numpy(random.choice(len(used), min(len(used), 1_000), replace=False))]
            sampled = rows.directions(sample), labels[sample], rows.weights[sample]
            centers, better = merge_clusters(*all_sums_by_label(rows, labels, count), *sampled)
            if 1 < len(centers) <= count / 2:
                break
        found = f"n_clusters='auto' found {len(centers)} clusters"
        if len(centers) > 0.9 * most:
            text = f"{found}, near its bound of {most}; there may be more: pass a number."
            warnings.warn(text, stacklevel=5)
        elif better is not None:
            text = f"{found}, but {better} are more compact by their silhouette; they have too few rows for"
            warnings.warn(f"{text} {rows.dim} dimensions to decide: pass a number.", stacklevel=5)
        return centers.to(rows.device, rows.dtype)

    def _best_run(
        self, rows: DirectionRows, initial: Tensor | None, random: np.random.RandomState
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """Improve given or chosen centers; return labels, cosines, centers and the number of passes of the best."""
        runs = []
        for _ in range(self.n_init if initial is None else 1):
            centers = choose_centers(rows, int(self.n_clusters), random) if initial is None else initial
            passes, nearest_centers = 0, NearestCenters(rows)
            while passes < self.max_iter:
                before, passes = centers, passes + 1
                sums, _ = all_sums_by_label(rows, nearest_centers.update(centers), len(centers))
                centers = _updated(centers, sums, rows)
                if (centers - before).square().sum() <= self.tol:
                    break
            runs.append((*assign(rows, centers), centers, passes))
        return max(runs, key=lambda run: float(run[1] @ rows.weights))


def maxima(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest value of each row of (b, k), and the first column that has it: (b,) each."""
    # On the CPU the argmax of numpy is several times as fast as that of torch.
    columns = values.argmax(1) if values.device.type != "cpu" else torch.from_numpy(values.numpy().argmax(1))
    return values.gather(1, columns[:, None]).squeeze(1), columns


def compare(
    rows: DirectionRows, parts: Iterable[slice | Tensor], centers: Tensor
) -> Iterator[tuple[slice | Tensor, Tensor, Tensor, Tensor]]:
    """Yield parts of the rows, their products with the centers, (b, k), the largest cosines, and its first center."""
    memory: Tensor | None = None
    for part in parts:
        block, scales = rows[part]
        if memory is None or len(memory) != len(scales):
            memory = centers.new_empty(len(scales), len(centers))  # reused: allocating takes longer
        values = products(block, centers, memory)
        best, winners = maxima(values)
        yield part, values, best * scales, winners


def assign(rows: DirectionRows, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first center with the largest cosine of each row, (n,), and this cosine, (n,)."""
    labels, cosines = torch.empty(len(rows), dtype=torch.int64, device=rows.device), torch.empty_like(rows.scales)
    for part, _, largest_cosines, winners in compare(rows, rows.parts(rows.dim + len(centers)), centers):
        labels[part], cosines[part] = winners, largest_cosines
    return labels, cosines


class NearestCenters:
    """The nearest center of each row while centers move, found again only where it may have changed (Hamerly, 2010)."""

    def __init__(self, rows: DirectionRows) -> None:
        self.rows = rows
        self.centers: Tensor | None = None
        self.labels = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
        self.own, self.other = torch.empty((2, len(rows)), dtype=rows.dtype, device=rows.device)
        """Largest possible angle with the own center, and smallest possible one with the other centers."""

    def update(self, centers: Tensor) -> Tensor:
        """Return the first one of the nearest centers of each row, (n,)."""
        parts: Iterable[slice | Tensor] = self.rows.parts(self.rows.dim + len(centers))
        unsure = None if self.centers is None else self._move(centers, self.centers)
        if unsure is not None and len(unsure) < 0.7 * len(self.rows):  # else copying the rows takes longer
            parts = unsure.split(max(64, 2**19 // (self.rows.dim + len(centers))))
        for part, values, cosines, winners in compare(self.rows, parts, centers):
            self.labels[part], self.own[part] = winners, cosines.clamp(-1, 1).acos()
            values.scatter_(1, winners[:, None], -torch.inf)
            self.other[part] = (maxima(values)[0] * self.rows.scales[part]).clamp(-1, 1).acos()
        self.centers = centers
        return self.labels

    def _move(self, centers: Tensor, before: Tensor) -> Tensor | None:
        """Update the angles; return the rows whose nearest center may have changed, or None if many move far."""
        moved = 2 * (torch.linalg.vector_norm(centers - before, dim=1) / 2).clamp(max=1).asin()
        far = moved > 0.03
        if int(far.sum()) > len(centers) / 2:
            return None
        self.own += moved[self.labels]
        self.other -= moved[~far].max()
        if far.any():  # are compared with all rows, so that the bounds of the others remain close
            self.own[far[self.labels]] = torch.inf
            near = centers[far]
            for part, _, cosines, _ in compare(self.rows, self.rows.parts(self.rows.dim + len(near)), near):
                self.other[part] = torch.minimum(self.other[part], cosines.clamp(-1, 1).acos())
        slack = 8 * torch.finfo(self.own.dtype).eps ** 0.5  # an angle near 0 has half of the digits of its cosine
        return (self.own + slack >= self.other).nonzero().squeeze(1)


def choose_centers(rows: DirectionRows, count: int, random: np.random.RandomState) -> Tensor:
    """Choose initial centers among the rows by greedy k-means++, whose squared distances are 2 (1 - cosine)."""
    candidates = rows.used_weights.nonzero().squeeze(1)
    if len(candidates) == 0:
        return torch.eye(1, rows.dim, dtype=rows.dtype, device=rows.device).repeat(count, 1)
    size = max(10_000, 100 * count)
    if len(candidates) > size:
        candidates = candidates[torch.from_numpy(random.choice(len(candidates), size, replace=False))]
    block, scales = rows[candidates]
    weights = rows.weights[candidates, None]
    # In many dimensions most candidates are in clusters that have a center, because all distances are nearly equal.
    trials, first = min(2 + 2 * count, 64), random.randint(len(candidates))
    if (weights != weights[0]).any():
        shares = weights[:, 0].cpu().double().numpy()
        first = random.choice(len(candidates), p=shares / shares.sum())
    trial_rows, centers = np.array([first]), []
    gaps = torch.full((len(candidates),), 4.0, dtype=rows.dtype, device=rows.device)
    for index in range(count):
        if index > 0:
            ends = (gaps * weights[:, 0]).cpu().double().cumsum(0).numpy()
            trial_rows = np.searchsorted(ends, random.uniform(size=trials) * ends[-1]).clip(max=len(ends) - 1)
        tried = rows.directions(candidates[torch.from_numpy(trial_rows)])
        reduced = torch.minimum(gaps[:, None], (1 - products(block, tried) * scales[:, None]).clamp_min(0))
        best = (reduced * weights).sum(0).argmin(0, keepdim=True)
        gaps = reduced.index_select(1, best)[:, 0]
        centers.append(tried.index_select(0, best))
    return torch.cat(centers)


def _updated(centers: Tensor, sums: Tensor, rows: DirectionRows) -> Tensor:
    """Return the directions of the sums; empty clusters move to the rows that are farthest from their centers."""
    is_empty = (sums == 0).all(1)
    if not is_empty.any():
        return project_to_sphere(sums)
    is_used = rows.used_weights > 0
    cosines = torch.where(is_used, assign(rows, centers)[1], 2.0)
    empty = is_empty.nonzero().squeeze(1)[: int(is_used.sum())]
    moved = rows.directions(cosines.topk(len(empty), largest=False).indices)
    return torch.where(is_empty[:, None], centers, project_to_sphere(sums)).index_copy(0, empty, moved)


def _inertia(rows: DirectionRows, cosines: Tensor) -> float:
    gaps = (1 - cosines.to(widest_dtype(rows.device))).clamp_min(0)
    return float(2 * (gaps * rows.used_weights).sum())


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
