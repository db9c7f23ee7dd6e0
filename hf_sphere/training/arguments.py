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

from hf_sphere.data.episodes import Episodes
from hf_sphere.nn.heads import HEADS


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
class ModelArguments:
    """Which image model."""

    model_name_or_path: str | None = field(
        default=None,
        metadata=described(
            "Start from this saved model (folder or Hub id), which brings backbone, embedding and head."
        ),
    )
    backbone: str | None = field(
        default=None, metadata=described("Name of a timm model or of a backbone of this library; `lenet5` if not set.")
    )
    backbone_kwargs: Options = field(default_factory=Options, metadata=described("Options of the backbone, a mapping."))
    pretrained_backbone: bool = field(
        default=False, metadata=described("Start from timm's pretrained weights; reaches the Hub.")
    )
    embedding_dim: int | None = field(
        default=None, metadata=described("Length of the embeddings; the backbone's own if not set.")
    )
    head: str | None = field(
        default=None,
        metadata=described(f"Name of the head: {', '.join(HEADS)}; if not set `spherized`, with values `prototype`."),
    )
    freeze_batch_norm: bool | None = field(
        default=None,
        metadata=described(
            "Keep the statistics of the backbone's batch norms, as for pretrained ones; no, if not set."
        ),
    )
    head_kwargs: Options = field(default_factory=Options, metadata=described("Options of the head, a mapping."))
    prototypes_file: str | None = field(
        default=None,
        metadata=described(
            "Prototypes of head `prototype`, as recipes/place_prototypes.py writes; placed anew if not set."
        ),
    )


@dataclass
class RegressionArguments:
    """Which values, and how they are predicted."""

    value_column_name: str | None = field(default=None, metadata=described("Column of the values; found if not set."))
    computed_value: str | None = field(
        default=None,
        metadata=described("Predict a value computed from the image instead: slant (degrees) or intensity."),
    )
    value_range: list[float] | None = field(
        default=None, metadata=described("Lowest and highest value; those of the training split if not set.")
    )
    out_of_range: Literal["error", "clip"] | None = field(
        default=None,
        metadata=described(
            "Refuse values outside of the range, or take the nearest end for them; if not set, values are refused "
            "where value_range is given, and clipped where it is measured."
        ),
    )

    def __post_init__(self) -> None:
        if self.value_range is not None and (len(self.value_range) != 2 or self.value_range[0] >= self.value_range[1]):
            raise ValueError(f"value_range must be two numbers, the lower one first; got {self.value_range}.")


@dataclass
class JointArguments(RegressionArguments):
    """A regression beside the classes."""

    task_weight: float | None = field(
        default=None,
        metadata=described("Weight of the classification, 0 to 1, the regression has the rest; 0.25 if not set."),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task_weight is not None and not 0.0 <= self.task_weight <= 1.0:
            raise ValueError(f"task_weight must lie between 0 and 1; got {self.task_weight}.")


@dataclass
class RetrievalArguments:
    """Which classes are trained on, and which are only searched for."""

    train_classes: int | None = field(
        default=None,
        metadata=described(
            "Pool both splits, train on the first so many classes and evaluate on the others; the splits' own classes "
            "if not set."
        ),
    )


@dataclass
class ImageDataArguments:
    """Which images, and how they are prepared."""

    dataset_name: str = field(
        default="digits", metadata=described("Id on the Hub, a folder, or the embedded `digits` or `two_clusters`.")
    )
    dataset_config_name: str | None = field(default=None, metadata=described("Configuration of the data set."))
    train_split: str = field(default="train", metadata=described("Split to train on."))
    eval_split: str | None = field(
        default=None, metadata=described("Split to report results on; `test`, else `validation`, if not set.")
    )
    validation_fraction: float = field(
        default=0.0,
        metadata=described(
            "Share of the training split held out, stratified, to choose the best epoch and to stop on."
        ),
    )
    image_column_name: str | None = field(default=None, metadata=described("Column of the images; found if not set."))
    label_column_name: str | None = field(default=None, metadata=described("Column of the labels; found if not set."))
    image_size: list[int] | None = field(
        default=None, metadata=described("Side in pixels, or height and width; that of the first image if not set.")
    )
    num_channels: int | None = field(default=None, metadata=described("1 or 3; that of the first image if not set."))
    image_mean: list[float] | None = field(
        default=None, metadata=described("Mean a channel on the scale 0 to 1; measured if not set.")
    )
    image_std: list[float] | None = field(
        default=None, metadata=described("Standard deviation a channel; measured if not set.")
    )
    crop_padding: int = field(default=0, metadata=described("Pixels of zero padding before a random crop in training."))
    horizontal_flip: bool = field(default=False, metadata=described("Mirror half of the training images."))
    rotation: float = field(default=0.0, metadata=described("Largest random rotation of training images, degrees."))
    random_resized_crop: float | None = field(
        default=None,
        metadata=described("Train on random parts of the images; the smallest share of the area, for instance 0.08."),
    )
    episode_classes: int | None = field(
        default=None, metadata=described("Make each training batch of so many classes, in place of a batch size.")
    )
    episode_examples: int | None = field(default=None, metadata=described("Images of each class in such a batch."))
    episodes_per_epoch: int | None = field(
        default=None, metadata=described("Such batches an epoch, over all processes.")
    )
    max_train_samples: int | None = field(default=None, metadata=described("Use only so many training images."))
    max_eval_samples: int | None = field(default=None, metadata=described("Use only so many evaluation images."))
    skip_corrupt_images: bool = field(default=False, metadata=described("Leave out images that cannot be decoded."))
    cache_dir: str | None = field(
        default=None, metadata=described("Folder for decoded images; below the Hugging Face home if not set.")
    )
    dataloader_num_workers: int | None = field(
        default=None, metadata=described("Decoding processes; one a core if not set.")
    )

    def __post_init__(self) -> None:
        names = ("episode_classes", "episode_examples", "episodes_per_epoch")
        given = [name for name in names if getattr(self, name) is not None]
        if given and len(given) < len(names):
            missing = ", ".join(name for name in names if name not in given)
            raise ValueError(f"{', '.join(given)} is given without {missing}; episodes need all three.")

    @property
    def episodes(self) -> Episodes | None:
        """What an epoch of episodes is made of, if there are any."""
        if self.episode_classes is None or self.episode_examples is None or self.episodes_per_epoch is None:
            return None
        return Episodes(self.episode_classes, self.episode_examples, self.episodes_per_epoch)


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
    load_best_model_at_end: bool = field(
        default=False, metadata=described("Report and keep the best epoch's model instead of the last one's.")
    )
    save_epochs: int = field(default=1, metadata=described("Epochs between checkpoints."))
    save_steps: int | None = field(default=None, metadata=described("Optimiser steps between further checkpoints."))
    save_total_limit: int = field(default=2, metadata=described("Checkpoints to keep."))
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
