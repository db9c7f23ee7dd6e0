"""The fits of the scores of `hf_sphere.nn.rejection`, which are higher for in-distribution inputs.

A fit takes `Outputs` in float64 on the CPU, with the fields that the score needs, and its options as keywords. It
returns the state that the values of the score are computed from.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from hf_sphere.cluster.mixture import maximize
from hf_sphere.geometry import bessel
from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.nn.rejection import SCORES as VALUES
from hf_sphere.utils.checks import check_integer


def fit_neighbors(data: Any, *, k: int = 50) -> dict[str, Any]:
    """Negative distance to the k-th nearest training embedding, of normalized embeddings (Sun et al., ICML 2022)."""
    check_integer("k", k, 1, len(data.embeddings))
    # The paper chooses k on validation data; its largest is 0.4 of the size of a class (CIFAR-100).
    if data.labels is not None and 2 * k > (size := int(data.labels.unique(return_counts=True)[1].median())):
        logging.getLogger(__name__).warning("knn: k = %d is large for classes of %d; try a smaller one.", k, size)
    return {"references": project_to_sphere(data.embeddings), "k": k}


def fit_mahalanobis(data: Any) -> dict[str, Any]:
    """Negative half of the squared Mahalanobis distance to the nearest class mean (Lee et al., NeurIPS 2018).

    The covariance is that within all classes. Directions without variance in training have 1e-9 of the mean variance.
    """
    _, index, counts = data.labels.unique(return_inverse=True, return_counts=True)
    sums = data.embeddings.new_zeros(len(counts), data.embeddings.shape[1]).index_add(0, index, data.embeddings)
    means = sums / counts[:, None]
    centered = data.embeddings - means[index]
    covariance = centered.T @ centered / len(centered)
    if not covariance.any():
        raise ValueError("no class has two different training embeddings; use more of them, or the score knn.")
    covariance.diagonal().add_(1e-9 * covariance.diagonal().mean())
    factor = torch.linalg.cholesky(covariance)
    whitening = torch.linalg.solve_triangular(factor, torch.eye(len(factor)).to(factor), upper=False).T.contiguous()
    center = data.embeddings.mean(0)
    return {"center": center, "whitening": whitening, "means": (means - center) @ whitening}


def fit_virtual_logit(data: Any, *, dim: int | None = None) -> dict[str, Any]:
    """Energy minus the scaled norm of the embedding orthogonal to a principal subspace (ViM, Wang et al., CVPR 2022).

    The weights of the last layer, which define the origin, are fitted to embeddings and logits by least squares. That
    is exact for a linear layer. The subspace has `dim` dimensions; half of all and at most 1000 if None.
    """
    embeddings, logits = data.embeddings, data.logits
    width = embeddings.shape[1]
    dim = check_integer("dim", min(width // 2, 1000) if dim is None else dim, 1, width - 1)
    mean, centered = embeddings.mean(0), embeddings - embeddings.mean(0)
    weight = torch.linalg.pinv(centered.T @ centered, hermitian=True) @ (centered.T @ (logits - logits.mean(0)))
    # A larger tolerance than that of pinv, since exact dependencies between the logits became rounding errors.
    origin = torch.linalg.pinv(weight.T, rtol=1e-6) @ (mean @ weight - logits.mean(0))
    shifted = embeddings - origin
    basis = torch.linalg.eigh(shifted.T @ shifted).eigenvectors[:, : width - dim].contiguous()
    lengths = torch.linalg.vector_norm(shifted @ basis, dim=1)
    scale = logits.amax(1).mean().abs() / lengths.mean().clamp_min(torch.finfo(lengths.dtype).tiny)
    return {"origin": origin, "basis": basis, "scale": scale}


def fit_likelihoods(data: Any) -> dict[str, Any]:
    """Log-density of the embedding's direction in the mixture of a von Mises-Fisher distribution of each class."""
    if (dim := data.embeddings.shape[1]) < 2:
        raise ValueError("the score vmf needs embeddings with at least 2 dimensions.")
    index, used = data.labels.unique(return_inverse=True)[1], data.embeddings.any(1)  # zeros have no direction
    counts = torch.bincount(index[used], minlength=int(index.max()) + 1).double()
    sums = counts.new_zeros(len(counts), dim)
    sums.index_add_(0, index[used], project_to_sphere(data.embeddings[used]))
    means, concentrations, weights = maximize(sums, counts, squares=counts)
    uniform = torch.as_tensor(bessel.log_uniform_density(dim)).double()
    peaks = uniform + bessel.log_vmf_peak(concentrations, dim) + weights.log() - concentrations
    return {
        "directions": concentrations[:, None] * means,
        "peaks": peaks,
        "uniform": uniform - math.log(len(weights)),
    }


FITTED: dict[str, tuple[tuple[str, ...], Callable[..., dict[str, Any]]]] = {
    "knn": ((), fit_neighbors),
    "mahalanobis": (("labels",), fit_mahalanobis),
    "vim": ((), fit_virtual_logit),
    "vmf": (("labels",), fit_likelihoods),
}
"""Scores that must be fitted: what the fit needs besides what the values need, and the fit."""

UNFITTED = {name: score for name, score in VALUES.items() if name not in FITTED}
"""Scores that need no fit."""

SCORES = (*UNFITTED, *FITTED)
