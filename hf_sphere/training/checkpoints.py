"""Checkpoints of a training run, written atomically.

A checkpoint has a manifest, written last, with the checksums of its files; a folder without one is incomplete.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hf_sphere.training.errors import CheckpointError
from hf_sphere.training.optimization import check_state
from hf_sphere.training.output_dir import CHECKPOINT_PREFIX, list_checkpoints
from hf_sphere.utils import files
from hf_sphere.utils.checks import error_text
from hf_sphere.utils.modules import shared_tensors

STATE_FILE = "trainer_state.json"


@dataclass
class RunState:
    """Progress of a run: all state except model, optimizer and random generators.

    Attributes:
        step: Optimizer steps taken.
        epoch: Index of the current epoch.
        batch: Batches of the current epoch already trained on.
        totals: Sums over the examples of the current epoch so far: their number, the loss, and further metrics.
        best_metric: Best value of the selection metric, or None before the first evaluation.
        best_epoch: Epoch of the best value, counted from 1.
        seconds: Time spent in training.
        scheduler: State of the learning-rate schedule.
        history: One entry of metrics per epoch.
        batching: What the batches of an epoch depend on, as the names of options.
        metric: Name of the selection metric.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    totals: dict[str, float] = field(default_factory=dict)
    best_metric: float | None = None
    best_epoch: int | None = None
    seconds: float = 0.0
    scheduler: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    batching: dict[str, Any] = field(default_factory=dict)
    metric: str = ""


def check_can_be_saved(model: nn.Module) -> None:
    """Raise an error before training if modules share undeclared tensors, or the configuration is no JSON."""
    try:
        if isinstance(model, PreTrainedModel):
            remove_tied_weights_from_state_dict(model.state_dict(), model)
            model.config.to_json_string()
        elif not hasattr(model, "save_pretrained") and (shared := shared_tensors(model)):
            raise RuntimeError(f"safetensors does not save shared tensors: {', '.join(shared)}")
    except (RuntimeError, TypeError) as error:
        hint = "Declare shared tensors in its `_tied_weights_keys`; its configuration must be JSON."
        raise ValueError(f"the model could not be saved: {error_text(error)} {hint}") from error


@contextmanager
def explained(problem: str) -> Iterator[None]:
    """Raise all errors, such as those of torch and safetensors on a full disk, as a `CheckpointError`."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{problem}: {error}") from error


def save_checkpoint(accelerator: Accelerator, output_dir: Path, state: RunState, keep: int) -> Path:
    """Write `checkpoint-<step>`, then remove all but the newest `keep`; a `CheckpointError` leaves the older ones."""
    final, is_main = output_dir / f"{CHECKPOINT_PREFIX}{state.step}", accelerator.is_main_process
    with explained(f"could not write {final}; earlier checkpoints are unchanged"):
        with files.atomic_folder(final) if is_main else nullcontext() as unfinished:
            # The other processes write their random states to the folder that the main process creates and renames.
            (unfinished,) = broadcast_object_list([unfinished])
            accelerator.save_state(str(unfinished))
            accelerator.wait_for_everyone()
            if is_main:
                files.write_json(unfinished / STATE_FILE, asdict(state), strict=True)
                files.write_manifest(unfinished)
        if is_main:
            # Checkpoints of later steps are left over if training was resumed from an earlier one.
            present = list_checkpoints(output_dir)
            position = present.index(final)
            for old in [*present[: max(position + 1 - keep, 0)], *present[position + 1 :]]:
                shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


@contextmanager
def write_model_files(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder for the files of a model; they replace those in `folder` after all have been written.

    All errors, for instance of a full disk, become a `CheckpointError`.
    """
    with explained(f"could not write {folder}; earlier files are unchanged"), files.atomic_files(folder) as unfinished:
        yield unfinished


def load_checkpoint(accelerator: Accelerator, checkpoint: Path) -> RunState:
    """Load the state of model, optimizer and random generators, and return the progress of the run.

    Missing and damaged files, and those that do not fit, are errors.
    """
    hooks = [each.optimizer.register_load_state_dict_pre_hook(check_state) for each in accelerator._optimizers]
    with explained(f"cannot resume from {checkpoint}"):
        (damage,) = broadcast_object_list([files.find_damage(checkpoint) if accelerator.is_main_process else None])
        if damage:
            raise ValueError(damage)
        state = RunState(**files.read_json(checkpoint / STATE_FILE))
        accelerator.load_state(str(checkpoint))
    for hook in hooks:
        hook.remove()
    return state


def find_checkpoint(name: str, output_dir: Path) -> Path:
    """Resolve `latest` or a folder to a complete checkpoint; if there is none, the error lists those of the run."""
    checkpoints = list_checkpoints(output_dir)
    path = checkpoints[-1] if name == "latest" and checkpoints else Path(name)
    if not (path / files.MANIFEST_FILE).is_file():
        complete = ", ".join(map(str, checkpoints)) or f"none in {output_dir}"
        raise CheckpointError(f"{name} is not a complete checkpoint with a {files.MANIFEST_FILE}; there is {complete}.")
    return path
