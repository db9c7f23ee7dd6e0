"""Arguments of all training recipes, named as in transformers' `TrainingArguments` where possible."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hf_sphere.optim.names import optimizer_names
from hf_sphere.utils.arguments import argument

OPTIMIZER_HELP = "Optimizer; all except adam, adamw and sgd detect scale-invariant weights."


def optimizer_choices() -> Iterable[str]:
    """Return the valid values of `--optimizer`."""
    return ("adam", "adamw", "sgd", *optimizer_names())


@dataclass
class TrainingArguments:
    """Training."""

    output_dir: str = argument(help="Directory for the model, checkpoints and results.")
    overwrite_output_dir: bool = argument(False, "Replace the run in output_dir.")
    resume_from_checkpoint: str | None = argument(None, "`latest`, or the folder of a checkpoint to resume from.")
    seed: int = argument(0, "Seed of initial weights, data order, augmentation and samples.")
    full_determinism: bool = argument(False, "Use only deterministic kernels, even where they are slower.")
    num_train_epochs: int = argument(20, "Epochs to train.")
    max_steps: int | None = argument(
        None, "Stop after this many optimizer steps; the schedule still spans num_train_epochs."
    )
    per_device_train_batch_size: int = argument(128, "Training batch size per process.")
    per_device_eval_batch_size: int = argument(512, "Evaluation batch size per process.")
    gradient_accumulation_steps: int = argument(1, "Batches per optimizer step.")
    mixed_precision: Literal["no", "fp16", "bf16"] | None = argument(
        None, "Precision of the forward pass; that of `accelerate launch` if not set."
    )
    optimizer: str = argument("adam", OPTIMIZER_HELP, choices=optimizer_choices)
    learning_rate: float = argument(1e-3, "Peak learning rate.")
    weight_decay: float = argument(0.0, "Weight decay; not applied to norms, biases and scalars.")
    momentum: float = argument(0.9, "Momentum of sgd and sgd_mrt.")
    nesterov: bool = argument(False, "Nesterov momentum of sgd.")
    adam_beta1: float = argument(0.9, "First beta of Adam and its variants.")
    adam_beta2: float = argument(0.999, "Second beta of Adam and its variants.")
    adam_epsilon: float = argument(1e-8, "Epsilon of Adam and its variants.")
    max_grad_norm: float | None = argument(None, "Clip gradients to this norm.")
    ema_decay: float | None = argument(
        None, "Evaluate and save the exponential moving average of the weights over the steps with this decay."
    )
    label_smoothing_factor: float = argument(0.0, "Label smoothing of the cross-entropy.")
    loss_reduction: Literal["mean", "sum"] | None = argument(
        None, "Reduction of the loss over a batch; the prototype paper uses `sum`. `mean` if not set."
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine", "step", "multistep", "plateau"] = argument(
        "constant", "Learning-rate schedule after the warmup."
    )
    warmup_epochs: float = argument(0.0, "Epochs of linear warmup.")
    lr_step_epochs: int = argument(30, "Epochs between two decays of `step`.")
    lr_milestones: list[int] | None = argument(None, "Epochs of the decays of `multistep`.")
    lr_gamma: float = argument(0.1, "Decay factor of step, multistep and plateau.")
    lr_patience: int = argument(15, "Epochs without improvement before `plateau` decays.")
    early_stopping_patience: int | None = argument(None, "Stop after this many epochs without improvement.")
    metric_for_best_model: str | None = argument(
        None,
        "Metric for selecting the best epoch, early stopping and `plateau`, for instance train_loss (lower is better "
        "for names that end in loss, error or perplexity); the metric of the task if not set.",
    )
    load_best_model_at_end: bool = argument(False, "Report and save the model of the best epoch instead of the last.")
    save_epochs: int = argument(1, "Epochs between checkpoints.")
    save_steps: int | None = argument(None, "Optimizer steps between additional checkpoints.")
    save_total_limit: int = argument(2, "Checkpoints to keep.")
    snapshot_epochs: int | None = argument(
        None, "Save the weights (snapshots/) at initialization, every this many epochs, and after the last full epoch."
    )
    snapshot_until: int | None = argument(None, "Also save the weights after every epoch up to this one.")
    logging_steps: int = argument(50, "Steps between updates of progress bar and trackers, and checks of the loss.")
    radial_logging_steps: int | None = argument(
        None, "Steps between logs of effective learning rate, step angle, norm and anisotropy per layer."
    )
    report_to: list[str] | None = argument(None, "Trackers, for instance tensorboard, wandb.")
    disable_tqdm: bool = argument(False, "Show no progress bars.")
    published: str | None = argument(
        None, "Record of results/published that the run is compared with; stated on the model card."
    )
    push_to_hub: bool = argument(False, "Upload the model and its card at the end.")
    hub_model_id: str | None = argument(None, "Name on the Hub; the name of output_dir if not set.")

    def __post_init__(self) -> None:
        if not self.output_dir.strip():
            raise ValueError("output_dir must not be empty; name a directory.")
        at_least_one = ["per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"]
        at_least_one += ["save_epochs", "save_total_limit", "logging_steps", "lr_step_epochs"]
        at_least_one += ["max_steps", "save_steps", "early_stopping_patience", "radial_logging_steps"]
        at_least_one += ["snapshot_epochs", "snapshot_until"]
        for name in at_least_one:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        for name in ("learning_rate", "weight_decay", "num_train_epochs", "warmup_epochs"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative; got {getattr(self, name)}.")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive, or unset to disable clipping; got {self.max_grad_norm}.")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay must be above 0 and below 1, or unset for no average; got {self.ema_decay}.")
        if self.lr_scheduler_type == "multistep" and not self.lr_milestones:
            raise ValueError("lr_scheduler_type multistep needs lr_milestones, the epochs of its decays.")
        if self.nesterov and self.optimizer == "sgd_mrt":
            raise ValueError("sgd_mrt does not support nesterov; leave nesterov out, or use optimizer sgd.")
        if self.radial_logging_steps and not self.report_to:
            raise ValueError("radial_logging_steps logs to trackers; name one in report_to, for instance tensorboard.")
        if self.lr_scheduler_type == "plateau" and self.warmup_epochs:
            raise ValueError("lr_scheduler_type plateau does not support warmup_epochs; leave warmup_epochs out.")
