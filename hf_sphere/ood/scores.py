"""Scores of embeddings and logits that are higher for in-distribution inputs."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_sphere.cluster.mixture import log_joint, maximize
from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.metrics.search import NeighborSearch

SCORES: dict[str, type["Score"]] = {}
"""Scores by name. Every subclass of `Score` that sets `name` is added when it is defined."""


@dataclass(eq=False)
class Score:
    """Base class of the scores, whose fields are their options.

    A subclass defines `_compute(data)` and, if it has to be fitted, `_fit(data)`. The data are `Outputs` that were
    checked, float64 on the CPU, and have the fields in `needs`.

    Attributes:
        name: Name in `OODDetector`.
        needs: Fields of `Outputs` that are used. `labels` are used by `_fit` only.
        fits: Whether the score is fitted to training data.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ("embeddings",)
    fits: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.name:
            SCORES[cls.name] = cls

    def _fit(self, data: Any) -> None:
        """Fit the score to the outputs for training data."""

    def _compute(self, data: Any) -> Tensor:
        """Return the scores (N,)."""
        raise NotImplementedError(f"{type(self).__name__} must define `_compute`.")


class MaxSoftmax(Score):
    """Logarithm of the largest softmax probability, which does not round to 0 when the probability rounds to 1.

    Hendrycks and Gimpel, "A baseline for detecting misclassified and out-of-distribution examples in neural networks",
    ICLR 2017.
    """

    name = "max_softmax"
    needs = ("logits",)

    def _compute(self, data: Any) -> Tensor:
        largest, index = data.logits.max(1, keepdim=True)
        return -(data.logits - largest).exp().scatter(1, index, 0.0).sum(1).log1p()


class MaxLogit(Score):
    """Largest logit. Hendrycks et al., "Scaling out-of-distribution detection for real-world settings", ICML 2022."""

    name = "max_logit"
    needs = ("logits",)

    def _compute(self, data: Any) -> Tensor:
        return data.logits.amax(1)


class Energy(Score):
    """Logarithm of the sum of the exponentials of the logits, the negative energy.

    Liu, Wang, Owens and Li, "Energy-based out-of-distribution detection", NeurIPS 2020.
    """

    name = "energy"
    needs = ("logits",)

    def _compute(self, data: Any) -> Tensor:
        return data.logits.logsumexp(1)


class Norm(Score):
    """Norm of the embedding."""

    name = "norm"

    def _compute(self, data: Any) -> Tensor:
        return torch.linalg.vector_norm(data.embeddings, dim=1)


class Concentration(Score):
    """Concentration of the embedding's von Mises-Fisher distribution, which the model computes.

    Scott, Gallagher and Mozer, "von Mises-Fisher loss: an exploration of embedding geometries for supervised learning",
    ICCV 2021.
    """

    name = "concentration"
    needs = ("concentrations",)

    def _compute(self, data: Any) -> Tensor:
        return data.concentrations


@dataclass(eq=False)
class NearestNeighbors(Score):
    """Negative distance to the k-th nearest training embedding, of normalized embeddings.

    Sun, Ming, Zhu and Li, "Out-of-distribution detection with deep nearest neighbors", ICML 2022.
    """

    name = "knn"
    fits = True

    k: int = 50

    def _fit(self, data: Any) -> None:
        if not 1 <= self.k <= len(data.embeddings):
            raise ValueError(
                f"k must be at least 1 and at most the number of training embeddings, {len(data.embeddings)}; got "
                f"{self.k}."
            )
        self.search = NeighborSearch(data.embeddings, kind="torch")

    def _compute(self, data: Any) -> Tensor:
        return -(2 * self.search.search(data.embeddings, self.k)[0][:, -1]).sqrt()  # 1 - cosine is |x - y|^2 / 2


