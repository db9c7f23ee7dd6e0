"""Out-of-distribution (OOD) detection: how well a score separates in-distribution from OOD inputs."""

import torch
from torch import Tensor

from hf_sphere.geometry.checks import check_scores


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
