"""How good embeddings and confidences are: tensors in, numbers out. No model is known here."""

from hf_sphere.metrics.calibration import (
    ReliabilityBins,
    calibration_errors,
    expected_calibration_error,
    reliability_bins,
)
from hf_sphere.metrics.out_of_distribution import detection_scores
from hf_sphere.metrics.retrieval import retrieval_scores, sampled_retrieval_scores
from hf_sphere.metrics.selective import area_under_risk_coverage, risk_coverage

__all__ = [
    "ReliabilityBins",
    "area_under_risk_coverage",
    "calibration_errors",
    "detection_scores",
    "expected_calibration_error",
    "reliability_bins",
    "retrieval_scores",
    "risk_coverage",
    "sampled_retrieval_scores",
]
