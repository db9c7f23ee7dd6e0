from .arguments import TrainingArguments as TrainingArguments
from .checkpoints import (
    RunState as RunState,
    claim_output_dir as claim_output_dir,
    written_whole as written_whole,
)
from .errors import (
    CheckpointError as CheckpointError,
    TrainingDivergedError as TrainingDivergedError,
    TrainingInterruptedError as TrainingInterruptedError,
)
from .evaluation import (
    evaluate as evaluate,
    evaluate_few_shot as evaluate_few_shot,
    evaluate_retrieval as evaluate_retrieval,
    initialize_head as initialize_head,
)
from .image_arguments import (
    EncoderArguments as EncoderArguments,
    FewShotArguments as FewShotArguments,
    ImageDataArguments as ImageDataArguments,
    ImageSourceArguments as ImageSourceArguments,
    JointArguments as JointArguments,
    ModelArguments as ModelArguments,
    RegressionArguments as RegressionArguments,
    RetrievalArguments as RetrievalArguments,
    TrainingImageArguments as TrainingImageArguments,
)
from .loop import (
    TrainingLoop as TrainingLoop,
)
from .run import Run as Run, start_run as start_run
from .tasks import (
    CLASSIFICATION as CLASSIFICATION,
    FEW_SHOT as FEW_SHOT,
    JOINT as JOINT,
    REGRESSION as REGRESSION,
    RETRIEVAL as RETRIEVAL,
    ImageTask as ImageTask,
)
from .text_arguments import (
    TextDataArguments as TextDataArguments,
    TextModelArguments as TextModelArguments,
    TextTrainingArguments as TextTrainingArguments,
)
from .text_tasks import MASKED_LM as MASKED_LM, TextTask as TextTask