class Mahalanobis(Score):
    """Negative half of the squared Mahalanobis distance to the nearest class mean, with one covariance of all classes.

    Lee, Lee, Lee and Shin, "A simple unified framework for detecting out-of-distribution samples and adversarial
    attacks", NeurIPS 2018. Directions without variance in training have 1e-9 of the mean variance.
    """

    name = "mahalanobis"
    needs = ("embeddings", "labels")
    fits = True

    def _fit(self, data: Any) -> None:
        _, index, counts = data.labels.unique(return_inverse=True, return_counts=True)
        means = _sums(data.embeddings, index, len(counts)) / counts[:, None]
        centered = data.embeddings - means[index]
        covariance = centered.T @ centered / len(centered)
        if not covariance.any():
            raise ValueError(
                "no class has two different training embeddings, so there is no covariance within classes. Use more "
                "data, or the score knn."
            )
        covariance.diagonal().add_(1e-9 * covariance.diagonal().mean())
        self.factor = torch.linalg.cholesky(covariance)
        self.means = self._whiten(means)

    def _whiten(self, points: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor, points.T, upper=False).T

    def _compute(self, data: Any) -> Tensor:
        return -torch.cdist(self._whiten(data.embeddings), self.means).amin(1).square() / 2


@dataclass(eq=False)
class VirtualLogit(Score):
    """Energy minus a virtual logit: the scaled norm of the embedding orthogonal to the principal subspace.

    Wang, Li, Feng and Zhang, "ViM: out-of-distribution with virtual-logit matching", CVPR 2022. The last layer, whose
    weights define the origin, is fitted to embeddings and logits by least squares. That is exact for a linear layer,
    and defines an origin for the others.

    Args:
        dim: Dimension of the principal subspace; half of that of the embeddings and at most 1000 if None.
    """

    name = "vim"
    needs = ("embeddings", "logits")
    fits = True

    dim: int | None = None

    def _fit(self, data: Any) -> None:
        embeddings, logits = data.embeddings, data.logits
        width = embeddings.shape[1]
        dim = min(width // 2, 1000) if self.dim is None else self.dim
        if not 1 <= dim < width:
            raise ValueError(
                f"dim must be at least 1 and less than the dimension of the embeddings, {width}; got {dim}."
            )
        mean, centered = embeddings.mean(0), embeddings - embeddings.mean(0)
        weight = torch.linalg.pinv(centered.T @ centered, hermitian=True) @ (centered.T @ (logits - logits.mean(0)))
        # A larger tolerance than that of pinv, since exact dependencies between the logits became rounding errors.
        self.origin = torch.linalg.pinv(weight.T, rtol=1e-6) @ (mean @ weight - logits.mean(0))
        shifted = embeddings - self.origin
        self.basis = torch.linalg.eigh(shifted.T @ shifted).eigenvectors[:, : width - dim]
        lengths = self._residual_lengths(embeddings)
        self.scale = logits.amax(1).mean().abs() / lengths.mean().clamp_min(torch.finfo(lengths.dtype).tiny)

    def _residual_lengths(self, embeddings: Tensor) -> Tensor:
        return torch.linalg.vector_norm((embeddings - self.origin) @ self.basis, dim=1)

    def _compute(self, data: Any) -> Tensor:
        return data.logits.logsumexp(1) - self.scale * self._residual_lengths(data.embeddings)


class VonMisesFisherLikelihood(Score):
    """Log-density of the direction of the embedding in a mixture with a von Mises-Fisher distribution of each class.

    Means and concentrations are those of the training embeddings of the class, as in
    `hf_sphere.cluster.VonMisesFisherMixture`.
    """

    name = "vmf"
    needs = ("embeddings", "labels")
    fits = True

    def _fit(self, data: Any) -> None:
        if data.embeddings.shape[1] < 2:
            raise ValueError("the score vmf needs embeddings with at least 2 dimensions.")
        _, index = data.labels.unique(return_inverse=True)
        used = data.embeddings.any(1)  # a zero vector has no direction
        counts = torch.bincount(index[used], minlength=int(index.max()) + 1).double()
        sums = _sums(project_to_sphere(data.embeddings[used]), index[used], len(counts))
        self.mixture = maximize(sums, counts, squares=counts)

    def _compute(self, data: Any) -> Tensor:
        scales = data.embeddings.any(1).double()
        return log_joint(project_to_sphere(data.embeddings), scales, self.mixture).logsumexp(1)


def _sums(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """Return the sums of the rows (N, d) with each index (N,): (count, d)."""
    return rows.new_zeros(count, rows.shape[1]).index_add(0, index, rows)
