"""What the metrics ask of confidences, scores, embeddings and labels."""

import torch
import torch.nn.functional as F
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


def check_embeddings(embeddings: Tensor, least: int = 1) -> Tensor:
    """Return embeddings (N, d), N >= `least`, as float64 on the CPU, or say what is wrong with them."""
    embeddings = torch.as_tensor(embeddings).detach()
    if embeddings.ndim != 2 or len(embeddings) < least or embeddings.shape[1] == 0:
        raise ValueError(
            f"embeddings must have the shape (N, d) with N >= {least} and d >= 1; got {tuple(embeddings.shape)}."
        )
    if embeddings.is_complex():
        raise TypeError(f"embeddings must be real; got {embeddings.dtype}.")
    embeddings = embeddings.cpu().double()
    finite = embeddings.isfinite().all(-1)
    if not finite.all():
        raise ValueError(
            f"every embedding must be finite; {int((~finite).sum())} of {len(finite)} are not, the first is number "
            f"{int((~finite).nonzero()[0])}."
        )
    return embeddings


def check_directions(embeddings: Tensor, least: int = 1) -> Tensor:
    """Return the directions of embeddings (N, d), unit vectors in float64 on the CPU, or say what is wrong."""
    embeddings = check_embeddings(embeddings, least)
    largest = embeddings.abs().amax(-1, keepdim=True)
    if (largest == 0).any():
        zero = (largest == 0).squeeze(-1)
        raise ValueError(
            f"a zero vector has no direction; {int(zero.sum())} of {len(zero)} embeddings are zero, the first is "
            f"number {int(zero.nonzero()[0])}. Remove them."
        )
    # Squares of the largest numbers would overflow, those of the smallest vanish.
    return F.normalize(embeddings / largest, dim=-1)


def check_classes(labels: Tensor, count: int) -> Tensor:
    """Return the class of each of `count` embeddings as a number from 0 on, (count,) int64, or say what is wrong."""
    labels = torch.as_tensor(labels)
    if labels.shape != (count,):
        raise ValueError(f"labels must have the shape ({count},), one an embedding; got {tuple(labels.shape)}.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers; got {labels.dtype}. Convert them with .long().")
    return labels.cpu().unique(return_inverse=True)[1]
