from .detector import (
    SCORES as SCORES,
    OODComparison as OODComparison,
    OODDetector as OODDetector,
    compare_scores as compare_scores,
)
from .outputs import Outputs as Outputs, model_outputs as model_outputs
from .rejection_fit import Rejection as Rejection, fit_rejection as fit_rejection
