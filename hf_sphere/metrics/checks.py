"""Validation of the confidences, scores, embeddings and labels that the metrics receive."""

import torch
from torch import Tensor

from hf_sphere.geometry.checks import check_codes, to_floating, to_tensor
from hf_sphere.geometry.manifold import project_to_sphere


def check_scores(name: str, scores: Tensor) -> Tensor:
    """Return valid scores (N,), N >= 1, as float64 on the CPU."""
    scores = to_floating(name, to_tensor(name, scores).detach().cpu())
    if scores.ndim != 1 or len(scores) == 0:
        raise ValueError(f"{name} must have the shape (N,) with N >= 1; got {tuple(scores.shape)}.")
    scores = scores.double()
    if scores.isnan().any():
        raise ValueError(f"{name} must not be NaN; index {int(scores.isnan().nonzero()[0])} is. Remove or replace it.")
    return scores


def check_correct(correct: Tensor, count: int) -> Tensor:
    """Return whether each prediction is correct, (count,), as zeros and ones in float64 on the CPU."""
    correct = check_scores("correct", correct)
    if len(correct) != count:
        raise ValueError(f"correct must have the shape ({count},), one per prediction; got {tuple(correct.shape)}.")
    if not ((correct == 0) | (correct == 1)).all():
        raise ValueError("correct must be boolean, or 0 and 1; got other values. Compute predictions == labels.")
    return correct


def check_confidences(confidences: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Return confidences and whether each prediction is correct, (N,) each, as float64 on the CPU."""
    confidences = check_scores("confidences", confidences)
    return confidences, check_correct(correct, len(confidences))


def mean_over_ties(confidences: Tensor, correct: Tensor) -> Tensor:
    """Return, for each prediction, the accuracy of the predictions with the same confidence, (N,), (N,) -> (N,).

    With it instead of `correct`, sums over bins and cumulative sums in the order of the confidences are their means
    over all orders of tied predictions. Metrics that are not linear in these sums, such as the expected calibration
    error, are those of the mean sums, not their own means.
    """
    _, group, count = confidences.unique(return_inverse=True, return_counts=True)
    return (torch.bincount(group, weights=correct) / count)[group]


def check_embeddings(embeddings: Tensor, min_count: int = 1, what: str = "embeddings") -> Tensor:
    """Return valid embeddings (N, d), N >= `min_count`, d >= 1, on their device; integers become float64."""
    embeddings = to_tensor(what, embeddings).detach()
    check_codes(what, embeddings.dtype)
    embeddings = to_floating(what, embeddings)
    if embeddings.ndim != 2 or len(embeddings) < min_count or embeddings.shape[1] == 0:
        shape = f"(N, d) with N >= {min_count} and d >= 1"
        raise ValueError(f"{what} must have the shape {shape}; got {tuple(embeddings.shape)}.")
    largest = torch.linalg.vector_norm(embeddings, torch.inf, dim=-1)  # which makes no copy, as isfinite does
    check_rows(largest.isfinite(), f"{what} must be finite", "are not")
    return embeddings


def check_directions(embeddings: Tensor, min_count: int = 1, what: str = "embeddings") -> Tensor:
    """Return the directions of embeddings (N, d), unit vectors in float64 on the CPU."""
    embeddings = check_embeddings(embeddings, min_count, what).cpu().double()
    check_rows(embeddings.any(-1), "a zero vector has no direction", f"{what} are zero")
    return project_to_sphere(embeddings)


def check_rows(valid: Tensor, rule: str, problem: str) -> None:
    """Raise a ValueError with the first row that is not valid, (N,)."""
    if count := int((~valid).sum()):
        first = int(valid.logical_not().nonzero()[0])
        raise ValueError(f"{rule}; {count} of {len(valid)} {problem}, the first at index {first}. Remove them.")


def check_labels(labels: Tensor, count: int, what: str = "labels") -> Tensor:
    """Return valid labels (count,), of any integer dtype, as int64."""
    labels = to_tensor(what, labels, "integers")
    if labels.shape != (count,):
        raise ValueError(f"{what} must have the shape ({count},), one per embedding; got {tuple(labels.shape)}.")
    if labels.is_floating_point():
        check_rows(labels.isfinite(), f"{what} must be integers", "are missing or not finite")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"{what} must be integers; got {labels.dtype}. Convert them with .long().")
    return labels.long()


def check_classes(labels: Tensor, count: int) -> Tensor:
    """Return the labels (count,) renumbered as class indices 0, 1, ..., int64 on the CPU."""
    return check_labels(labels, count).cpu().unique(return_inverse=True)[1]
