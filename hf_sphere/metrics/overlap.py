"""Where examples of different classes are represented so alike that they lie on top of each other."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from hf_sphere.metrics.checks import check_classes, check_directions, check_embeddings, check_scores

OverlapDistance = Literal["angular", "euclidean"]

BYTES_IN_MEMORY = 2**27
"""About how much the distances in hand take."""


@torch.no_grad()
def class_overlap(
    points: Tensor,
    labels: Tensor,
    correct: Tensor,
    *,
    threshold: float,
    distance: OverlapDistance = "angular",
) -> dict[str, float]:
    """Count the examples whose representation lies at that of an example of another class.

    An example overlaps if the representation of an example of another class is nearer than the threshold. The share of
    misclassified examples among them says how far a classifier can still tell such classes apart. The paper publishes
    these counts, but neither its threshold nor the program: compare numbers of one threshold with each other.

    Computed on the CPU, block by block. Distances are compared with the threshold to the rounding of float64, however
    small they are.

    Args:
        points: Representations, (N, d), finite, of any real dtype.
        labels: (N,), class of each example; any integers.
        correct: (N,), whether each example is classified correctly; boolean, or 0 and 1.
        threshold: In degrees, up to 180, for `angular`; in the unit of the points for `euclidean`.
        distance: `angular`, the angle between two points, or `euclidean`.

    Returns:
        `num_overlaps`, examples that overlap; `num_pairs`, pairs of examples of different classes that are nearer than
        the threshold; `num_errors`, overlapping examples that are misclassified; `ratio`, the share of these among the
        overlapping ones, in [0, 1], and 0 if there are none.

    Raises:
        TypeError: If the points are complex or the labels are not integers.
        ValueError: If a shape is wrong, a point is not finite or, for `angular`, zero, `correct` has other values than
            0 and 1, the threshold is not possible, or there is no such distance.

    Reference:
        Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022, comparison with angle-based
        operators.
    """
    if distance not in get_args(OverlapDistance):
        raise ValueError(f"no distance {distance!r}; there are {', '.join(get_args(OverlapDistance))}.")
    if not 0 < threshold < math.inf or (distance == "angular" and threshold > 180):
        range_ = "in degrees, above 0 and up to 180" if distance == "angular" else "positive and finite"
        raise ValueError(f"threshold of the {distance} distance must be {range_}; got {threshold}.")
    points = check_directions(points) if distance == "angular" else check_embeddings(points)
    labels = check_classes(labels, len(points))
    correct = check_scores("correct", correct)
    if len(correct) != len(points):
        raise ValueError(f"correct must have the shape ({len(points)},), one an embedding; got {tuple(correct.shape)}.")
    if not ((correct == 0) | (correct == 1)).all():
        raise ValueError("correct must be boolean, or 0 and 1; got other values. Compare predictions and labels by ==.")
    if distance == "angular":
        threshold = 2 * math.sin(math.radians(threshold) / 2)  # the chord, which is exact also for small angles
    overlaps, num_pairs = torch.zeros(len(points), dtype=torch.bool), 0
    step = max(1, BYTES_IN_MEMORY // (32 * len(points)))
    for first in range(0, len(points), step):
        last = first + step
        near = _near(points[first:last], points[first:], threshold)
        near &= labels[first:last, None] != labels[first:]
        near.triu_()  # each pair once
        num_pairs += int(near.sum())
        overlaps[first:last] |= near.any(1)
        overlaps[first:] |= near.any(0)
    num_overlaps, num_errors = int(overlaps.sum()), int((overlaps & (correct == 0)).sum())
    return {
        "num_overlaps": num_overlaps,
        "num_pairs": num_pairs,
        "num_errors": num_errors,
        "ratio": num_errors / num_overlaps if num_overlaps else 0.0,
    }


def _near(rows: Tensor, columns: Tensor, threshold: float) -> Tensor:
    """Which of two sets of points, (R, d) and (C, d), are nearer than the threshold: bool, (R, C)."""
    products = rows @ columns.T
    sizes = rows.square().sum(1)[:, None] + columns.square().sum(1)
    excess = sizes - 2 * products - threshold**2
    near = excess < 0
    # A difference of squares cannot tell these few; the difference of the points can.
    doubtful = (excess.abs() <= 4 * rows.shape[1] * torch.finfo(rows.dtype).eps * (sizes + threshold**2)).nonzero()
    for row, column in (pairs.T for pairs in doubtful.split(max(1, BYTES_IN_MEMORY // (16 * rows.shape[1])))):
        near[row, column] = torch.linalg.vector_norm(rows[row] - columns[column], dim=1) < threshold
    return near
