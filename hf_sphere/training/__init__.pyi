from .arguments import RecipeArguments as RecipeArguments
from .checkpoints import RunState as RunState, gather_classes as gather_classes
from .errors import (
    CheckpointError as CheckpointError,
    TrainingDivergedError as TrainingDivergedError,
    TrainingInterruptedError as TrainingInterruptedError,
)
from .evaluation import (
    evaluate as evaluate,
    evaluate_few_shot as evaluate_few_shot,
    evaluate_retrieval as evaluate_retrieval,
    initialize_from_data as initialize_from_data,
)
from .loop import TrainingLoop as TrainingLoop
from .output_dir import prepare_output_dir as prepare_output_dir
from .run import Run as Run, start_run as start_run
from .tasks import Task as Task, find_task as find_task, task_names as task_names
from .trainer import (
    SphereCallback as SphereCallback,
    SphereTrainer as SphereTrainer,
    create_optimizer as create_optimizer,
)
