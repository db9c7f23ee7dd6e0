"""Metrics of embeddings and confidences, computed from tensors and independent of the model."""

from hf_sphere.metrics.calibration import (
    ReliabilityBins as ReliabilityBins,
    calibration_errors as calibration_errors,
    expected_calibration_error as expected_calibration_error,
    probability_scores as probability_scores,
    reliability_bins as reliability_bins,
)
from hf_sphere.metrics.class_angles import class_angles as class_angles
from hf_sphere.metrics.out_of_distribution import detection_scores as detection_scores
from hf_sphere.metrics.overlap import class_overlap as class_overlap
from hf_sphere.metrics.retrieval import (
    retrieval_scores as retrieval_scores,
    sampled_retrieval_scores as sampled_retrieval_scores,
    score_queries as score_queries,
)
from hf_sphere.metrics.selective import (
    accuracy_by_certainty as accuracy_by_certainty,
    area_under_risk_coverage as area_under_risk_coverage,
    risk_coverage as risk_coverage,
)
from hf_sphere.metrics.uniformity import (
    alignment as alignment,
    effective_dimension as effective_dimension,
    uniformity as uniformity,
)
