"""Checkpoints of a training run, written atomically."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from hf_sphere.training.errors import CheckpointError
from hf_sphere.training.output_dir import CHECKPOINT_PREFIX, list_checkpoints
from hf_sphere.utils.files import REPLACED, UNFINISHED, atomic_files, atomic_folder, restore_folder, write_json

STATE_FILE = "trainer_state.json"


@dataclass
class RunState:
    """Progress of a run: all state except that of model, optimizer and random generators.

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
        num_processes: Number of processes that share the batches.
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
    num_processes: int = 1
    metric: str = ""


def save_checkpoint(accelerator: Accelerator, output_dir: Path, state: RunState, keep: int) -> Path:
    """Write `checkpoint-<step>`, then remove all but the newest `keep`.

    Raises:
        CheckpointError: If it cannot be written, for instance on a full disk; older checkpoints are unchanged.
    """
    final = output_dir / f"{CHECKPOINT_PREFIX}{state.step}"
    is_main = accelerator.is_main_process
    try:
        # The other processes write their random states to the folder that the main process creates and renames.
        shared = nullcontext(final.with_name(f".{final.name}{UNFINISHED}"))
        with atomic_folder(final) if is_main else shared as unfinished:
            accelerator.wait_for_everyone()
            accelerator.save_state(str(unfinished))
            accelerator.wait_for_everyone()
            if is_main:
                write_json(unfinished / STATE_FILE, asdict(state), strict=True)
        if is_main:
            # Checkpoints of later steps are left over if training was resumed from an earlier one.
            present = list_checkpoints(output_dir)
            position = present.index(final)
            for old in [*present[: max(position + 1 - keep, 0)], *present[position + 1 :]]:
                shutil.rmtree(old, ignore_errors=True)
    except Exception as error:  # torch, safetensors and the OS raise different errors on a full disk
        left = list_checkpoints(output_dir)
        newest = f"The newest complete checkpoint is {left[-1]}." if left else "There is no earlier checkpoint."
        raise CheckpointError(f"could not write {final}: {error} ({_free_space(output_dir)}). {newest}") from error
    accelerator.wait_for_everyone()
    return final


@contextmanager
def write_model_files(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder for the files of a model; they replace those in `folder` after all have been written.

    Raises:
        CheckpointError: If they cannot be written, for instance on a full disk.
    """
    try:
        with atomic_files(folder) as unfinished:
            yield unfinished
    except Exception as error:  # see save_checkpoint
        raise CheckpointError(
            f"could not write {folder}: {error} ({_free_space(folder)}). Earlier files are unchanged."
        ) from error


def load_checkpoint(accelerator: Accelerator, checkpoint: Path) -> RunState:
    """Load the state of model, optimizer and random generators, and return the progress of the run."""
    try:
        state = RunState(**json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8")))
        accelerator.load_state(str(checkpoint))
    except Exception as error:  # a damaged file raises an error of pickle or safetensors
        raise CheckpointError(f"cannot resume from {checkpoint}: {error}") from error
    return state


def find_checkpoint(name: str, output_dir: Path) -> Path:
    """Resolve `latest` or a folder to a checkpoint that exists.

    Raises:
        CheckpointError: If it does not exist; the message lists the checkpoints of the run.
    """
    found = list_checkpoints(output_dir)
    if name == "latest":
        if not found:
            raise CheckpointError(f"there is no checkpoint in {output_dir} to resume from; start without resuming.")
        return found[-1]
    if not (Path(name) / STATE_FILE).is_file():
        have = f" The checkpoints of this run: {', '.join(str(p) for p in found)}." if found else ""
        raise CheckpointError(f"{name} is not a checkpoint: it has no {STATE_FILE}.{have}")
    return Path(name)


def restore_checkpoints(output_dir: Path) -> None:
    """Restore a checkpoint whose replacement was interrupted."""
    for replaced in output_dir.glob(f".{CHECKPOINT_PREFIX}*{REPLACED}"):
        restore_folder(output_dir / replaced.name.removeprefix(".").removesuffix(REPLACED))


def _free_space(folder: Path) -> str:
    """Describe the free disk space: a full disk is the usual cause, and torch's error does not mention it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return f"{shutil.disk_usage(existing).free / 2**20:.1f} MiB free"
