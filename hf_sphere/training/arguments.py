"""Arguments of training, under the names that transformers' `TrainingArguments` uses where it has them."""

from dataclasses import dataclass, field
from typing import Literal


def described(text: str) -> dict[str, str]:
    """Metadata of an argument: what `--help` shows."""
    return {"help": text}


@dataclass
class TrainingArguments:
    """How to train, under the names that transformers' `TrainingArguments` uses where it has them."""

    output_dir: str = field(metadata=described("Folder for the model, checkpoints and results."))
    overwrite_output_dir: bool = field(default=False, metadata=described("Replace the run that is in output_dir."))
    resume_from_checkpoint: str | None = field(
        default=None, metadata=described("`latest`, or the folder of a checkpoint to go on from.")
    )
    seed: int = field(default=0, metadata=described("Seed of initial weights, order and augmentation."))
    full_determinism: bool = field(
        default=False, metadata=described("Use only deterministic kernels, also where that is slower.")
    )
    num_train_epochs: int = field(default=20, metadata=described("Epochs to train."))
    max_steps: int | None = field(
        default=None,
        metadata=described("Stop after so many optimiser steps; the schedule still spans num_train_epochs."),
    )
    per_device_train_batch_size: int = field(default=128, metadata=described("Training batch a process."))
    per_device_eval_batch_size: int = field(default=512, metadata=described("Evaluation batch a process."))
    gradient_accumulation_steps: int = field(default=1, metadata=described("Batches an optimiser step."))
    mixed_precision: Literal["no", "fp16", "bf16"] | None = field(
        default=None, metadata=described("Precision of the forward pass; as `accelerate launch` says if not set.")
    )
    optimizer: Literal["adam", "adamw", "sgd", "adam_s", "adam_srt", "adam_g", "sgd_mrt"] = field(
        default="adam",
        metadata=described("Optimiser; the last four act on the sphere, and find the scale-invariant weights."),
    )
    learning_rate: float = field(default=1e-3, metadata=described("Peak learning rate."))
    weight_decay: float = field(
        default=0.0, metadata=described("Weight decay of weights; norms, biases and scalars have none.")
    )
    momentum: float = field(default=0.9, metadata=described("Momentum of sgd and sgd_mrt."))
    nesterov: bool = field(default=False, metadata=described("Nesterov momentum of sgd."))
    adam_beta1: float = field(default=0.9, metadata=described("First beta of the Adam kinds."))
    adam_beta2: float = field(default=0.999, metadata=described("Second beta of the Adam kinds."))
    adam_epsilon: float = field(default=1e-8, metadata=described("Epsilon of the Adam kinds."))
    max_grad_norm: float | None = field(default=None, metadata=described("Clip gradients to this norm."))
    label_smoothing_factor: float = field(default=0.0, metadata=described("Label smoothing of the cross-entropy."))
    loss_reduction: Literal["mean", "sum"] | None = field(
        default=None,
        metadata=described("Mean of a batch's losses, or their sum as in the prototype paper; `mean` if not set."),
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine", "step", "multistep", "plateau"] = field(
        default="constant", metadata=described("Course of the learning rate after the warm-up.")
    )
    warmup_epochs: float = field(default=0.0, metadata=described("Epochs of linear warm-up."))
    lr_step_epochs: int = field(default=30, metadata=described("Epochs between two decays of `step`."))
    lr_milestones: list[int] | None = field(default=None, metadata=described("Epochs of the decays of `multistep`."))
    lr_gamma: float = field(default=0.1, metadata=described("Factor of one decay of step, multistep and plateau."))
    lr_patience: int = field(default=15, metadata=described("Epochs without gain before `plateau` decays."))
    early_stopping_patience: int | None = field(
        default=None, metadata=described("Stop after so many epochs without gain.")
    )
    metric_for_best_model: str | None = field(
        default=None,
        metadata=described(
            "What chooses the best epoch, stops early and drives `plateau`, for instance train_loss (of names that end "
            "in loss, error or perplexity less is better); the recipe's own measure if not set."
        ),
    )
    load_best_model_at_end: bool = field(
        default=False, metadata=described("Report and keep the best epoch's model instead of the last one's.")
    )
    save_epochs: int = field(default=1, metadata=described("Epochs between checkpoints."))
    save_steps: int | None = field(default=None, metadata=described("Optimiser steps between further checkpoints."))
    save_total_limit: int = field(default=2, metadata=described("Checkpoints to keep."))
    snapshot_epochs: int | None = field(
        default=None,
        metadata=described(
            "Keep the weights (snapshots/) of the initialisation, every so many epochs, and the last whole epoch."
        ),
    )
    snapshot_until: int | None = field(
        default=None, metadata=described("Keep the weights of every epoch up to this one as well.")
    )
    logging_steps: int = field(default=50, metadata=described("Steps between updates of bar, trackers and checks."))
    radial_logging_steps: int | None = field(
        default=None,
        metadata=described("Steps between logs of effective learning rate, step angle, norm and anisotropy a layer."),
    )
    report_to: list[str] | None = field(default=None, metadata=described("Trackers, for instance tensorboard, wandb."))
    disable_tqdm: bool = field(default=False, metadata=described("Show no progress bars."))
    push_to_hub: bool = field(default=False, metadata=described("Upload the model and its card at the end."))
    hub_model_id: str | None = field(
        default=None, metadata=described("Name on the Hub; that of output_dir if not set.")
    )

    def __post_init__(self) -> None:
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
            raise ValueError(f"max_grad_norm must be positive, or left out for no clipping; got {self.max_grad_norm}.")
        if self.lr_scheduler_type == "multistep" and not self.lr_milestones:
            raise ValueError("lr_scheduler_type multistep needs lr_milestones, the epochs of its decays.")
        if self.nesterov and self.optimizer == "sgd_mrt":
            raise ValueError("sgd_mrt has no nesterov form; leave nesterov out, or use optimizer sgd.")
        if self.radial_logging_steps and not self.report_to:
            raise ValueError("radial_logging_steps logs to trackers; name one in report_to, for instance tensorboard.")
        if self.lr_scheduler_type == "plateau" and self.warmup_epochs:
            raise ValueError("lr_scheduler_type plateau takes no warmup_epochs.")
