"""Metrics of scores: calibration of confidences, selective prediction, and out-of-distribution (OOD) detection."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.geometry.checks import check_confidences, check_embeddings, check_labels, check_scores, to_tensor
from hf_sphere.utils.checks import check_choice, check_integer, check_number

Binning = Literal["equal_mass", "equal_width"]


@dataclass(frozen=True, eq=False)  # the comparison of tensors has no single truth value
class ReliabilityBins:
    """Data of a reliability diagram: predictions in bins of increasing confidence.

    Attributes:
        confidence: (B,), mean confidence per bin, float64; NaN for empty bins.
        accuracy: (B,), accuracy per bin, float64; NaN for empty bins.
        count: (B,), number of predictions per bin, int64.
    """

    confidence: Tensor
    accuracy: Tensor
    count: Tensor

    def error(self, norm: float) -> float:
        """Return the calibration error `(sum_b n_b |acc_b - conf_b|^norm / N)^(1 / norm)`, in [0, 1]."""
        filled = self.count > 0
        gaps = (self.accuracy - self.confidence)[filled].abs() ** norm
        return float(((gaps * self.count[filled]).sum() / self.count.sum()) ** (1 / norm))


def mean_over_ties(confidences: Tensor, correct: Tensor) -> Tensor:
    """Return, for each prediction, the accuracy of the predictions with the same confidence, (N,), (N,) -> (N,)."""
    _, group, count = confidences.unique(return_inverse=True, return_counts=True)
    return (torch.bincount(group, weights=correct) / count)[group]


def reliability_bins(
    confidences: Tensor, correct: Tensor, *, num_bins: int = 15, binning: Binning = "equal_mass"
) -> ReliabilityBins:
    """Group predictions into bins by confidence.

    Tied predictions count with their mean accuracy, so the result does not depend on their order, even if they fall
    into different bins.

    Args:
        confidences: (N,), predicted probability that each prediction is correct, in [0, 1].
        correct: (N,), whether it is; boolean, or 0 and 1.
        num_bins: Number of bins B.
        binning: `equal_mass`: the same number of predictions in each bin, up to rounding; if there are fewer
            predictions than bins, some bins are empty. `equal_width`: the intervals [0, 1/B], (1/B, 2/B], ...,
            ((B-1)/B, 1], whose ends are rounded as the confidences are: k/B of any floating-point dtype, also a float32
            number in float64, is in the bin that ends there.

    Returns:
        Confidence, accuracy and count per bin, on the CPU.

    Raises:
        ValueError: If the shapes are not (N,) with the same N >= 1, a confidence is outside [0, 1], `correct` has
            values other than 0 and 1, `num_bins` is not an integer of at least 1, or the binning is unknown.

    Example:
        >>> reliability_bins(torch.tensor([0.9, 0.8, 0.6, 0.5]), torch.tensor([1, 1, 1, 0]), num_bins=2).accuracy
        tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    confidences = to_tensor("confidences", confidences)
    dtype = confidences.dtype
    confidences, correct = check_confidences(confidences, correct)
    if not ((confidences >= 0) & (confidences <= 1)).all():
        low, high = confidences.min().item(), confidences.max().item()
        raise ValueError(f"confidences must be probabilities, in [0, 1]; got {low:g} to {high:g}.")
    num_bins = check_integer("num_bins", num_bins, 1)
    if check_choice("binning", binning, get_args(Binning)) == "equal_mass":
        total = len(confidences)
        rank = torch.empty(total, dtype=torch.float64)
        rank[confidences.argsort()] = torch.arange(total, dtype=torch.float64)
        # Same order of operations as the authors' code of the vMF paper; exact arithmetic would move some boundaries by
        # one prediction, for instance 29/50 of 2,000.
        bins = (rank / total * num_bins).long()
    else:
        inner = torch.arange(1, num_bins, dtype=torch.float64) / num_bins
        narrow = dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32
        rounded = torch.bucketize(confidences, inner.to(narrow).double())
        bins = torch.where(confidences == confidences.to(narrow), rounded, torch.bucketize(confidences, inner))
    count = torch.bincount(bins, minlength=num_bins)
    both = (confidences, mean_over_ties(confidences, correct))
    confidence, accuracy = (torch.bincount(bins, values, num_bins) / count for values in both)
    return ReliabilityBins(confidence, accuracy, count)


def expected_calibration_error(
    confidences: Tensor, correct: Tensor, *, num_bins: int = 15, norm: float = 1, binning: Binning = "equal_width"
) -> float:
    """Compute the expected calibration error over bins, `(sum_b n_b |acc_b - conf_b|^norm / N)^(1 / norm)`.

    The defaults are from Guo, Pleiss, Sun, Weinberger, ICML 2017, with 15 bins; `calibration_errors` also computes
    it with bins of equal mass and exponent 2. It is in [0, 1]; lower is better. For arguments and errors, see
    `reliability_bins`, besides the exponent `norm`, which is finite and at least 1.

    Example:
        >>> expected_calibration_error(torch.tensor([0.75, 0.75]), torch.tensor([1, 0]))
        0.25
    """
    check_number("norm", norm, "[1, inf)")
    return reliability_bins(confidences, correct, num_bins=num_bins, binning=binning).error(norm)


