from .detector import Comparison as Comparison, OODDetector as OODDetector, compare_scores as compare_scores
from .outputs import Outputs as Outputs, model_outputs as model_outputs
from .rejection import Rejection as Rejection, fit_rejection as fit_rejection
from .scores import SCORES as SCORES
