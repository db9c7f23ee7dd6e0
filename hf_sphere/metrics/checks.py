"""What the metrics ask of confidences and scores."""

import torch
from torch import Tensor


def check_scores(name: str, scores: Tensor) -> Tensor:
    """Return N >= 1 scores as float64 on the CPU, or say what is wrong with them."""
    scores = torch.as_tensor(scores).detach()
    if scores.ndim != 1 or len(scores) == 0:
        raise ValueError(f"{name} must have the shape (N,) with N >= 1; got {tuple(scores.shape)}.")
    scores = scores.cpu().double()
    if scores.isnan().any():
        raise ValueError(f"{name} must not be NaN; number {int(scores.isnan().nonzero()[0])} is. Remove or replace it.")
    return scores


def check_confidences(confidences: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Return confidences and whether each answer is right as float64 on the CPU, or say what is wrong with them."""
    confidences = check_scores("confidences", confidences)
    correct = check_scores("correct", correct)
    if len(confidences) != len(correct):
        raise ValueError(f"got {len(confidences)} confidences for {len(correct)} answers; both must be as many.")
    if not ((correct == 0) | (correct == 1)).all():
        raise ValueError("correct must be boolean, or 0 and 1; got other values. Compare predictions and labels by ==.")
    return confidences, correct


def mean_over_ties(confidences: Tensor, correct: Tensor) -> Tensor:
    """Share of right answers among those of the same confidence, (N,), (N,) -> (N,).

    With it in the place of the answers, what is cut or summed in the order of confidence is the mean over all orders
    of those that are tied, and no longer depends on the order in which they are given.
    """
    _, group, count = confidences.unique(return_inverse=True, return_counts=True)
    return (torch.bincount(group, weights=correct) / count)[group]
