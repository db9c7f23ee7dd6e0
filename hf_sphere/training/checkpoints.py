"""Checkpoints that are whole or not there: written under a temporary name, then renamed."""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from hf_sphere.training.errors import CheckpointError
from hf_sphere.utils.snapshots import SNAPSHOT_FOLDER

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
PREFIX = "checkpoint-"
RUN_FILE = "run.json"
RESULTS_FILE = "all_results.json"
BEST_FOLDER = "best"


@dataclass
class RunState:
    """Where a run is; everything that model, optimiser and random generators do not hold.

    Attributes:
        step: Optimiser steps taken.
        epoch: The current epoch, from 0.
        batch: Batches of the current epoch already trained on.
        totals: Sums over the current epoch's examples so far: their number, loss, further metrics.
        best_metric: Best value of the selection metric, or None before the first evaluation.
        best_epoch: The epoch, from 1, that it was reached after.
        seconds: Time spent in training.
        scheduler: State of the learning-rate schedule.
        history: One entry of metrics an epoch.
        num_processes: How many processes share the batches.
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
        CheckpointError: If it cannot be written, for instance on a full disk; older checkpoints stay as they are.
    """
    final = output_dir / f"{PREFIX}{state.step}"
    unfinished = output_dir / f".{final.name}.unfinished"
    try:
        if accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(unfinished))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (unfinished / STATE_FILE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
            replaced = output_dir / f".{final.name}.replaced"
            if final.exists():
                final.rename(replaced)
            unfinished.rename(final)
            shutil.rmtree(replaced, ignore_errors=True)
            # Later steps are of a continuation that was given up for an earlier checkpoint.
            present = list_checkpoints(output_dir)
            position = present.index(final)
            for old in [*present[: max(position + 1 - keep, 0)], *present[position + 1 :]]:
                shutil.rmtree(old, ignore_errors=True)
    except Exception as error:  # torch, safetensors and the operating system each have their own for a full disk
        shutil.rmtree(unfinished, ignore_errors=True)
        left = list_checkpoints(output_dir)
        whole = f"The newest whole checkpoint is {left[-1]}." if left else "There is no earlier checkpoint."
        raise CheckpointError(f"could not write {final}: {error} ({_room(output_dir)}). {whole}") from error
    accelerator.wait_for_everyone()
    return final


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yield a folder to write files to; they replace those in `folder`, one by one, when all have been written.

    Raises:
        CheckpointError: If they cannot be written, for instance on a full disk.
    """
    unfinished = folder / ".unfinished"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        for file in unfinished.iterdir():
            file.replace(folder / file.name)
    except Exception as error:  # see save_checkpoint
        raise CheckpointError(
            f"could not write {folder}: {error} ({_room(folder)}). What was there before is unchanged."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def load_checkpoint(accelerator: Accelerator, checkpoint: Path) -> RunState:
    """Load model, optimiser and random generators, and return where the run was."""
    try:
        state = RunState(**json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8")))
        accelerator.load_state(str(checkpoint))
    except Exception as error:  # as in writing; a damaged file shows as pickle's or safetensors' own error
        raise CheckpointError(f"cannot resume from {checkpoint}: {error}") from error
    return state


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return the whole checkpoints of a run, oldest first."""
    found = [p for p in output_dir.glob(f"{PREFIX}*") if p.name[len(PREFIX) :].isdigit() and p.is_dir()]
    return sorted(found, key=lambda path: int(path.name[len(PREFIX) :]))


def find_checkpoint(name: str, output_dir: Path) -> Path:
    """Resolve `latest` or a folder to a checkpoint that exists."""
    if name == "latest":
        found = list_checkpoints(output_dir)
        if not found:
            raise CheckpointError(f"there is no checkpoint in {output_dir} to resume from; start without resuming.")
        return found[-1]
    if not (Path(name) / STATE_FILE).is_file():
        found = list_checkpoints(output_dir)
        have = f" The checkpoints of this run: {', '.join(str(p) for p in found)}." if found else ""
        raise CheckpointError(f"{name} is not a checkpoint: it has no {STATE_FILE}.{have}")
    return Path(name)


def check_output_dir(output_dir: Path, *, overwrite: bool, resume: bool) -> None:
    """Refuse a folder that holds another run.

    Raises:
        FileExistsError: If the folder holds a run and neither overwriting nor resuming was asked for.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"{output_dir} is a file and no folder; choose another --output_dir.")
    taken = marks_of_a_run(output_dir)
    if taken and not resume and not overwrite:
        raise FileExistsError(
            f"{output_dir} holds another run ({taken[0].name}). Choose another --output_dir, continue that run "
            "with --resume_from_checkpoint latest, or replace it with --overwrite_output_dir."
        )


def claim_output_dir(output_dir: Path, *, overwrite: bool, resume: bool) -> None:
    """Make the folder of a run; what another run left there is removed if that was asked for.

    Raises:
        FileExistsError: See `check_output_dir`.
    """
    check_output_dir(output_dir, overwrite=overwrite, resume=resume)
    if not resume:
        for mark in marks_of_a_run(output_dir):
            if mark.is_dir():
                shutil.rmtree(mark)
            else:
                mark.unlink(missing_ok=True)
    for unfinished in output_dir.glob(f".{PREFIX}*.unfinished"):
        shutil.rmtree(unfinished, ignore_errors=True)
    output_dir.mkdir(parents=True, exist_ok=True)


def restore_replaced(output_dir: Path) -> None:
    """Bring back a checkpoint that was set aside when a kill came before its successor had its name."""
    for replaced in output_dir.glob(f".{PREFIX}*.replaced"):
        final = output_dir / replaced.name[1 : -len(".replaced")]
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(final)


def _room(folder: Path) -> str:
    """Free space; a full disk is the usual reason, and torch's error does not say so."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return f"{shutil.disk_usage(existing).free / 2**20:.1f} MiB free"


def marks_of_a_run(output_dir: Path) -> list[Path]:
    """Return the files and folders that say that a folder holds a run."""
    names = (RUN_FILE, RESULTS_FILE, BEST_FOLDER, SNAPSHOT_FOLDER)
    marks = [*list_checkpoints(output_dir), *(output_dir / name for name in names)]
    return [mark for mark in marks if mark.exists()]
