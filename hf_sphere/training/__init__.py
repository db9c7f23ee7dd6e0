"""Training with Accelerate: arguments, the loop, checkpoints, evaluation. Every recipe uses it."""

from hf_sphere.training.arguments import (
    ImageDataArguments,
    JointArguments,
    ModelArguments,
    RegressionArguments,
    RetrievalArguments,
    TrainingArguments,
    parse_arguments,
)
from hf_sphere.training.checkpoints import CheckpointError, RunState, claim_output_dir, written_whole
from hf_sphere.training.evaluation import calibrate_head, evaluate, evaluate_retrieval
from hf_sphere.training.loop import TrainingDivergedError, TrainingInterruptedError, TrainingLoop
from hf_sphere.training.run import Run, start_run
from hf_sphere.training.tasks import CLASSIFICATION, JOINT, REGRESSION, RETRIEVAL, ImageTask

__all__ = [
    "CLASSIFICATION",
    "JOINT",
    "REGRESSION",
    "RETRIEVAL",
    "CheckpointError",
    "ImageDataArguments",
    "ImageTask",
    "JointArguments",
    "ModelArguments",
    "RegressionArguments",
    "RetrievalArguments",
    "Run",
    "RunState",
    "TrainingArguments",
    "TrainingDivergedError",
    "TrainingInterruptedError",
    "TrainingLoop",
    "calibrate_head",
    "claim_output_dir",
    "evaluate",
    "evaluate_retrieval",
    "parse_arguments",
    "start_run",
    "written_whole",
]
