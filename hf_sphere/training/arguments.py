"""Arguments of all training recipes.

An option that transformers' `TrainingArguments` has bears its name and meaning there. The defaults are those there,
except for `num_train_epochs`, the batch sizes, `learning_rate`, `lr_scheduler_type`, `max_grad_norm`, `seed` and the
kind of `optim`, on which results depend, for `bf16` and `fp16`, where false overrides `accelerate launch`, and for
`logging_steps` and `save_total_limit`: the loss is checked at each log, and a checkpoint is written after each epoch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hf_sphere.optim.optimizers import optimizer_names
from hf_sphere.utils.arguments import SEED, Arguments, argument

OPTIMIZER_HELP = "Optimizer; all except adam, adamw and sgd find scale-invariant weights or hidden matrices."

USUAL = (
    *("dataset_name", "eval_split", "validation_fraction", "image_size", "model_name_or_path", "backbone"),
    *("pretrained_backbone", "backbone_weights", "head", "head_kwargs", "output_dir", "overwrite_output_dir"),
    *("resume_from_checkpoint", "seed", "num_train_epochs", "per_device_train_batch_size", "bf16"),
    *("optim", "learning_rate", "lr_scheduler_type", "train_classes", "value_column_name", "computed_value"),
    *("way", "shot", "text_column_name", "max_seq_length", "objective", "from_scratch", "spherized"),
)
"""Options that `--help` shows, about twenty of each task; `--help all` shows the others, too."""


def optimizer_choices() -> Iterable[str]:
    """Return the valid values of `--optim`."""
    return ("adam", "adamw", "sgd", *optimizer_names())


@dataclass
class _RunArguments(Arguments):
    """Training."""

    output_dir: str = argument(help="Directory for the model, checkpoints and results.")
    overwrite_output_dir: bool = argument(False, "Replace the run in output_dir.")
    resume_from_checkpoint: str | None = argument(None, "`latest`, or the folder of a checkpoint to resume from.")
    seed: int = argument(0, "Seed of initial weights, data order, augmentation and samples.", **SEED)
    num_train_epochs: int = argument(20, "Epochs to train; 0 only evaluates a saved model.", ge=0)
    stop_after_steps: int | None = argument(None, "Stop early, after this many steps of the same schedule.", ge=1)
    per_device_train_batch_size: int = argument(128, "Training batch size per process.", ge=1)
    per_device_eval_batch_size: int = argument(512, "Evaluation batch size per process.", ge=1)
    gradient_accumulation_steps: int = argument(1, "Batches per optimizer step.", ge=1)
    pair_batch: int | None = argument(
        None, "Examples per optimizer step, of all processes, with one loss; batches are encoded twice.", ge=1
    )
    torch_compile: bool = argument(False, "Compile the model with torch.compile.")


@dataclass
class PrecisionArguments(Arguments):
    """Precision."""

    bf16: bool | None = argument(None, "Forward pass in bfloat16; if neither is set, that of `accelerate launch`.")
    fp16: bool | None = argument(None, "Forward pass in float16.", not_with=["bf16"])

    @property
    def mixed_precision(self) -> str | None:
        """The precision as Accelerate names it; None for that of `accelerate launch`."""
        if self.bf16 or self.fp16:
            return "bf16" if self.bf16 else "fp16"
        return None if self.bf16 is self.fp16 is None else "no"


@dataclass
class _OptimizerArguments(Arguments):
    """Optimizer and loss."""

    optim: str = argument("adam", OPTIMIZER_HELP, choices=optimizer_choices)
    learning_rate: float = argument(1e-3, "Peak learning rate.", ge=0)
    layer_decay: float | None = argument(
        None, "Learning rate of each layer of the backbone relative to the next one, for instance 0.75.", gt=0, le=1
    )
    weight_decay: float = argument(0.0, "Weight decay; not applied to norms, biases and scalars.", ge=0)
    momentum: float = argument(0.9, "Momentum of sgd, sgd_mrt and muon; for Muon 0.95 is usual.", ge=0, lt=1)
    nesterov: bool = argument(False, "Nesterov momentum of sgd.")
    adam_beta1: float = argument(0.9, "First beta of Adam and its variants.", ge=0, lt=1)
    adam_beta2: float = argument(0.999, "Second beta of Adam and its variants.", ge=0, lt=1)
    adam_epsilon: float = argument(1e-8, "Epsilon of Adam and its variants.", ge=0)
    adamw_lr_scale: float = argument(1.0, "Relative learning rate of AdamW in muon and hyperball optimizers.", ge=0)
    hyperball_on: Literal["scale_invariant", "matrices"] = argument(
        "scale_invariant", "Weights whose norm the hyperball optimizers keep: scale-invariant ones or hidden matrices."
    )
    max_grad_norm: float | None = argument(None, "Clip gradients to this norm; not clipped if 0 or not set.", ge=0)
    ema_decay: float | None = argument(
        None, "Evaluate and save the exponential moving average of the weights with this decay per step.", gt=0, lt=1
    )
    label_smoothing_factor: float = argument(0.0, "Label smoothing of the cross-entropy.", ge=0, le=1)
    supcon_weight: float = argument(0.0, "Add SupConLoss of the embeddings, times this, to the loss of a head.", ge=0)
    loss_reduction: Literal["mean", "sum"] | None = argument(None, "Loss over a batch, `mean` if not set.")


_STEP, _MULTISTEP, _PLATEAU = ([f"lr_scheduler_type={kind}"] for kind in ("step", "multistep", "reduce_lr_on_plateau"))


@dataclass
class _ScheduleArguments(Arguments):
    """Learning-rate schedule and choice of the epoch."""

    lr_scheduler_type: Literal["constant", "linear", "cosine", "step", "multistep", "reduce_lr_on_plateau"] = argument(
        "constant", "Learning-rate schedule after the warmup."
    )
    warmup_epochs: float = argument(0.0, "Epochs of linear warmup.", not_with=_PLATEAU, ge=0)
    lr_step_epochs: int = argument(30, "Epochs between decays of `step`.", only_with=_STEP, ge=1)
    lr_milestones: list[int] | None = argument(None, "Epochs of decays of `multistep`.", only_with=_MULTISTEP, ge=1)
    lr_gamma: float = argument(0.1, "Decay factor of these.", only_with=[*_STEP, *_MULTISTEP, *_PLATEAU], ge=0, le=1e6)
    lr_patience: int = argument(15, "Epochs without improvement before a decay on a plateau.", only_with=_PLATEAU, ge=0)
    early_stopping_patience: int | None = argument(None, "Stop after this many epochs without improvement.", ge=1)
    metric_for_best_model: str | None = argument(
        None,
        "Metric of the best epoch, early stopping and plateaus, such as train_loss (lower is better for names that end "
        "in loss, error or perplexity); that of the task if not set.",
    )
    load_best_model_at_end: bool = argument(False, "Report and save the model of the best epoch instead of the last.")


@dataclass
class _SavingArguments(Arguments):
    """Checkpoints, logs and card."""

    save_epochs: int = argument(1, "Epochs between checkpoints.", ge=1)
    save_steps: int | None = argument(None, "Optimizer steps between additional checkpoints.", ge=1)
    save_total_limit: int = argument(2, "Checkpoints to keep.", ge=1)
    snapshot_epochs: int | None = argument(
        None, "Save the weights (snapshots/) at the start, every this many epochs, and after the last one.", ge=1
    )
    snapshot_until: int | None = argument(None, "Also save the weights after every epoch up to this one.", ge=1)
    logging_steps: int = argument(50, "Steps between updates of progress bar and trackers, and loss checks.", ge=1)
    diagnostics_steps: int | None = argument(
        None, "Steps between logs of the effective learning rates of layers.", only_with=["report_to"], ge=1
    )
    report_to: list[str] | None = argument(None, "Trackers, for instance tensorboard, wandb; or `none`.")
    disable_tqdm: bool = argument(False, "Show no progress bars.")
    license: str = argument("unknown", "License of the model on its card, for instance apache-2.0.")


@dataclass
class RecipeArguments(_SavingArguments, _ScheduleArguments, _OptimizerArguments, PrecisionArguments, _RunArguments):
    """Arguments of a training run, by topic in the classes that it inherits from."""

    def __post_init__(self) -> None:
        self.report_to = None if self.report_to == ["none"] else self.report_to
        super().__post_init__()
        self.max_grad_norm = self.max_grad_norm or None
        self.lr_milestones = self.lr_milestones and sorted(self.lr_milestones)
        if self.lr_scheduler_type == "multistep" and not self.lr_milestones:
            raise ValueError("lr_scheduler_type multistep needs lr_milestones.")
        if self.supcon_weight and self.gradient_accumulation_steps > 1:
            raise ValueError("supcon_weight compares all examples of a step: use pair_batch to accumulate gradients.")
