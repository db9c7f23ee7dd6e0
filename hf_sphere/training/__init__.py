"""Training with Accelerate: arguments, the loop, checkpoints, evaluation. Every recipe uses it."""

from hf_sphere.training.arguments import ImageDataArguments, ModelArguments, TrainingArguments, parse_arguments
from hf_sphere.training.checkpoints import CheckpointError, RunState, claim_output_dir, written_whole
from hf_sphere.training.evaluation import calibrate_head, count_correct, evaluate_classification
from hf_sphere.training.loop import TrainingDivergedError, TrainingInterruptedError, TrainingLoop
from hf_sphere.training.run import Run, start_run

__all__ = [
    "CheckpointError",
    "ImageDataArguments",
    "ModelArguments",
    "Run",
    "RunState",
    "TrainingArguments",
    "TrainingDivergedError",
    "TrainingInterruptedError",
    "TrainingLoop",
    "calibrate_head",
    "claim_output_dir",
    "count_correct",
    "evaluate_classification",
    "parse_arguments",
    "start_run",
    "written_whole",
]
