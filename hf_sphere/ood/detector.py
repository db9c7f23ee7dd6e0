"""Detection of out-of-distribution inputs by a score, and the comparison of scores."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from sklearn.exceptions import NotFittedError
from torch import Tensor, nn

from hf_sphere.cluster.mixture import maximize
from hf_sphere.geometry import bessel
from hf_sphere.geometry.checks import check_rows
from hf_sphere.geometry.manifold import project_to_sphere
from hf_sphere.metrics import detection_scores
from hf_sphere.nn.rejection import SCORES as SCORES
from hf_sphere.ood.outputs import Outputs, model_outputs
from hf_sphere.utils.checks import check_choice, check_integer, check_names
from hf_sphere.utils.shared_rows import Rows, SharedRowsError, check_disjoint

NUMBERS_AT_ONCE = 1 << 24
"""Most scores of pairs of inputs and training embeddings that are computed at once: 128 MB."""

logger = logging.getLogger(__name__)


# The fits of the scores of `hf_sphere.nn.rejection`, which are higher for in-distribution inputs. A fit takes `Outputs`
# in float64 on the CPU, with the fields that the score needs, and its options as keywords. It returns the state that
# the values of the score are computed from.


def fit_neighbors(data: Any, *, k: int = 50) -> dict[str, Any]:
    """Negative distance to the k-th nearest training embedding, of normalized embeddings (Sun et al., ICML 2022)."""
    check_integer("k", k, 1, len(data.embeddings))
    # The paper chooses k on validation data; its largest is 0.4 of the size of a class (CIFAR-100).
    if data.labels is not None and 2 * k > (size := int(data.labels.unique(return_counts=True)[1].median())):
        logger.warning("knn: k = %d is large for classes of %d; try a smaller one.", k, size)
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
    dim = data.embeddings.shape[1]
    index, used = data.labels.unique(return_inverse=True)[1], data.embeddings.any(1)  # zeros have no direction
    counts = torch.bincount(index[used], minlength=int(index.max()) + 1).double()
    sums = counts.new_zeros(len(counts), dim)
    sums.index_add_(0, index[used], project_to_sphere(data.embeddings[used]))
    means, concentrations, weights = maximize(sums, counts, squares=counts)
    uniform = torch.as_tensor(bessel.log_uniform_density(dim)).double()
    peaks = uniform + bessel.log_vmf_peak(concentrations, dim) + weights.log() - concentrations
    of_zeros = uniform - math.log(len(weights))
    return {"directions": concentrations[:, None] * means, "peaks": peaks, "uniform": of_zeros}


FITTED: dict[str, tuple[tuple[str, ...], Callable[..., dict[str, Any]]]] = {
    "knn": ((), fit_neighbors),
    "mahalanobis": (("labels",), fit_mahalanobis),
    "vim": ((), fit_virtual_logit),
    "vmf": (("labels",), fit_likelihoods),
}
"""Scores that must be fitted: what the fit needs besides what the values need, and the fit."""


class OODDetector:
    """A score of inputs that is higher for in-distribution inputs, from the embeddings and logits of a classifier.

    Fit it to training data by `fit` or `fit_embeddings`; the first five scores need no fit. Computed on the CPU in
    float64. A fitted detector can be pickled.

    Args:
        score: `max_softmax` (the logarithm of the largest probability), `max_logit`, `energy` (the negative energy),
            `norm` of the embedding, vMF `concentration` computed by the model, `knn`, `mahalanobis`, `vim`, or `vmf`
            (likelihood of the classes). References are at their fits in this module.
        **options: Neighbors `k` of `knn` (50), less than half of a class; dimension `dim` of `vim`'s subspace.

    Raises:
        ValueError: If the score or an option is unknown, or an option is no positive integer.

    Example:
        >>> detector = OODDetector("knn", k=10).fit(model, train_loader)  # doctest: +SKIP
        >>> threshold = detector.score(model, validation_loader).quantile(0.05)  # doctest: +SKIP
        >>> is_unknown = detector.score(model, loader) < threshold  # doctest: +SKIP
    """

    def __init__(self, score: str = "knn", **options: Any) -> None:
        self.name = check_choice("score", score, SCORES)
        check_names(f"score {score!r}", options, FITTED[score][1].__kwdefaults__ or {} if score in FITTED else {})
        self._options = {name: check_integer(name, value, 1) for name, value in options.items() if value is not None}
        self._fitted: Any = None

    def fit(self, model: nn.Module, batches: Iterable[Any]) -> Self:
        """Fit the score to a model's outputs for in-distribution data.

        Arguments and errors are those of `model_outputs`, and the errors of `fit_embeddings`.

        Raises:
            ValueError: If the outputs are invalid, or lack what the score needs.
            TypeError: If an output is no dense tensor.
            OSError: If a model or dataset is named that cannot be loaded.
        """
        return self.fit_embeddings(*model_outputs(model, batches)[:3])

    def fit_embeddings(
        self,
        embeddings: Tensor | None,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
    ) -> Self:
        """Fit the score to embeddings (N, d), logits (N, K) and labels (N,) of in-distribution data.

        The numbers `ids` (N,) identify the inputs; see `Outputs`.

        Raises:
            ValueError: If one that the score needs is missing, or one is invalid.
        """
        data: Any = Outputs(embeddings, logits, labels, None, ids).checked()
        if self.name in FITTED:
            needs, fit = FITTED[self.name]
            data.require((*SCORES[self.name].needs, *needs), self.name)
            if "labels" in needs:  # -1 and -100 would be classes of their own
                check_rows(data.labels >= 0, "labels must be at least 0", "have none")
            self._rows = Rows.of(data.embeddings, data.ids)
            self._fitted, self._dim = fit(data, **self._options), data.embeddings.shape[1]
        return self

    def score(self, model: nn.Module, batches: Iterable[Any]) -> Tensor:
        """Return the scores (N,), float64, of a model's outputs; see `model_outputs`."""
        return self._score(model_outputs(model, batches).checked())

    def score_embeddings(
        self,
        embeddings: Tensor | None,
        logits: Tensor | None = None,
        *,
        concentrations: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """Return the scores (N,), float64, of embeddings (N, d), logits (N, K) and concentrations (N,).

        Inputs of the fit are refused; they are recognized by the numbers `ids` (N,), else by their values.

        Raises:
            NotFittedError: If the score must be fitted and was not.
            ValueError: If an argument that the score needs is missing, or one is invalid, or the score was fitted to
                more than one and more than 1 % of the inputs, or to any with the same number.
        """
        return self._score(Outputs(embeddings, logits, None, concentrations, ids).checked())

    def _score(self, data: Any, what: str = "inputs") -> Tensor:
        (needs, values, _), state = SCORES[self.name], self._fitted
        data.require(needs, self.name)
        if self.name not in FITTED:
            return values({}, data)
        if state is None:
            raise NotFittedError(f"the score {self.name} is not fitted. Call `fit` or `fit_embeddings` first.")
        if (dim := data.embeddings.shape[1]) != self._dim:  # a single column would be broadcast
            raise ValueError(f"the embeddings have {dim} columns, but {self._dim} when the score was fitted.")
        of_fit = f"inputs that the score {self.name} was fitted to"
        check_disjoint(Rows.of(data.embeddings, data.ids), self._rows, what, of_fit)
        # Each distinct input once: products of matrices differ in the last digits for equal rows, which breaks ties.
        fields = [getattr(data, name) for name in needs]
        rows, index = torch.cat(fields, 1).unique(dim=0, return_inverse=True)
        most = max(1, NUMBERS_AT_ONCE // max(math.prod(t.shape[:1]) for t in state.values() if isinstance(t, Tensor)))
        sizes = [field.shape[1] for field in fields]
        blocks = (dict(zip(needs, block.split(sizes, 1), strict=True)) for block in rows.split(most))
        return torch.cat([values(state, Outputs(**block)) for block in blocks])[index]


@dataclass(frozen=True)
class OODComparison:
    """Results of `compare_scores`, printed as a table: metrics by score and OOD set, and reasons for skipped scores."""

    results: dict[str, dict[str, dict[str, float]]]
    skipped: dict[str, str]

    def mean(self, score: str, metric: str = "auroc") -> float:
        """Return the mean of a metric of a score over the OOD sets."""
        results = self.results[check_choice("score", score, self.results)]
        return sum(metrics[metric] for metrics in results.values()) / len(results)

    @property
    def best(self) -> str:
        """The score with the highest mean AUROC over the OOD sets."""
        return max(self.results, key=self.mean)

    def __str__(self) -> str:
        lines = [f"{'score':<16}{'AUROC %':>10}{'FPR95 %':>10}{'AUPR %':>10}"]
        for score in sorted(self.results, key=self.mean, reverse=True):
            values = (100 * self.mean(score, metric) for metric in ("auroc", "fpr_at_95_tpr", "aupr"))
            lines.append(f"{score:<16}" + "".join(f"{value:>10.2f}" for value in values))
        lines += [f"{score:<16}skipped: {reason}" for score, reason in self.skipped.items()]
        return "\n".join([*lines, f"Use {self.best}: the highest mean AUROC."])


def compare_scores(
    train: Outputs | None,
    inside: Outputs,
    outside: Mapping[str, Outputs],
    detectors: Mapping[str, OODDetector] | None = None,
) -> OODComparison:
    """Compare scores on held-out in-distribution inputs and sets of OOD inputs.

    Choose a score on other sets than those that its metrics are reported for.

    Args:
        train: Outputs for training data; None for scores that need no fit.
        inside: Outputs for held-out in-distribution inputs.
        outside: Outputs for OOD inputs, by name of the set.
        detectors: Detectors by name, fitted here if there are training data; one of each score by default.

    Raises:
        ValueError: If a value is invalid, no score could be computed, or one was fitted to tested inputs (see
            `OODDetector.score_embeddings`).

    Example:
        >>> train, test, svhn = (model_outputs(model, loader) for loader in loaders)  # doctest: +SKIP
        >>> print(compare_scores(train, test, {"svhn": svhn}))  # doctest: +SKIP
    """
    fitted = None if train is None else train.checked()
    sets = [data.checked() for data in (inside, *outside.values())]
    results: dict[str, dict[str, dict[str, float]]] = {}
    skipped: dict[str, str] = {}
    whats = ("held-out inputs", *(f"inputs {key}" for key in outside))
    for name, detector in ({name: OODDetector(name) for name in SCORES} if detectors is None else detectors).items():
        try:
            if fitted is not None:
                detector.fit_embeddings(*fitted[:3], ids=fitted.ids)
            held_out, *others = map(detector._score, sets, whats)
        except SharedRowsError:
            raise
        except (ValueError, NotFittedError) as error:
            skipped[name] = str(error)
            continue
        results[name] = {key: detection_scores(held_out, other) for key, other in zip(outside, others, strict=True)}
    if not results:
        raise ValueError(f"no score could be computed: {' '.join(skipped.values())}")
    return OODComparison(results, skipped)
