"""How good embeddings and confidences are: tensors in, numbers out. No model is known here."""

from hf_sphere.metrics.calibration import (
    ReliabilityBins,
    calibration_errors,
    expected_calibration_error,
    reliability_bins,
)
from hf_sphere.metrics.class_angles import class_angles
from hf_sphere.metrics.effective_dimension import effective_dimension
from hf_sphere.metrics.out_of_distribution import detection_scores
from hf_sphere.metrics.overlap import class_overlap
from hf_sphere.metrics.retrieval import retrieval_scores, sampled_retrieval_scores
from hf_sphere.metrics.selective import area_under_risk_coverage, risk_coverage
from hf_sphere.metrics.uniformity import alignment, uniformity

__all__ = [
    "ReliabilityBins",
    "alignment",
    "area_under_risk_coverage",
    "calibration_errors",
    "class_angles",
    "class_overlap",
    "detection_scores",
    "effective_dimension",
    "expected_calibration_error",
    "reliability_bins",
    "retrieval_scores",
    "risk_coverage",
    "sampled_retrieval_scores",
    "uniformity",
]
