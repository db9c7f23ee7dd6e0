from .calibration import (
    ReliabilityBins as ReliabilityBins,
    calibration_errors as calibration_errors,
    expected_calibration_error as expected_calibration_error,
    probability_scores as probability_scores,
    reliability_bins as reliability_bins,
)
from .geometry import (
    alignment as alignment,
    class_angles as class_angles,
    class_overlap as class_overlap,
    effective_dimension as effective_dimension,
    uniformity as uniformity,
)
from .out_of_distribution import detection_scores as detection_scores
from .retrieval import (
    retrieval_scores as retrieval_scores,
    sampled_retrieval_scores as sampled_retrieval_scores,
    score_queries as score_queries,
)
from .selective import (
    accuracy_by_certainty as accuracy_by_certainty,
    area_under_risk_coverage as area_under_risk_coverage,
    risk_coverage as risk_coverage,
)
from .two_sample import energy_test as energy_test
