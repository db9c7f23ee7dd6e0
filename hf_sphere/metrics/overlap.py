"""Class overlap: examples whose embeddings are close to examples of other classes."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from hf_sphere.metrics.checks import check_classes, check_correct, check_directions, check_embeddings

OverlapDistance = Literal["angular", "euclidean"]

BYTES_IN_MEMORY = 2**27  # approximate memory of a block of distances


@torch.no_grad()
def class_overlap(
    embeddings: Tensor, labels: Tensor, correct: Tensor, *, threshold: float, distance: OverlapDistance = "angular"
) -> dict[str, float]:
    """Count the examples that overlap with another class, and the errors among them.

    An example overlaps if an example of another class is nearer than the threshold. The error rate among overlapping
    examples measures how well a classifier still separates their classes. The paper reports these counts, but neither
    the threshold nor the code, so compare only numbers for the same threshold.

    The computation is on the CPU, in blocks. The comparison with the threshold is accurate to the rounding of float64,
    however small the distance.

    Args:
        embeddings: (N, d), finite, of any real dtype.
        labels: (N,), class of each example; any integers.
        correct: (N,), whether each example is classified correctly; boolean, or 0 and 1.
        threshold: In degrees, up to 180, for `angular`; in the units of the embeddings for `euclidean`.
        distance: `angular`, the angle between two embeddings, or `euclidean`.

    Returns:
        `num_overlaps`, the number of overlapping examples; `num_pairs`, the number of pairs of different classes that
        are nearer than the threshold; `num_errors`, the number of misclassified overlapping examples; `ratio`, their
        fraction of the overlapping examples, in [0, 1], and 0 if there are none.

    Raises:
        TypeError: If the embeddings are complex or the labels are not integers.
        ValueError: If a shape is wrong, an embedding is not finite or, for `angular`, zero, `correct` has values other
            than 0 and 1, the threshold is out of range, or the distance is unknown.

    Reference:
        Kim and Kim, "Spherization layer: representation using only angles", NeurIPS 2022, comparison with angle-based
        operators.
    """
    if distance not in get_args(OverlapDistance):
        raise ValueError(f"unknown distance {distance!r}; choose one of {', '.join(get_args(OverlapDistance))}.")
    if not 0 < threshold < math.inf or (distance == "angular" and threshold > 180):
        allowed = "in degrees, above 0 and up to 180" if distance == "angular" else "positive and finite"
        raise ValueError(f"threshold of the {distance} distance must be {allowed}; got {threshold}.")
    points = check_directions(embeddings) if distance == "angular" else check_embeddings(embeddings).cpu().double()
    labels = check_classes(labels, len(points))
    correct = check_correct(correct)
    if len(correct) != len(points):
        raise ValueError(
            f"correct must have the shape ({len(points)},), one per embedding; got {tuple(correct.shape)}."
        )
    if distance == "angular":
        threshold = 2 * math.sin(math.radians(threshold) / 2)  # chord length, which is also accurate for small angles
    overlaps, num_pairs = torch.zeros(len(points), dtype=torch.bool), 0
    step = max(1, BYTES_IN_MEMORY // (32 * len(points)))
    for first in range(0, len(points), step):
        last = first + step
        # Computed from differences: products lose the digits of small distances.
        distances = torch.cdist(points[first:last], points[first:], compute_mode="donot_use_mm_for_euclid_dist")
        near = (distances < threshold) & (labels[first:last, None] != labels[first:])
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
