"""The setup of a run: devices, logging, seeds, output directory and settings."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, ProjectConfiguration, set_seed
from huggingface_hub.utils import validate_repo_id
from transformers.trainer_utils import enable_full_determinism

from hf_sphere.training.arguments import TrainingArguments
from hf_sphere.training.checkpoints import find_checkpoint, restore_checkpoints
from hf_sphere.training.optimization import check_optimizer_arguments
from hf_sphere.training.output_dir import (
    RESULTS_FILE,
    check_output_dir,
    locked,
    prepare_output_dir,
    read_settings,
    write_settings,
)
from hf_sphere.utils.files import write_json
from hf_sphere.utils.privacy import hide_private

logger = logging.getLogger(__name__)

# Settings that may change when a run is resumed, since they do not affect training.
_FREE_TO_CHANGE = {
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "disable_tqdm", "report_to", "logging_steps"),
    *("save_epochs", "save_steps", "save_total_limit", "per_device_eval_batch_size", "cache_dir", "max_steps"),
    *("dataloader_num_workers", "push_to_hub", "hub_model_id", "early_stopping_patience", "load_best_model_at_end"),
    *("radial_logging_steps", "preprocessing_num_workers", "snapshot_epochs", "snapshot_until"),
    *("test_time_flips", "calibrate", "license"),
}

_OF_THE_MODEL = {
    *("backbone", "backbone_kwargs", "embedding_dim", "head", "head_kwargs", "metric", "spherization", "spherized"),
    *("spherization_kwargs", "spherized_layers", "temperature", "prototypes_file", "value_range", "tokenizer_name"),
    *("image_size", "num_channels", "final_activation"),
}
"""Settings that define the model."""

_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)


class Run:
    """A training run: arguments, processes and output directory.

    As a context manager, it unlocks the output directory when the block ends.

    Attributes:
        args: Training arguments.
        accelerator: Devices, processes and precision.
        output_dir: The output directory.
        recipe: Name of the recipe.
    """

    def __init__(
        self, args: TrainingArguments, accelerator: Accelerator, *others: Any, recipe: str | None = None
    ) -> None:
        self.args = args
        self.accelerator = accelerator
        self.output_dir = Path(args.output_dir)
        self.recipe = recipe
        self._parts = (*others, args)
        self._lock = ExitStack()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.close()

    @property
    def settings(self) -> dict[str, Any]:
        """All arguments by name, with the values that `Task.prepare` has set."""
        settings = {name: value for part in self._parts for name, value in asdict(part).items()}
        used = {"num_processes": self.accelerator.num_processes, "mixed_precision": self.accelerator.mixed_precision}
        return settings | used

    def prepare_output_dir(self) -> None:
        """Create the output directory, replacing its contents if requested, write `run.json`, and start the trackers.

        Called after data and model have been loaded, so that a run that fails to start replaces nothing. The directory
        is locked until the end of the run.

        Raises:
            FileExistsError: If the directory must not be replaced, or another run has locked it.
        """
        resume, overwrite = self.args.resume_from_checkpoint is not None, self.args.overwrite_output_dir
        if self.accelerator.is_main_process:
            self._lock.enter_context(locked(self.output_dir))
            prepare_output_dir(self.output_dir, overwrite=overwrite, resume=resume, recipe=self.recipe)
            if resume and not overwrite:
                _check_changes(read_settings(self.output_dir) or {}, self.settings)
            write_settings(self.output_dir, {"recipe": self.recipe, **self.settings})
        self.accelerator.wait_for_everyone()
        if self.args.report_to:
            scalars = {k: v for k, v in hide_private(self.settings).items() if isinstance(v, (int, float, str, bool))}
            self.accelerator.init_trackers(self.output_dir.name, config=scalars)

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Write `all_results.json`, on the main process."""
        if self.accelerator.is_main_process:
            write_json(self.output_dir / RESULTS_FILE, results)

    def print(self, text: str) -> None:
        """Print on the main process."""
        self.accelerator.print(text)


