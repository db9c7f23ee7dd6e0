from .geometry import (
    alignment as alignment,
    class_angles as class_angles,
    class_overlap as class_overlap,
    effective_dimension as effective_dimension,
    energy_test as energy_test,
    uniformity as uniformity,
)
from .retrieval import (
    retrieval_scores as retrieval_scores,
    sampled_retrieval_scores as sampled_retrieval_scores,
    score_queries as score_queries,
)
from .scores import (
    ReliabilityBins as ReliabilityBins,
    accuracy_by_certainty as accuracy_by_certainty,
    area_under_risk_coverage as area_under_risk_coverage,
    calibration_errors as calibration_errors,
    detection_scores as detection_scores,
    expected_calibration_error as expected_calibration_error,
    probability_scores as probability_scores,
    reliability_bins as reliability_bins,
    risk_coverage as risk_coverage,
)
