"""Training with Accelerate: arguments, the loop, checkpoints, evaluation. Every recipe uses it.

Imported at first use: text needs none of what images need.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_sphere.training.arguments import TrainingArguments, parse_arguments
    from hf_sphere.training.checkpoints import CheckpointError, RunState, claim_output_dir, written_whole
    from hf_sphere.training.evaluation import calibrate_head, evaluate, evaluate_few_shot, evaluate_retrieval
    from hf_sphere.training.image_arguments import (
        EncoderArguments,
        FewShotArguments,
        ImageDataArguments,
        ImageSourceArguments,
        JointArguments,
        ModelArguments,
        RegressionArguments,
        RetrievalArguments,
        TrainingImageArguments,
    )
    from hf_sphere.training.loop import TrainingDivergedError, TrainingInterruptedError, TrainingLoop
    from hf_sphere.training.run import Run, start_run
    from hf_sphere.training.tasks import CLASSIFICATION, FEW_SHOT, JOINT, REGRESSION, RETRIEVAL, ImageTask
    from hf_sphere.training.text_arguments import TextDataArguments, TextModelArguments, TextTrainingArguments
    from hf_sphere.training.text_tasks import MASKED_LM, TextTask

_MODULES = {
    "arguments": ("TrainingArguments", "parse_arguments"),
    "checkpoints": ("CheckpointError", "RunState", "claim_output_dir", "written_whole"),
    "evaluation": ("calibrate_head", "evaluate", "evaluate_few_shot", "evaluate_retrieval"),
    "image_arguments": (
        *("EncoderArguments", "FewShotArguments", "ImageDataArguments", "ImageSourceArguments", "JointArguments"),
        *("ModelArguments", "RegressionArguments", "RetrievalArguments", "TrainingImageArguments"),
    ),
    "loop": ("TrainingDivergedError", "TrainingInterruptedError", "TrainingLoop"),
    "run": ("Run", "start_run"),
    "tasks": ("CLASSIFICATION", "FEW_SHOT", "JOINT", "REGRESSION", "RETRIEVAL", "ImageTask"),
    "text_arguments": ("TextDataArguments", "TextModelArguments", "TextTrainingArguments"),
    "text_tasks": ("MASKED_LM", "TextTask"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "CLASSIFICATION",
    "FEW_SHOT",
    "JOINT",
    "MASKED_LM",
    "REGRESSION",
    "RETRIEVAL",
    "CheckpointError",
    "EncoderArguments",
    "FewShotArguments",
    "ImageDataArguments",
    "ImageSourceArguments",
    "ImageTask",
    "JointArguments",
    "ModelArguments",
    "RegressionArguments",
    "RetrievalArguments",
    "Run",
    "RunState",
    "TextDataArguments",
    "TextModelArguments",
    "TextTask",
    "TextTrainingArguments",
    "TrainingArguments",
    "TrainingDivergedError",
    "TrainingImageArguments",
    "TrainingInterruptedError",
    "TrainingLoop",
    "calibrate_head",
    "claim_output_dir",
    "evaluate",
    "evaluate_few_shot",
    "evaluate_retrieval",
    "parse_arguments",
    "start_run",
    "written_whole",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
