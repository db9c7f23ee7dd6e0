"""Can a score tell known inputs from foreign ones?"""

import torch
from torch import Tensor

from hf_sphere.metrics.checks import check_scores


def detection_scores(inside: Tensor, outside: Tensor) -> dict[str, float]:
    """How well a score that is higher for known inputs tells them from foreign ones.

    After Hendrycks, Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural
    Networks", ICLR 2017.

    Args:
        inside: (N,), scores of inputs from the training distribution.
        outside: (M,), scores of other inputs.

    Returns:
        `auroc`: probability that a known input scores higher than a foreign one, ties counted half; 1 is best.
        `fpr_at_95`: share of foreign inputs at or above the highest threshold that at least 95 % of the known ones
        reach; 0 is best.

    Raises:
        ValueError: If the shapes are not (N,) and (M,) with N, M >= 1, or a score is NaN.
    """
    inside, outside = check_scores("inside", inside), check_scores("outside", outside).sort().values
    below = torch.searchsorted(outside, inside)
    not_above = torch.searchsorted(outside, inside, right=True)
    # Whole numbers up to the end: exact for any N and M.
    twice_won = int(below.sum()) + int(not_above.sum())
    kept = -(-95 * len(inside) // 100)
    threshold = inside.sort(descending=True).values[kept - 1]
    return {
        "auroc": twice_won / (2 * len(inside) * len(outside)),
        "fpr_at_95": int((outside >= threshold).sum()) / len(outside),
    }
