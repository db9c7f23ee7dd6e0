"""Selective prediction: risk among the most confident predictions."""

import torch
from torch import Tensor

from hf_sphere.geometry.checks import check_confidences
from hf_sphere.utils.checks import check_integer


def mean_over_ties(confidences: Tensor, correct: Tensor) -> Tensor:
    """Return, for each prediction, the accuracy of the predictions with the same confidence, (N,), (N,) -> (N,)."""
    _, group, count = confidences.unique(return_inverse=True, return_counts=True)
    return (torch.bincount(group, weights=correct) / count)[group]


def risk_coverage(confidences: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the risk-coverage curve: the error rate among the most confident predictions, at every coverage.

    El-Yaniv, Wiener, "On the Foundations of Noise-free Selective Classification", JMLR 2010. Tied predictions count
    with the mean over all their orders, so the result does not depend on the order of the input.

    Args:
        confidences: (N,), higher for more certain predictions; any numbers, for instance concentrations.
        correct: (N,), whether each prediction is correct; boolean, or 0 and 1.

    Returns:
        Coverage 1/N, 2/N, ..., 1, and risk: the error rate among that fraction of predictions, the most confident ones.
        Both (N,), float64, on the CPU.

    Raises:
        ValueError: If the shapes are not (N,) with the same N >= 1, a confidence is NaN, or `correct` is not 0 or 1.

    Example:
        >>> coverage, risk = risk_coverage(torch.tensor([0.9, 0.6]), torch.tensor([1, 0]))
        >>> risk.tolist()
        [0.0, 0.5]
    """
    confidences, correct = check_confidences(confidences, correct)
    wrong = (1 - mean_over_ties(confidences, correct))[confidences.argsort(descending=True)]
    covered = torch.arange(1, len(wrong) + 1, dtype=torch.float64)
    return covered / len(wrong), wrong.cumsum(0) / covered


def area_under_risk_coverage(confidences: Tensor, correct: Tensor) -> float:
    """Compute the area under the risk-coverage curve (AURC), the mean risk over all coverages; lower is better.

    Geifman, Uziel, El-Yaniv, "Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers", ICLR 2019. It is in
    [0, 1]. For arguments and errors, see `risk_coverage`.

    Example:
        >>> round(area_under_risk_coverage(torch.tensor([0.9, 0.8, 0.6]), torch.tensor([1, 1, 0])), 4)
        0.1111
    """
    return float(risk_coverage(confidences, correct)[1].mean())


def accuracy_by_certainty(confidences: Tensor, correct: Tensor, num_groups: int = 10) -> list[float]:
    """Compute the accuracy of groups of equal size (up to one) in increasing order of confidence, such as deciles.

    Tied predictions count with the mean over all their orders, as in `risk_coverage`, whose arguments and errors these
    are. There is at most one group per prediction, and `num_groups` is positive.

    Example:
        >>> accuracy_by_certainty(torch.tensor([0.9, 0.8, 0.6, 0.5]), torch.tensor([1, 1, 1, 0]), num_groups=2)
        [0.5, 1.0]
    """
    confidences, correct = check_confidences(confidences, correct)
    num_groups = check_integer("num_groups", num_groups, 1)
    right = mean_over_ties(confidences, correct)[confidences.argsort()]
    return [float(group.mean()) for group in right.tensor_split(min(num_groups, len(right)))]
