"""Detection of out-of-distribution inputs by a score, and the comparison of scores."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from sklearn.exceptions import NotFittedError
from torch import Tensor, nn

from hf_sphere.metrics import detection_scores
from hf_sphere.ood.outputs import Outputs, model_outputs
from hf_sphere.ood.scores import SCORES


class OODDetector:
    """A score of inputs that is higher for in-distribution inputs, from the embeddings and logits of a classifier.

    Fit it to training data by `fit` or `fit_embeddings`. The scores `max_softmax`, `max_logit`, `energy`, `norm` and
    `concentration` may also be used unfitted. Computed on the CPU in float64. A fitted detector can be pickled.

    Args:
        score: A key of `hf_sphere.ood.SCORES`: `max_softmax`, `max_logit`, `energy`, `norm` of the embedding,
            `concentration` computed by the model, `knn`, `mahalanobis`, `vim`, or `vmf`.
        **options: Options of the score: the number of neighbors `k` of `knn` (50), the dimension of the principal
            subspace `dim` of `vim`.

    Raises:
        ValueError: If the score or an option is unknown.

    Example:
        >>> detector = OODDetector("knn", k=10).fit(model, train_loader)
        >>> threshold = detector.score(model, validation_loader).quantile(0.05)
        >>> is_unknown = detector.score(model, loader) < threshold
    """

    def __init__(self, score: str = "knn", **options: Any) -> None:
        if score not in SCORES:
            raise ValueError(f"unknown score {score!r}; the scores are: {', '.join(SCORES)}.")
        known = [field.name for field in fields(SCORES[score])]
        if unknown := sorted(set(options) - set(known)):
            raise ValueError(
                f"score {score!r} has no option {', '.join(unknown)}; its options are: {', '.join(known) or 'none'}."
            )
        self.name = score
        self._score = SCORES[score](**options)
        self._widths: dict[str, int] = {}

    def fit(self, model: nn.Module, batches: Iterable[Any]) -> Self:
        """Fit the score to a model's outputs for in-distribution data; see `model_outputs`."""
        return self._fit(model_outputs(model, batches))

    def fit_embeddings(
        self, embeddings: Tensor | None, logits: Tensor | None = None, labels: Tensor | None = None
    ) -> Self:
        """Fit the score to in-distribution data, tensors or arrays.

        Args:
            embeddings: (N, d), if the score uses them.
            logits: (N, K), if the score uses them.
            labels: (N,), integers; only `mahalanobis` and `vmf` use them.

        Raises:
            ValueError: If an argument that the score needs is missing or invalid.
        """
        return self._fit(Outputs(embeddings, logits, labels))

    def score(self, model: nn.Module, batches: Iterable[Any]) -> Tensor:
        """Return the scores (N,), float64, of a model's outputs; see `model_outputs`."""
        return self._compute(model_outputs(model, batches))

    def score_embeddings(
        self, embeddings: Tensor | None, logits: Tensor | None = None, *, concentrations: Tensor | None = None
    ) -> Tensor:
        """Return the scores (N,), float64.

        Args:
            embeddings: (N, d), if the score uses them.
            logits: (N, K), if the score uses them.
            concentrations: (N,), for the score `concentration`.

        Raises:
            NotFittedError: If the score must be fitted and was not.
            ValueError: If an argument that the score needs is missing or invalid.
        """
        return self._compute(Outputs(embeddings, logits, None, concentrations))

    def _fit(self, data: Outputs) -> Self:
        data = self._check(data, skip=() if self._score.fits else self._score.needs)
        self._score._fit(data)
        self._widths = {name: values.shape[1] for name, values in data._asdict().items() if _is_matrix(values)}
        return self

    def _compute(self, data: Outputs) -> Tensor:
        if self._score.fits and not self._widths:
            raise NotFittedError(f"the score {self.name} is not fitted. Call `fit` or `fit_embeddings` first.")
        data = self._check(data, skip=("labels",))
        for name, width in self._widths.items():
            found = getattr(data, name)
            if found is not None and found.shape[1] != width:
                raise ValueError(f"the {name} have {found.shape[1]} columns, but {width} when the score was fitted.")
        return self._score._compute(data)

    def _check(self, data: Outputs, skip: Sequence[str]) -> Outputs:
        missing = [name for name in self._score.needs if name not in skip and getattr(data, name) is None]
        if missing:
            raise ValueError(f"the score {self.name} needs {' and '.join(missing)}, which the data do not have.")
        return data.checked()


def _is_matrix(values: Any) -> bool:
    return values is not None and values.ndim == 2


@dataclass(frozen=True)
class Comparison:
    """Results of `compare_scores`, printed as a table.

    Attributes:
        results: Metrics of `detection_scores`, by score and OOD set.
        skipped: Reasons why scores were not computed, by score.
    """

    results: dict[str, dict[str, dict[str, float]]]
    skipped: dict[str, str]

    def mean(self, score: str, metric: str = "auroc") -> float:
        """Return the mean of a metric of a score over the OOD sets."""
        return sum(metrics[metric] for metrics in self.results[score].values()) / len(self.results[score])

    @property
    def best(self) -> str:
        """The score with the highest mean AUROC over the OOD sets."""
        return max(self.results, key=self.mean)

    def __str__(self) -> str:
        ranked = sorted(self.results, key=self.mean, reverse=True)
        lines = [f"{'score':<16}{'AUROC %':>10}{'FPR95 %':>10}{'AUPR %':>10}"]
        for score in ranked:
            values = (100 * self.mean(score, metric) for metric in ("auroc", "fpr_at_95_tpr", "aupr"))
            lines.append(f"{score:<16}" + "".join(f"{value:>10.2f}" for value in values))
        lines += [f"{score:<16}skipped: {reason}" for score, reason in self.skipped.items()]
        return "\n".join([*lines, f"Use {self.best}: the highest mean AUROC."])


def compare_scores(
    train: Outputs | None,
    inside: Outputs,
    outside: Mapping[str, Outputs],
    detectors: Sequence[OODDetector] | None = None,
) -> Comparison:
    """Compare scores on held-out in-distribution inputs and sets of OOD inputs.

    The choice of a score is specific to the kind of OOD inputs: choose it on sets other than those that the reported
    metrics are measured on.

    Args:
        train: Outputs for training data, with labels; None to compare only scores that need no fit.
        inside: Outputs for held-out in-distribution inputs.
        outside: Outputs for OOD inputs, by name of the set.
        detectors: Detectors, which are fitted; one of each score by default.

    Raises:
        ValueError: If there is no OOD set, a value is invalid, or no score could be computed.

    Example:
        >>> print(compare_scores(*(model_outputs(model, loader) for loader in (train, test)), {"svhn": svhn_outputs}))
    """
    if not outside:
        raise ValueError("outside must have at least one set of OOD inputs; got none.")
    sets = {name: data.checked() for name, data in {"": inside, **outside}.items()}
    train = None if train is None else train.checked()
    results: dict[str, dict[str, dict[str, float]]] = {}
    skipped: dict[str, str] = {}
    for detector in [OODDetector(name) for name in SCORES] if detectors is None else detectors:
        try:
            if train is not None:
                detector._fit(train)
            own, *others = (detector._compute(data) for data in sets.values())
        except (ValueError, NotFittedError) as error:
            skipped[detector.name] = str(error)
            continue
        results[detector.name] = {
            name: detection_scores(own, scores) for name, scores in zip(outside, others, strict=True)
        }
    if not results:
        raise ValueError(f"no score could be computed: {' '.join(skipped.values())}")
    return Comparison(results, skipped)