def calibration_errors(confidences: Tensor, correct: Tensor) -> dict[str, float]:
    """Compute the calibration error by the two common definitions, whose values are not comparable.

    For arguments and errors, see `reliability_bins`.

    Returns:
        `calibration_error_equal_mass_l2`: 15 bins of equal mass, exponent 2 (Scott, Gallagher, Mozer, ICCV 2021).
        `calibration_error_equal_width_l1`: 15 bins of equal width, exponent 1 (Guo, Pleiss, Sun, Weinberger, "On
        Calibration of Modern Neural Networks", ICML 2017).

    Example:
        >>> calibration_errors(torch.tensor([1.0, 1.0]), torch.tensor([1, 1])).keys()
        dict_keys(['calibration_error_equal_mass_l2', 'calibration_error_equal_width_l1'])
    """
    mass = expected_calibration_error(confidences, correct, norm=2, binning="equal_mass")
    width = expected_calibration_error(confidences, correct)
    return {"calibration_error_equal_mass_l2": mass, "calibration_error_equal_width_l1": width}


def probability_scores(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute scores of the softmax probabilities of logits (N, K) for labels (N,).

    Returns:
        `nll`: mean negative log-likelihood, in nats; `brier`: mean squared distance between the probabilities and the
        one-hot label, in [0, 2] (Brier, 1950); and `calibration_errors` of the largest probabilities.

    Raises:
        ValueError: If a shape or a label is invalid, or a logit is not finite.

    Example:
        >>> round(probability_scores(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))["nll"], 4)
        0.7201
    """
    logits = check_embeddings(logits, what="logits").cpu().double()
    labels = check_labels(labels, len(logits)).cpu()
    if labels.min() < 0 or labels.max() >= logits.shape[1]:
        raise ValueError(f"labels must be from 0 to {logits.shape[1] - 1}; got {labels.min()} to {labels.max()}.")
    probabilities = logits.softmax(1)
    confidences, predictions = probabilities.max(1)
    squares = (probabilities - F.one_hot(labels, logits.shape[1])).square()
    scores = {"nll": F.cross_entropy(logits, labels).item(), "brier": squares.sum(1).mean().item()}
    return scores | calibration_errors(confidences.clamp(max=1.0), predictions == labels)


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


def detection_scores(inside: Tensor, outside: Tensor) -> dict[str, float]:
    """Compute AUROC, FPR95 and AUPR of a score that should be higher for in-distribution inputs.

    After Hendrycks, Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural
    Networks", ICLR 2017.

    Args:
        inside: (N,), scores of in-distribution inputs, the positives.
        outside: (M,), scores of out-of-distribution inputs, the negatives.

    Returns:
        `auroc`: area under the ROC curve, the probability that an in-distribution input scores higher than an
        out-of-distribution one, with ties counted half; 1 is best.
        `fpr_at_95_tpr`: false-positive rate at a true-positive rate of 95 % (FPR95), the fraction of OOD inputs at or
        above the highest threshold that at least 95 % of the in-distribution inputs reach; 0 is best.
        `aupr`: area under the precision-recall curve with the in-distribution inputs as positives, as a sum over steps
        (average precision); 1 is best, and a constant score has N / (N + M).

    Raises:
        ValueError: If the shapes are not (N,) and (M,) with N, M >= 1, or a score is NaN.

    Example:
        >>> detection_scores(inside=torch.tensor([3.0, 2.0, 1.0]), outside=torch.tensor([1.5, 0.0]))
        {'auroc': 0.8333333333333334, 'fpr_at_95_tpr': 0.5, 'aupr': 0.9166666666666666}
    """
    inside, outside = check_scores("inside", inside), check_scores("outside", outside).sort().values
    below = torch.searchsorted(outside, inside)
    not_above = torch.searchsorted(outside, inside, right=True)
    # Integers before the division, so that the result is exact for any N and M.
    twice_won = int(below.sum()) + int(not_above.sum())
    accepted = -(-95 * len(inside) // 100)
    threshold = inside.sort(descending=True).values[accepted - 1]
    levels, counts = inside.unique(return_counts=True)
    reached = counts.flip(0).cumsum(0).flip(0)  # number of in-distribution scores at or above each level
    precisions = reached / (reached + len(outside) - torch.searchsorted(outside, levels)).double()
    return {
        "auroc": twice_won / (2 * len(inside) * len(outside)),
        "fpr_at_95_tpr": int((outside >= threshold).sum()) / len(outside),
        "aupr": float((counts * precisions).sum() / len(inside)),
    }
