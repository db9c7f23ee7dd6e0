"""Which answers to trust: error among the most confident ones."""

import torch
from torch import Tensor

from hf_sphere.metrics.checks import check_confidences, mean_over_ties


def risk_coverage(confidences: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Error among the most confident answers, for every share of them.

    El-Yaniv, Wiener, "On the Foundations of Noise-free Selective Classification", JMLR 2010. Within answers of one
    confidence the error is the mean over all orders of them, so that the order in which they are given does not matter.

    Args:
        confidences: (N,), higher where an answer is more trusted; any numbers, for instance concentrations.
        correct: (N,), whether each answer is right; boolean, or 0 and 1.

    Returns:
        Coverage 1/N, 2/N, ..., 1, and risk: the share of wrong answers among that share of the most confident ones.
        Both (N,), float64, on the CPU.

    Raises:
        ValueError: If the shapes are not (N,) with one N >= 1, a confidence is NaN, or `correct` has other values than
            0 and 1.
    """
    confidences, correct = check_confidences(confidences, correct)
    wrong = (1 - mean_over_ties(confidences, correct))[confidences.argsort(descending=True)]
    covered = torch.arange(1, len(wrong) + 1, dtype=torch.float64)
    return covered / len(wrong), wrong.cumsum(0) / covered


def area_under_risk_coverage(confidences: Tensor, correct: Tensor) -> float:
    """Mean of the risk over all coverages; lower is better.

    Geifman, Uziel, El-Yaniv, "Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers", ICLR 2019.

    Args:
        confidences: (N,), higher where an answer is more trusted.
        correct: (N,), whether each answer is right; boolean, or 0 and 1.

    Returns:
        The area, in [0, 1].

    Raises:
        ValueError: As `risk_coverage` does.
    """
    return float(risk_coverage(confidences, correct)[1].mean())
