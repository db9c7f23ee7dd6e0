"""Scores of embeddings and logits that are higher for in-distribution inputs.

The classes are fitted to data by their constructor, whose keyword arguments are the options. The data are `Outputs` in
float64 on the CPU with the fields in `needs`, of which `labels` are used to fit only.
"""

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_sphere.cluster.mixture import log_joint, maximize
from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.search.neighbor_search import NeighborSearch


class NearestNeighbors:
    """Negative distance to the k-th nearest training embedding, of normalized embeddings (Sun et al., ICML 2022)."""

    needs: ClassVar[tuple[str, ...]] = ("embeddings",)

    def __init__(self, data: Any, *, k: int = 50) -> None:
        if k > (count := len(data.embeddings)):
            raise ValueError(f"k must be at most the number of training embeddings, {count}; got {k}.")
        # The paper chooses k on validation data; its largest is 0.4 of the size of a class (CIFAR-100).
        if data.labels is not None and 2 * k > (size := int(data.labels.unique(return_counts=True)[1].median())):
            logging.getLogger(__name__).warning("knn: k = %d is large for classes of %d; try a smaller one.", k, size)
        self.k = k
        self.search = NeighborSearch(data.embeddings, kind="torch")

    def compute(self, data: Any) -> Tensor:
        """Return the scores (N,)."""
        return -(2 * self.search.search(data.embeddings, self.k)[0][:, -1]).sqrt()  # 1 - cosine is |x - y|^2 / 2


class Mahalanobis:
    """Negative half of the squared Mahalanobis distance to the nearest class mean (Lee et al., NeurIPS 2018).

    The covariance is that within all classes. Directions without variance in training have 1e-9 of the mean variance.
    """

    needs: ClassVar[tuple[str, ...]] = ("embeddings", "labels")

    def __init__(self, data: Any) -> None:
        _, index, counts = data.labels.unique(return_inverse=True, return_counts=True)
        sums = data.embeddings.new_zeros(len(counts), data.embeddings.shape[1]).index_add(0, index, data.embeddings)
        means = sums / counts[:, None]
        centered = data.embeddings - means[index]
        covariance = centered.T @ centered / len(centered)
        if not covariance.any():
            raise ValueError("no class has two different training embeddings; use more of them, or the score knn.")
        covariance.diagonal().add_(1e-9 * covariance.diagonal().mean())
        self.factor = torch.linalg.cholesky(covariance)
        self.means = self._whiten(means)

    def _whiten(self, points: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor, points.T, upper=False).T

    def compute(self, data: Any) -> Tensor:
        """Return the scores (N,)."""
        return -torch.cdist(self._whiten(data.embeddings), self.means).amin(1).square() / 2


class VirtualLogit:
    """Energy minus the scaled norm of the embedding orthogonal to a principal subspace (ViM, Wang et al., CVPR 2022).

    The weights of the last layer, which define the origin, are fitted to embeddings and logits by least squares. That
    is exact for a linear layer. The subspace has `dim` dimensions; half of all and at most 1000 if None.
    """

    needs: ClassVar[tuple[str, ...]] = ("embeddings", "logits")

    def __init__(self, data: Any, *, dim: int | None = None) -> None:
        embeddings, logits = data.embeddings, data.logits
        width = embeddings.shape[1]
        dim = min(width // 2, 1000) if dim is None else dim
        if not 1 <= dim < width:
            raise ValueError(f"dim must be at least 1 and less than that of the embeddings, {width}; got {dim}.")
        mean, centered = embeddings.mean(0), embeddings - embeddings.mean(0)
        weight = torch.linalg.pinv(centered.T @ centered, hermitian=True) @ (centered.T @ (logits - logits.mean(0)))
        # A larger tolerance than that of pinv, since exact dependencies between the logits became rounding errors.
        self.origin = torch.linalg.pinv(weight.T, rtol=1e-6) @ (mean @ weight - logits.mean(0))
        shifted = embeddings - self.origin
        self.basis = torch.linalg.eigh(shifted.T @ shifted).eigenvectors[:, : width - dim]
        lengths = torch.linalg.vector_norm(shifted @ self.basis, dim=1)
        self.scale = logits.amax(1).mean().abs() / lengths.mean().clamp_min(torch.finfo(lengths.dtype).tiny)

    def compute(self, data: Any) -> Tensor:
        """Return the scores (N,)."""
        lengths = torch.linalg.vector_norm((data.embeddings - self.origin) @ self.basis, dim=1)
        return data.logits.logsumexp(1) - self.scale * lengths


class ClassLikelihood:
    """Log-density of the embedding's direction in the mixture of a von Mises-Fisher distribution of each class."""

    needs: ClassVar[tuple[str, ...]] = ("embeddings", "labels")

    def __init__(self, data: Any) -> None:
        if data.embeddings.shape[1] < 2:
            raise ValueError("the score vmf needs embeddings with at least 2 dimensions.")
        index, used = data.labels.unique(return_inverse=True)[1], data.embeddings.any(1)  # zeros have no direction
        counts = torch.bincount(index[used], minlength=int(index.max()) + 1).double()
        sums = counts.new_zeros(len(counts), data.embeddings.shape[1])
        sums.index_add_(0, index[used], project_to_sphere(data.embeddings[used]))
        self.mixture = maximize(sums, counts, squares=counts)

    def compute(self, data: Any) -> Tensor:
        """Return the scores (N,)."""
        scales = data.embeddings.any(1).double()
        return log_joint(project_to_sphere(data.embeddings), scales, self.mixture).logsumexp(1)


def _log_max_softmax(logits: Tensor) -> Tensor:
    largest, index = logits.max(1, keepdim=True)
    return -(logits - largest).exp().scatter(1, index, 0.0).sum(1).log1p()


# Hendrycks and Gimpel, ICLR 2017 (maximum softmax); Hendrycks et al., ICML 2022 (maximum logit); Liu et al., NeurIPS
# 2020 (energy); Scott, Gallagher and Mozer, ICCV 2021 (concentration).
UNFITTED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "max_softmax": ("logits", _log_max_softmax),  # does not round to 0 when the probability rounds to 1
    "max_logit": ("logits", lambda logits: logits.amax(1)),
    "energy": ("logits", lambda logits: logits.logsumexp(1)),
    "norm": ("embeddings", lambda embeddings: torch.linalg.vector_norm(embeddings, dim=1)),
    "concentration": ("concentrations", lambda concentrations: concentrations),
}
"""Scores that need no fit: the field of `Outputs` and the function of it."""

FITTED: dict[str, Any] = dict(knn=NearestNeighbors, mahalanobis=Mahalanobis, vim=VirtualLogit, vmf=ClassLikelihood)
SCORES = (*UNFITTED, *FITTED)