def start_accelerator(**options: Any) -> Accelerator:
    """Create an `Accelerator`; processes of `torchrun` on CPUs, which it would not connect, form a group, too."""
    if {"LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys() and not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    return Accelerator(**options)


def start_run(args: TrainingArguments, *others: Any, recipe: str | None = None) -> Run:
    """Set up devices, logging and seed, and check the output directory.

    Args:
        args: Training arguments.
        *others: Further argument dataclasses of the recipe; all are written to `run.json`.
        recipe: Name of the recipe; another one does not resume the run.

    Raises:
        FileExistsError: If the output directory must not be replaced, or a run of another process is using it.
        CheckpointError: If there is no checkpoint to resume from.
    """
    check_optimizer_arguments(args)
    # Weights that decay towards zero become denormal, and CPUs are much slower with these. Set before torch starts its
    # threads, which inherit it.
    torch.set_flush_denormal(True)
    # In the linear probe, the parameters of the backbone have no gradients.
    unused = any(getattr(part, "linear_probe_epochs", 0) for part in others)
    accelerator = start_accelerator(
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)] if unused else None,
        mixed_precision=args.mixed_precision,
        log_with=args.report_to,
        project_config=ProjectConfiguration(args.output_dir, logging_dir=str(Path(args.output_dir, "logs"))),
    )
    level = logging.INFO if accelerator.is_main_process else logging.ERROR
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("hf_sphere").setLevel(level)
    transformers.utils.logging.disable_progress_bar()  # the loop shows another one
    if not accelerator.is_main_process:
        transformers.utils.logging.set_verbosity_error()
    # Tied weights are saved once; accelerate would warn at every checkpoint.
    logging.getLogger("accelerate.utils.other").addFilter(lambda record: "Removed shared tensor" not in str(record.msg))
    if args.full_determinism:
        enable_full_determinism(args.seed)
    set_seed(args.seed)
    _check_trackers(accelerator, args.report_to or [])
    if args.push_to_hub or args.hub_model_id is not None:
        validate_repo_id(args.hub_model_id or Path(args.output_dir).name)
    _check_sharding(accelerator, args, shard_classes=any(getattr(part, "shard_classes", False) for part in others))
    output_dir, resume = Path(args.output_dir), args.resume_from_checkpoint
    check_output_dir(output_dir, overwrite=args.overwrite_output_dir, resume=resume is not None, recipe=recipe)
    if accelerator.is_main_process and output_dir.is_dir():
        with locked(output_dir):
            restore_checkpoints(output_dir)
    accelerator.wait_for_everyone()
    if resume is not None:
        find_checkpoint(resume, output_dir)
    return Run(args, accelerator, *others, recipe=recipe)


def _check_trackers(accelerator: Accelerator, requested: Sequence[str]) -> None:
    """Raise an error for trackers that are not installed, which Accelerate would skip silently."""
    found = {str(getattr(tracker, "value", tracker)) for tracker in accelerator.log_with}
    missing = [name for name in requested if name not in found and name != "all"]
    if missing:
        raise ImportError(
            f"the package of tracker {', '.join(missing)} is not installed: pip install {' '.join(missing)} "
            "(tensorboard comes with 'hf_sphere[trackers]')."
        )


def _check_sharding(accelerator: Accelerator, args: TrainingArguments, *, shard_classes: bool) -> None:
    """Raise an error for arguments that the loop does not support on a sharded model."""
    used: dict[str, bool] = {}
    if accelerator.distributed_type == DistributedType.FSDP or shard_classes:
        used = {"ema_decay": args.ema_decay is not None, "load_best_model_at_end": args.load_best_model_at_end}
        used |= {name: getattr(args, name) is not None for name in ("snapshot_epochs", "snapshot_until")}
    elif accelerator.distributed_type == DistributedType.DEEPSPEED:  # its engine takes a step after each backward pass
        used = {"gradient_accumulation_steps": args.gradient_accumulation_steps > 1}
        used |= {"max_grad_norm": args.max_grad_norm is not None}
    if shard_classes:  # each process would choose another scale of its loss
        used["mixed_precision fp16"] = accelerator.mixed_precision == "fp16"
        used[accelerator.distributed_type.value] = accelerator.distributed_type in _SHARDED
    if unsupported := [name for name, is_used in used.items() if is_used]:
        kind = "shard_classes" if shard_classes else accelerator.distributed_type.value
        raise ValueError(f"{' and '.join(unsupported)} cannot be combined with {kind}; leave it out or use DDP.")


def _check_changes(before: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Log changed settings of a resumed run; raise an error if they define another model."""
    now = json.loads(json.dumps(settings, default=str))
    changed = [k for k in now if k in before and before[k] != now[k] and k not in _FREE_TO_CHANGE]
    of_the_model = [k for k in changed if k in _OF_THE_MODEL]
    differences = ", ".join(f"{k} ({before[k]} -> {now[k]})" for k in of_the_model or changed)
    if of_the_model:
        raise ValueError(
            f"the run to resume has another model; changed are: {differences}. Repeat its settings, or choose another "
            "--output_dir."
        )
    if changed:
        logger.warning("The resumed run differs from its earlier part: %s.", differences)
