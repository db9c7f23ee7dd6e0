from .arguments import TrainingArguments as TrainingArguments
from .arguments import parse_arguments as parse_arguments
from .checkpoints import (
    CheckpointError as CheckpointError,
)
from .checkpoints import (
    RunState as RunState,
)
from .checkpoints import (
    claim_output_dir as claim_output_dir,
)
from .checkpoints import (
    written_whole as written_whole,
)
from .evaluation import (
    calibrate_head as calibrate_head,
)
from .evaluation import (
    evaluate as evaluate,
)
from .evaluation import (
    evaluate_few_shot as evaluate_few_shot,
)
from .evaluation import (
    evaluate_retrieval as evaluate_retrieval,
)
from .image_arguments import (
    EncoderArguments as EncoderArguments,
)
from .image_arguments import (
    FewShotArguments as FewShotArguments,
)
from .image_arguments import (
    ImageDataArguments as ImageDataArguments,
)
from .image_arguments import (
    ImageSourceArguments as ImageSourceArguments,
)
from .image_arguments import (
    JointArguments as JointArguments,
)
from .image_arguments import (
    ModelArguments as ModelArguments,
)
from .image_arguments import (
    RegressionArguments as RegressionArguments,
)
from .image_arguments import (
    RetrievalArguments as RetrievalArguments,
)
from .image_arguments import (
    TrainingImageArguments as TrainingImageArguments,
)
from .loop import (
    TrainingDivergedError as TrainingDivergedError,
)
from .loop import (
    TrainingInterruptedError as TrainingInterruptedError,
)
from .loop import (
    TrainingLoop as TrainingLoop,
)
from .run import Run as Run
from .run import start_run as start_run
from .tasks import (
    CLASSIFICATION as CLASSIFICATION,
)
from .tasks import (
    FEW_SHOT as FEW_SHOT,
)
from .tasks import (
    JOINT as JOINT,
)
from .tasks import (
    REGRESSION as REGRESSION,
)
from .tasks import (
    RETRIEVAL as RETRIEVAL,
)
from .tasks import (
    ImageTask as ImageTask,
)
from .text_arguments import (
    TextDataArguments as TextDataArguments,
)
from .text_arguments import (
    TextModelArguments as TextModelArguments,
)
from .text_arguments import (
    TextTrainingArguments as TextTrainingArguments,
)
from .text_tasks import MASKED_LM as MASKED_LM
from .text_tasks import TextTask as TextTask
