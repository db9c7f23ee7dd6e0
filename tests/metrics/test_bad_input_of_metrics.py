"""What each metric refuses beyond the common checks of tensors, which `geometry/test_tensor_checks.py` tests."""

import math

import pandas as pd
import pytest
import torch

from hf_sphere.metrics import (
    accuracy_by_certainty,
    alignment,
    calibration_errors,
    class_angles,
    class_overlap,
    detection_scores,
    effective_dimension,
    expected_calibration_error,
    probability_scores,
    retrieval_scores,
    risk_coverage,
    sampled_retrieval_scores,
    uniformity,
)

EYE, PAIRS, ONES, NAN = torch.eye(4), torch.arange(4) // 2, torch.ones(4), torch.tensor([1.0, math.nan])
INTEGER = "must be an integer of at least 1; got"


def overlap(**changed):
    return class_overlap(**{"embeddings": EYE, "labels": PAIRS, "correct": ONES, "threshold": 10.0} | changed)


def sampled(**changed):
    given = {"directions": EYE, "concentration": ONES, "labels": PAIRS} | changed
    return sampled_retrieval_scores(given.pop("directions"), given.pop("concentration"), given.pop("labels"), **given)


def ece(**options):
    return expected_calibration_error(torch.rand(4), ONES, **options)


TABLE = [
    (lambda: calibration_errors(torch.rand(3, 2), ONES[:3]), r"confidences must have the shape \(N,\) with N >= 1"),
    (lambda: calibration_errors(torch.rand(3), ONES), r"correct must have the shape \(3,\), one per .*; got \(4,"),
    (lambda: calibration_errors([0.5, 1.5], [1, 1]), r"probabilities, in \[0, 1\]; got 0.5 to 1.5"),
    (lambda: calibration_errors(torch.rand(2), [0, 2]), "correct must be boolean, or 0 and 1"),
    *((lambda n=n: ece(num_bins=n), f"num_bins {INTEGER} {n}") for n in (0, 2.5, True)),
    *((lambda n=n: ece(norm=n), rf"norm must be a number in \[1, inf\); got {n}") for n in (0.5, math.inf)),
    (lambda: ece(binning="equal"), "binning must be one of equal_mass, equal_width; got 'equal'"),
    (lambda: probability_scores(EYE, PAIRS + 3), "labels must be from 0 to 3; got 3 to 4"),
    (lambda: class_angles(EYE, [0] * 4), "need at least two classes; got one"),
    (lambda: class_angles(EYE, range(4)), "none of the 4 classes has two members"),
    (lambda: class_angles(EYE, PAIRS, max_pairs=0), f"max_pairs {INTEGER} 0"),
    (lambda: class_angles(torch.zeros(4, 2), PAIRS), "a zero vector has no direction; 4 of 4"),
    (lambda: effective_dimension(NAN[None]), "embeddings must be finite; 1 of 1"),
    (lambda: detection_scores(NAN, ONES), "inside must not be NaN; index 1 is"),
    (lambda: detection_scores(ONES, NAN), "outside must not be NaN"),
    (lambda: overlap(embeddings=torch.zeros(4, 4)), "a zero vector has no direction; 4 of 4 embeddings are zero"),
    (lambda: overlap(correct=torch.zeros(3)), r"correct must have the shape \(4,\), one per .*; got \(3,\)"),
    *((lambda t=t: overlap(threshold=t), rf"number in \(0, 180\]; got {t}") for t in (0, 181, math.nan)),
    (lambda: overlap(threshold=-1.0, distance="euclidean"), r"threshold must be a number in \(0, inf\); got -1"),
    (lambda: overlap(distance="cosine"), "distance must be one of angular, euclidean; got 'cosine'"),
    (lambda: alignment(EYE, range(4)), "none of the 4 classes has two members"),
    *(
        (lambda t=t: uniformity(EYE, t=t), rf"t must be .* \(0, inf\); got {t}")
        for t in (0.0, -1.0, math.inf, math.nan)
    ),
    (lambda: uniformity(EYE[:1]), r"shape \(N, d\) with N >= 2 and d >= 1; got \(1, 4\)"),
    (lambda: uniformity(EYE[:2] * PAIRS), "a zero vector has no direction; 2 of 2"),
    (lambda: risk_coverage(NAN, ONES[:2]), "confidences must not be NaN"),
    *((lambda n=n: accuracy_by_certainty(ONES, ONES, num_groups=n), f"num_groups {INTEGER} {n}") for n in (0, 2.0)),
    (lambda: retrieval_scores(EYE, PAIRS[:3]), r"shape \(4,\), one per embedding; got \(3,"),
    (lambda: retrieval_scores(EYE, range(4)), "none of the 4 classes has two members"),
    (lambda: retrieval_scores(NAN[:, None], [0, 0]), "1 of 2 are not, the first at index 1"),
    (lambda: retrieval_scores(EYE, PAIRS, distance="manhattan"), "must be one of cosine, euclidean, hyperbolic; got"),
    *((lambda k=k: retrieval_scores(EYE, PAIRS, ks=(1, k)), f"each of ks {INTEGER} {k}") for k in (0, 1.5)),
    (lambda: retrieval_scores(EYE, PAIRS, curvature=-1.0), r"curvature must be a number in \(0, inf\); got -1.0"),
    (lambda: retrieval_scores(EYE, PAIRS, distance="hyperbolic", curvature=100.0), "radius 0.1; that at index 0 has"),
    (lambda: retrieval_scores(EYE, pd.Series([0, 1, None, 1], dtype="Int64")), "1 of 4 are missing .* at index 2"),
    (lambda: sampled(concentration=-ONES), "concentration"),
    (lambda: sampled(directions=torch.zeros(4, 4)), "UnitVector"),
    (lambda: sampled(num_samples=0), f"num_samples {INTEGER} 0"),
]


@pytest.mark.parametrize(("call", "message"), TABLE)
def test_values_that_are_invalid_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("labels", [torch.zeros(4), torch.zeros(4).bool(), ["a", "a", "b", "b"]])
@pytest.mark.parametrize("measure", [retrieval_scores, alignment, class_angles])
def test_labels_are_integers(measure, labels):
    with pytest.raises(TypeError, match="labels must be integers"):
        measure(EYE, labels)
