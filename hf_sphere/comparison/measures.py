"""Measures by which arms are compared, in percent, with an outcome per image."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_sphere.comparison.plan import UNSEEN
from hf_sphere.comparison.significance import pseudo_values
from hf_sphere.metrics import detection_scores, expected_calibration_error, retrieval_scores
from hf_sphere.nn.parameter_free import PrototypicalClassifier
from hf_sphere.ood import Outputs

EPISODES, WAY, SHOT = 200, 5, 5
"""Number of few-shot episodes, classes in each (fewer if fewer are left out), and examples per class."""

BLOCKS = 50
"""Largest number of parts of the images in the jackknife of a measure that is not a mean over images."""


@dataclass(frozen=True)
class Evaluated:
    """What a trained arm computes for test images; the `ids` identify the images, and embeddings are those of the head.

    The outputs are those for images of the training classes, (N, ...), and of the classes that were left out, if any.
    """

    known: Outputs
    unseen: Outputs | None = None
    metric: dict[str, Any] = field(default_factory=dict)  # of `Head.metric`


def measure(name: str, evaluated: Evaluated, *, per_image: bool = False) -> dict[int, float]:
    """Return the outcome of each image, whose mean is the measure in percent.

    Measures that are not means over images have, `per_image`, the jackknife's pseudo-value of each of `BLOCKS` blocks
    of images, and otherwise the same value for each image. Retrieval is such a measure: its images are also the gallery
    of the others, so that the scores of single queries would vary too little. For Recall@1, which a nearest neighbor
    decides, the jackknife's variance is too large, about twice the true one. See `check_measure` for errors.
    """
    labels: Any = (evaluated.unseen if name.startswith(UNSEEN) and evaluated.unseen else evaluated.known).labels
    check_measure(name, labels)
    ids, values = MEASURES[name].compute(evaluated)
    if callable(statistic := values):
        if per_image:
            return pseudo_values(lambda rows: 100 * statistic(rows), (ids % BLOCKS).tolist())
        values = torch.full((len(ids),), statistic(torch.arange(len(ids))), dtype=torch.float64)
    return dict(zip(ids.tolist(), (100 * values.double()).tolist(), strict=True))


def mean_or_none(name: str, evaluated: Evaluated) -> float | None:
    """Return a measure; None where it is not defined, as the few-shot accuracy of two images."""
    try:
        return statistics.fmean(measure(name, evaluated).values())
    except ValueError:
        return None


def check_measure(name: str, labels: Tensor) -> None:
    """Raise a ValueError if a measure is not defined for images with these labels."""
    counts, planned = labels.unique(return_counts=True)[1], MEASURES[name]
    large = int((counts >= planned.images).sum())
    if planned.images > 1 and (len(counts) < 2 or large < planned.classes):
        needed = f"{name} needs images of 2 classes, {planned.classes} of them with at least {planned.images}"
        raise ValueError(f"{needed}; got {len(counts)} and {large}. Test another metric, or on more images.")


@dataclass(frozen=True)
class Measure:
    """A measure: its ids, (N,), and values, (N,), or a function of indices of images; and the images that it needs."""

    compute: Callable[[Any], tuple[Tensor, Any]]  # of `Evaluated`
    higher_is_better: bool = True
    images: int = 1  # of a class
    classes: int = 1  # of which each has at least `images`


def _calibration_error(evaluated: Any) -> tuple[Tensor, Any]:
    known = evaluated.known
    confidences, predictions = known.logits.double().softmax(1).max(1)
    confidences, correct = confidences.clamp_max(1.0), predictions == known.labels
    return known.ids, lambda rows: expected_calibration_error(confidences[rows], correct[rows])


def _retrieval(score: str, part: str, evaluated: Any) -> tuple[Tensor, Any]:
    images, metric = getattr(evaluated, part), evaluated.metric
    return images.ids, lambda r: retrieval_scores(images.embeddings[r], images.labels[r], **metric)[score]


def _auroc(evaluated: Any) -> tuple[Tensor, Any]:
    parts = evaluated.known, evaluated.unseen
    confidences = torch.cat([part.logits.double().softmax(1).amax(1) for part in parts])
    known = torch.arange(len(confidences)) < len(parts[0].logits)
    ids = torch.cat([part.ids for part in parts])
    return ids, lambda r: detection_scores(confidences[r[known[r]]], confidences[r[~known[r]]])["auroc"]


def _few_shot(evaluated: Any) -> tuple[Tensor, Any]:
    """Classify all other images of the classes of an episode; an image counts by its mean over the episodes."""
    unseen = evaluated.unseen
    classes, counts = unseen.labels.unique(return_counts=True)
    classes = classes[counts > SHOT]
    classifier, generator = PrototypicalClassifier("cosine"), torch.Generator().manual_seed(0)
    correct, drawn = torch.zeros(2, len(unseen.labels), dtype=torch.float64)
    for _ in range(EPISODES):
        way = classes[torch.randperm(len(classes), generator=generator)[:WAY]]
        order = torch.randperm(len(unseen.labels), generator=generator)
        members = [order[unseen.labels[order] == each] for each in way]
        support = torch.stack([unseen.embeddings[rows[:SHOT]] for rows in members])
        queries = torch.cat([rows[SHOT:] for rows in members])
        labels = torch.cat([torch.full((len(rows) - SHOT,), index) for index, rows in enumerate(members)])
        drawn[queries] += 1
        correct[queries] += classifier(unseen.embeddings[queries], support).logits.argmax(-1) == labels
    return unseen.ids[drawn > 0], (correct / drawn)[drawn > 0]


MEASURES = {
    "accuracy": Measure(lambda data: (data.known.ids, data.known.logits.argmax(1) == data.known.labels)),
    "calibration_error": Measure(_calibration_error, higher_is_better=False),
    **{
        f"{prefix}{score}": Measure(partial(_retrieval, score, part), images=2)
        for prefix, part in (("", "known"), (UNSEEN, "unseen"))
        for score in ("recall_at_1", "map_at_r")
    },
    f"{UNSEEN}auroc": Measure(_auroc),
    f"{UNSEEN}few_shot_accuracy": Measure(_few_shot, images=SHOT + 1, classes=2),
}
"""Measures by name; those with the prefix `UNSEEN` need left-out classes. The calibration error has 15 bins of equal
width and exponent 1; the AUROC is that of the largest softmax probability of known against left-out classes."""
