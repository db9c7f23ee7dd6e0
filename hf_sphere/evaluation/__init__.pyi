from .evaluate import Evaluation as Evaluation, evaluate_embeddings as evaluate_embeddings
from .options import EvaluationOptions as EvaluationOptions
