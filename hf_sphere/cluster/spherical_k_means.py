"""Spherical k-means: clusters of directions around unit vectors."""

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

from hf_sphere.cluster.number import merge_clusters
from hf_sphere.cluster.rows import DirectionRows, all_sums_by_label, products
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
        used = int(labels.cpu().bincount().count_nonzero())
        if used < len(centers):
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
        used = rows.used()
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
        best: Any = (-np.inf,)
        for _ in range(self.n_init if initial is None else 1):
            centers = choose_centers(rows, int(self.n_clusters), random) if initial is None else initial
            passes, nearest_centers = 0, NearestCenters(rows)
            while passes < self.max_iter:
                before, passes = centers, passes + 1
                sums, _ = all_sums_by_label(rows, nearest_centers.update(centers), len(centers))
                centers = _updated(centers, sums, rows)
                if (centers - before).square().sum() <= self.tol:
                    break
            labels, cosines = assign(rows, centers)
            best = max(best, (float(cosines @ rows.weights), labels, cosines, centers, passes), key=lambda run: run[0])
        return best[1:]


def nearest(values: Tensor) -> Tensor:
    """Return the first column of the largest value of each row of (b, k): (b,)."""
    # On the CPU numpy is several times as fast as torch.
    return values.argmax(1) if values.device.type != "cpu" else torch.from_numpy(values.numpy().argmax(1))


def largest(values: Tensor) -> Tensor:
    """Return the largest value of each row of (b, k): (b,)."""
    return values.amax(1) if values.device.type != "cpu" else torch.from_numpy(values.numpy().max(1))


def compare(
    rows: DirectionRows, parts: Iterable[slice | Tensor], centers: Tensor
) -> Iterator[tuple[slice | Tensor, Tensor, Tensor, Tensor]]:
    """Yield parts of the rows, their products with the centers, (b, k), the first center of the largest, and scales."""
    memory: Tensor | None = None
    for part in parts:
        block, scales = rows[part]
        if memory is None or len(memory) != len(scales):
            memory = centers.new_empty(len(scales), len(centers))  # reused: allocating takes longer
        values = products(block, centers, memory)
        yield part, values, nearest(values), scales


def assign(rows: DirectionRows, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first center with the largest cosine of each row, (n,), and this cosine, (n,)."""
    labels, cosines = torch.empty(len(rows), dtype=torch.int64, device=rows.device), torch.empty_like(rows.scales)
    for part, values, winners, scales in compare(rows, rows.parts(rows.dim + len(centers)), centers):
        labels[part], cosines[part] = winners, values.gather(1, winners[:, None]).squeeze(1) * scales
    return labels, cosines


class NearestCenters:
    """The nearest center of each row while centers move, found again only where it may have changed (Hamerly, 2010)."""

    def __init__(self, rows: DirectionRows) -> None:
        self.rows = rows
        self.centers: Tensor | None = None
        self.compared = 0
        """Number of rows that the last update compared with the centers."""
        self.labels = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
        self.own, self.other = torch.empty((2, len(rows)), dtype=rows.dtype, device=rows.device)
        """Largest possible angle with the own center, and smallest possible one with the other centers."""

    def update(self, centers: Tensor) -> Tensor:
        """Return the first one of the nearest centers of each row, (n,)."""
        parts: Iterable[slice | Tensor] = self.rows.parts(self.rows.dim + len(centers))
        self.compared = len(self.rows)
        unsure = None if self.centers is None else self._move(centers, self.centers)
        if unsure is not None and len(unsure) < 0.7 * len(self.rows):  # else copying the rows takes longer
            self.compared = len(unsure)
            parts = unsure.split(max(64, 2**19 // (self.rows.dim + len(centers))))
        for part, values, winners, scales in compare(self.rows, parts, centers):
            self.labels[part] = winners
            self.own[part] = (values.gather(1, winners[:, None]).squeeze(1) * scales).clamp(-1, 1).acos()
            values.scatter_(1, winners[:, None], -torch.inf)
            self.other[part] = (largest(values) * scales).clamp(-1, 1).acos()
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
            for part in self.rows.parts(self.rows.dim + len(near)):
                block, scales = self.rows[part]
                angles = (largest(products(block, near)) * scales).clamp(-1, 1).acos()
                self.other[part] = torch.minimum(self.other[part], angles)
        slack = 8 * torch.finfo(self.own.dtype).eps ** 0.5  # an angle near 0 has half of the digits of its cosine
        return (self.own + slack >= self.other).nonzero().squeeze(1)


def choose_centers(rows: DirectionRows, count: int, random: np.random.RandomState) -> Tensor:
    """Choose initial centers among the rows by greedy k-means++, whose squared distances are 2 (1 - cosine)."""
    candidates = rows.used()
    if len(candidates) == 0:
        return torch.eye(1, rows.dim, dtype=rows.dtype, device=rows.device).repeat(count, 1)
    size = max(10_000, 100 * count)
    if len(candidates) > size:
        candidates = candidates[torch.from_numpy(random.choice(len(candidates), size, replace=False))]
    block, scales = rows[candidates]
    weights = rows.weights[candidates, None]
    # In many dimensions most candidates are in clusters that have a center, because all distances are nearly equal.
    trials = min(2 + 2 * count, 64)
    first = random.randint(len(candidates))
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
    if is_empty.any():
        is_used = rows.used_weights > 0
        cosines = torch.where(is_used, assign(rows, centers)[1], 2.0)
        empty = is_empty.nonzero().squeeze(1)[: int(is_used.sum())]
        moved = rows.directions(cosines.topk(len(empty), largest=False).indices)
        return torch.where(is_empty[:, None], centers, project_to_sphere(sums)).index_copy(0, empty, moved)
    return project_to_sphere(sums)


def _inertia(rows: DirectionRows, cosines: Tensor) -> float:
    gaps = (1 - cosines.to(widest_dtype(rows.device))).clamp_min(0)
    return float(2 * (gaps * rows.used_weights).sum())
