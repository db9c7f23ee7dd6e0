"""Does a confidence of 80 % mean that 80 % of the answers are right?"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hf_sphere.metrics.checks import check_confidences, mean_over_ties

Binning = Literal["equal_mass", "equal_width"]


@dataclass(frozen=True, eq=False)  # tensors do not compare to one truth value
class ReliabilityBins:
    """A reliability diagram: answers in bins of similar confidence, from the least to the most confident.

    Attributes:
        confidence: (B,), mean confidence of each bin, float64; NaN where a bin is empty.
        accuracy: (B,), share of right answers of each bin, float64; NaN where a bin is empty.
        count: (B,), answers in each bin, int64.
    """

    confidence: Tensor
    accuracy: Tensor
    count: Tensor

    def error(self, norm: float) -> float:
        """Distance of accuracy and confidence, `(sum_b n_b |acc_b - conf_b|^norm / N)^(1 / norm)`, in [0, 1]."""
        filled = self.count > 0
        gaps = (self.accuracy - self.confidence)[filled].abs() ** norm
        return float(((gaps * self.count[filled]).sum() / self.count.sum()) ** (1 / norm))


def reliability_bins(
    confidences: Tensor, correct: Tensor, *, num_bins: int = 15, binning: Binning = "equal_mass"
) -> ReliabilityBins:
    """Group answers by confidence.

    Answers of one confidence count with their common accuracy, so that the result does not depend on their order where
    a bin ends among them.

    Args:
        confidences: (N,), probability in [0, 1] that each answer is right.
        correct: (N,), whether it is; boolean, or 0 and 1.
        num_bins: Number of bins B.
        binning: `equal_mass`: bins of as many answers each, to one; with fewer answers than bins some are empty.
            `equal_width`: the intervals [0, 1/B], (1/B, 2/B], ..., ((B-1)/B, 1].

    Returns:
        Confidence, accuracy and count of each bin, on the CPU.

    Raises:
        ValueError: If the shapes are not (N,) with one N >= 1, a confidence is outside of [0, 1], `correct` has other
            values than 0 and 1, `num_bins` is not an integer of at least 1, or there is no such binning.
    """
    confidences, correct = check_confidences(confidences, correct)
    if not ((confidences >= 0) & (confidences <= 1)).all():
        low, high = confidences.min().item(), confidences.max().item()
        raise ValueError(f"confidences must be probabilities, in [0, 1]; got {low:g} to {high:g}.")
    if not isinstance(num_bins, int) or num_bins < 1:
        raise ValueError(f"num_bins must be an integer of at least 1; got {num_bins!r}.")
    if binning == "equal_mass":
        answers = len(confidences)
        rank = torch.empty(answers, dtype=torch.float64)
        rank[confidences.argsort()] = torch.arange(answers, dtype=torch.float64)
        # The program of the vMF paper cuts in this order of operations; an exact quotient would cut one answer later
        # at some boundaries, for instance at 29/50 of 2,000.
        bins = (rank / answers * num_bins).long()
    elif binning == "equal_width":
        inner = torch.arange(1, num_bins, dtype=torch.float64) / num_bins  # rounded as a confidence k / n is
        bins = torch.bucketize(confidences, inner)
    else:
        raise ValueError(f"no binning {binning!r}; there are equal_mass, equal_width.")
    count = torch.bincount(bins, minlength=num_bins)
    sums = [
        torch.bincount(bins, weights=values, minlength=num_bins)
        for values in (confidences, mean_over_ties(confidences, correct))
    ]
    return ReliabilityBins(sums[0] / count, sums[1] / count, count)


def expected_calibration_error(
    confidences: Tensor, correct: Tensor, *, num_bins: int = 15, norm: float = 2, binning: Binning = "equal_mass"
) -> float:
    """Distance of accuracy and confidence over bins, `(sum_b n_b |acc_b - conf_b|^norm / N)^(1 / norm)`.

    The defaults are those of Scott, Gallagher, Mozer, "von Mises-Fisher Loss: An Exploration of Embedding Geometries
    for Supervised Learning", ICCV 2021, after Nixon et al., "Measuring Calibration in Deep Learning", 2019.

    Args:
        confidences: (N,), probability in [0, 1] that each answer is right.
        correct: (N,), whether it is; boolean, or 0 and 1.
        num_bins: Number of bins.
        norm: Exponent, at least 1; with 1 the mean distance.
        binning: How the bins are cut, see `reliability_bins`.

    Returns:
        The error, in [0, 1]; lower is better.

    Raises:
        ValueError: If `norm` is not finite and at least 1, and as `reliability_bins` does.
    """
    if not (norm >= 1 and math.isfinite(norm)):
        raise ValueError(f"norm must be finite and at least 1; got {norm}.")
    return reliability_bins(confidences, correct, num_bins=num_bins, binning=binning).error(norm)


def calibration_errors(confidences: Tensor, correct: Tensor) -> dict[str, float]:
    """Calibration error by the two definitions in use; they differ too much to share a name.

    Args:
        confidences: (N,), probability in [0, 1] that each answer is right.
        correct: (N,), whether it is; boolean, or 0 and 1.

    Returns:
        `calibration_error_equal_mass_l2`: 15 bins of as many answers, exponent 2 (Scott, Gallagher, Mozer, ICCV 2021).
        `calibration_error_equal_width_l1`: 15 bins of one width, exponent 1 (Guo, Pleiss, Sun, Weinberger, "On
        Calibration of Modern Neural Networks", ICML 2017).

    Raises:
        ValueError: As `reliability_bins` does.
    """
    return {
        "calibration_error_equal_mass_l2": expected_calibration_error(confidences, correct),
        "calibration_error_equal_width_l1": expected_calibration_error(
            confidences, correct, norm=1, binning="equal_width"
        ),
    }
