"""Checkpoints and snapshots of a training run, written atomically.

A checkpoint has a manifest, written last, with the checksums of its files; a folder without one is incomplete.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hf_sphere.training.errors import CheckpointError
from hf_sphere.training.optimization import check_state, total_norm
from hf_sphere.training.output_dir import CHECKPOINT_PREFIX, checkpoint_folders, list_checkpoints
from hf_sphere.utils import files
from hf_sphere.utils.checks import error_text
from hf_sphere.utils.modules import shared_tensors
from hf_sphere.utils.snapshots import list_snapshots, save_snapshot

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
    """Raise an error if modules share tensors that the model does not declare as tied, or its configuration is no JSON.

    Called before training, after which the model could not be saved.
    """
    try:
        if isinstance(model, PreTrainedModel):
            remove_tied_weights_from_state_dict(model.state_dict(), model)
            model.config.to_json_string()
        elif not hasattr(model, "save_pretrained") and (shared := shared_tensors(model)):
            raise RuntimeError(f"safetensors does not save shared tensors: {', '.join(shared)}")
    except (RuntimeError, TypeError) as error:
        hint = "Declare shared tensors in its `_tied_weights_keys`; its configuration must be JSON."
        raise ValueError(f"the model could not be saved: {error_text(error).rstrip('.')}. {hint}") from error


def save_checkpoint(accelerator: Accelerator, output_dir: Path, state: RunState, keep: int) -> Path:
    """Write `checkpoint-<step>`, then remove all but the newest `keep`; a `CheckpointError` leaves the older ones."""
    final = output_dir / f"{CHECKPOINT_PREFIX}{state.step}"
    is_main = accelerator.is_main_process
    try:
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
                with suppress(OSError):
                    files.remove_folder(old)
    except Exception as error:  # torch, safetensors and the OS raise different errors on a full disk
        left = list_checkpoints(output_dir)
        newest = f"The newest complete checkpoint is {left[-1]}." if left else "There is no earlier checkpoint."
        raise CheckpointError(f"could not write {final}: {error} ({_free_space(output_dir)}). {newest}") from error
    accelerator.wait_for_everyone()
    return final


@contextmanager
def write_model_files(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder for the files of a model; they replace those in `folder` after all have been written.

    All errors, for instance of a full disk, become a `CheckpointError`.
    """
    try:
        with files.atomic_files(folder) as unfinished:
            yield unfinished
    except Exception as error:  # see save_checkpoint
        problem = f"{error} ({_free_space(folder)})"
        raise CheckpointError(f"could not write {folder}: {problem}. Earlier files are unchanged.") from error


def load_checkpoint(accelerator: Accelerator, checkpoint: Path) -> RunState:
    """Load the state of model, optimizer and random generators, and return the progress of the run.

    Missing and damaged files, those that do not fit, and weights that are not finite are errors.
    """
    hooks = [each.optimizer.register_load_state_dict_pre_hook(check_state) for each in accelerator._optimizers]
    try:
        (damage,) = broadcast_object_list([files.find_damage(checkpoint) if accelerator.is_main_process else None])
        if damage:
            raise ValueError(damage)
        state = RunState(**json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8")))
        accelerator.load_state(str(checkpoint))
        for model in accelerator._models:
            if not total_norm(accelerator.unwrap_model(model)).isfinite():
                raise ValueError("its weights are not finite")
    except Exception as error:  # a damaged file raises an error of pickle or safetensors
        intact = newest_intact(checkpoint.parent)
        other = f" Another checkpoint: {intact}." if intact not in (None, checkpoint) else ""
        raise CheckpointError(f"cannot resume from {checkpoint}: {error_text(error).rstrip('.')}.{other}") from error
    finally:
        for hook in hooks:
            hook.remove()
    return state


def newest_intact(output_dir: Path) -> Path | None:
    """Return the newest checkpoint whose files are as they were written."""
    return next((path for path in reversed(list_checkpoints(output_dir)) if files.find_damage(path) is None), None)


def find_checkpoint(name: str, output_dir: Path) -> Path:
    """Resolve `latest` or a folder to a complete checkpoint; if there is none, the error lists those of the run."""
    checkpoints = list_checkpoints(output_dir)
    if name == "latest" and checkpoints:
        return checkpoints[-1]
    if name == "latest":
        names = ", ".join(path.name for path in checkpoint_folders(output_dir))
        ignored = f" ({names}: incomplete, since there is no {files.MANIFEST_FILE})" if names else ""
        raise CheckpointError(f"there is no checkpoint in {output_dir} to resume from{ignored}.")
    if not (Path(name) / files.MANIFEST_FILE).is_file():
        have = f" The checkpoints of this run: {', '.join(map(str, checkpoints))}." if checkpoints else ""
        raise CheckpointError(f"{name} is not a complete checkpoint: it has no {files.MANIFEST_FILE}.{have}")
    return Path(name)


def _free_space(folder: Path) -> str:
    """Describe the free disk space: a full disk is the usual cause, and torch's error does not mention it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return f"{shutil.disk_usage(existing).free / 2**20:.1f} MiB free"


@dataclass(frozen=True)
class Snapshots:
    """The snapshots of a run; see `hf_sphere.utils.snapshots`.

    Saves the initialization, every `every`-th epoch, all epochs up to `until`, and the last one, if either is set.
    """

    folder: Path
    every: int | None  # epochs between two snapshots
    until: int | None  # save every epoch up to this one
    metadata: Mapping[str, str]  # of each file besides the epoch

    def save(self, model: nn.Module, epoch: int, *, is_last: bool = False) -> None:
        """Save the weights after an epoch (0 for the initialization) if requested; those of the last one only once."""
        regular = self.every is not None and (is_last or epoch % self.every == 0)
        early = self.until is not None and (is_last or epoch <= self.until)
        if not regular and not early:
            return
        # Only the main process looks at the folder: the others could find it before or after a file is written.
        if PartialState().is_main_process and not (
            is_last and epoch in (snapshot.epoch for snapshot in list_snapshots(self.folder))
        ):
            try:
                save_snapshot(model, self.folder, epoch, self.metadata)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"could not write the snapshot of epoch {epoch}: {error}") from error
        PartialState().wait_for_everyone()

    def remove_after(self, epoch: int) -> None:
        """Remove snapshots of later epochs, left over if training was resumed from an earlier checkpoint."""
        if PartialState().is_main_process:
            for snapshot in list_snapshots(self.folder):
                if snapshot.epoch > epoch:
                    snapshot.path.unlink()
