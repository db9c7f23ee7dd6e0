"""Arguments of the recipes: dataclasses, read from a YAML file, the command line, or both."""

import difflib
import json
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml
from transformers import HfArgumentParser


class _YamlLoader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as in YAML 1.2 and JSON; PyYAML wants 1.0e-3."""


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


class Options(dict[str, Any]):
    """A mapping that can be written as JSON or YAML on the command line: `'{scaling: 5.0}'`."""

    def __init__(self, value: str | Iterable[tuple[str, Any]] = ()) -> None:
        if isinstance(value, str):
            try:
                parsed = yaml.load(value, Loader=_YamlLoader)
            except yaml.YAMLError:
                parsed = None
            if not isinstance(parsed, dict):
                # The one error whose text argparse shows.
                raise ArgumentTypeError(f"expected a mapping such as '{{scaling: 5.0}}'; got {value!r}.")
            value = parsed.items()
        super().__init__(value)


def described(text: str) -> dict[str, str]:
    """Metadata of an argument: what `--help` says of it."""
    return {"help": text.replace("%", "%%")}


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


def parse_arguments(types: Sequence[type], argv: Sequence[str] | None = None, description: str = "") -> tuple[Any, ...]:
    """Read argument dataclasses from `--config file.yaml` and the command line, which has the last word.

    Args:
        types: Dataclasses; one instance of each is returned.
        argv: The command line without the program; `sys.argv[1:]` if None.
        description: Shown by `--help`.

    Raises:
        SystemExit: On an unknown key or a value of the wrong kind, with a message that names it.
    """
    parser = HfArgumentParser(types, description=description, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[], help="YAML file of arguments; may be repeated.")
    words = list(sys.argv[1:] if argv is None else argv)
    names = [f.name for cls in types for f in fields(cls)]
    known, _ = _config_parser().parse_known_args(words)
    try:
        words = [word for path in known.config for word in _words_of(path, names)] + words
        *parsed, _, unknown = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    except ValueError as error:
        parser.error(str(error))
    if unknown:
        parser.error(f"unknown argument {unknown[0]!r}.{_hint(unknown[0].lstrip('-').replace('-', '_'), names)}")
    return tuple(parsed)


def named_arguments(argv: Sequence[str] | None = None) -> set[str]:
    """Return the names of the arguments that the command line and its configurations give, whatever their values."""
    words = list(sys.argv[1:] if argv is None else argv)
    known, _ = _config_parser().parse_known_args(words)
    names = {word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    for path in known.config:
        names |= set(yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_YamlLoader) or {})
    return {name.removeprefix("no_") for name in names}


def _config_parser() -> HfArgumentParser:
    parser = HfArgumentParser((), add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    return parser


def _words_of(path: str, names: list[str]) -> list[str]:
    """Turn a YAML file into command-line words, so that both are checked and converted in the same way."""
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_YamlLoader)
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read the configuration {path}: {error}") from error
    if values is None:
        return []
    if not isinstance(values, dict):
        raise ValueError(f"the configuration {path} must be a mapping of arguments to values.")
    words = []
    for key, value in values.items():
        if key not in names:
            raise ValueError(f"unknown key {key!r} in {path}.{_hint(str(key), names)}")
        if value is None:
            continue
        if key == "mixed_precision" and value is False:
            value = "no"  # how YAML reads a bare `no`
        words.append(f"--{key}")
        if isinstance(value, list):
            words += [str(item) for item in value]
        else:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def _hint(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=3)
    guess = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"{guess} The keys are: {', '.join(sorted(names))}."
