"""Checkpoints of a training run, written atomically.

A checkpoint has a manifest, written last, with the checksums of its files; a folder without one is incomplete.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn

from hf_sphere.nn.heads.mixins import class_shards
from hf_sphere.nn.processes import count_processes, process_index, share_of
from hf_sphere.training.errors import CheckpointError
from hf_sphere.training.optimization import check_state
from hf_sphere.training.output_dir import CHECKPOINT_PREFIX, list_checkpoints
from hf_sphere.utils import files

STATE_FILE = "trainer_state.json"

SHARD_FILE = "class_weights-{:05d}-of-{:05d}.safetensors"
"""Rows of the class vectors of one process, and of their optimizer state; any number of processes can read them."""


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
        best_step: Its step, whose checkpoint is kept, if the best model is to be loaded at the end.
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
    best_step: int | None = None
    seconds: float = 0.0
    scheduler: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    batching: dict[str, Any] = field(default_factory=dict)
    metric: str = ""


@contextmanager
def explained(problem: str) -> Iterator[None]:
    """Raise all errors, such as those of torch and safetensors on a full disk, as a `CheckpointError`."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{problem}: {error}") from error


def save_checkpoint(accelerator: Accelerator, output_dir: Path, state: RunState, keep: int) -> Path:
    """Write `checkpoint-<step>`, then remove all but the newest `keep` and the best one; an error leaves all."""
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
            kept = [*present[: present.index(final) + 1][-keep:], output_dir / f"{CHECKPOINT_PREFIX}{state.best_step}"]
            for old in set(present).difference(kept):
                # Under the name of a file in progress, which the next run removes if this one is killed meanwhile.
                shutil.rmtree(old.rename(old.with_name(f".{old.name}{files.UNFINISHED}")))
    accelerator.wait_for_everyone()
    return final


@contextmanager
def write_model_files(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder for the files of a model; they replace those in `folder` after all have been written."""
    with explained(f"could not write {folder}; earlier files are unchanged"), files.atomic_files(folder) as unfinished:
        yield unfinished


def load_checkpoint(accelerator: Accelerator, checkpoint: Path) -> RunState:
    """Load the state of model, optimizer and random generators, and return the progress of the run."""
    hooks = [each.optimizer.register_load_state_dict_pre_hook(check_state) for each in accelerator._optimizers]
    with explained(f"cannot load {checkpoint}"):
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
    path = Path(checkpoints[-1] if name == "latest" and checkpoints else name)
    if not (path / files.MANIFEST_FILE).is_file():
        complete = ", ".join(map(str, checkpoints)) or f"none in {output_dir}"
        raise CheckpointError(f"{name} is not a complete checkpoint with a {files.MANIFEST_FILE}; there is {complete}.")
    return path


def gather_classes(model: nn.Module) -> dict[str, Tensor] | None:
    """Return the state of a model with all classes on the first process, None on the others; all must call it.

    Example:
        >>> gather_classes(network).keys() == network.state_dict().keys()
        True
    """
    is_main = process_index() == 0
    state = {name: value.cpu() for name, value in model.state_dict().items()} if is_main else None
    for name, head in class_shards(model).items():
        shard, rows = model.get_parameter(name).detach().contiguous(), []
        for process in range(count_processes()):
            count = len(share_of(head.num_classes, process))
            received = shard if process == process_index() else shard.new_empty(count, *shard.shape[1:])
            if count_processes() > 1:
                distributed.broadcast(received, process)
            rows += [received.cpu()] if is_main else []
        if state is not None:
            state[name] = torch.cat(rows)
    return state


def register_class_shards(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write and read the class vectors of this process in the checkpoints of an accelerator.

    The accelerator has one model and one optimizer, which are passed without their wrappers.
    """
    shards, loaded = class_shards(model), dict[str, dict[str, Tensor]]()
    names = {model.get_parameter(name): name for name in shards}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = {index: names[each] for index, each in enumerate(parameters) if each in names}

    def save(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        """Write the file of this process, and leave the other weights to Accelerate."""
        others = {name: value for name, value in model.state_dict().items() if name not in shards}
        weights[:] = [{name: value.contiguous() for name, value in others.items()}]
        tensors, rows = {}, {}
        for name, head in shards.items():
            parameter = model.get_parameter(name)
            for key, value in {"": parameter.detach(), **optimizer.state[parameter]}.items():
                if value is not None:
                    tensors[f"{name}:{key}"] = value.contiguous()
            rows[name] = f"{head.classes.start} {head.classes.stop} {head.num_classes}"
        save_file(tensors, Path(folder, SHARD_FILE.format(process_index(), count_processes())), metadata=rows)

    def load(models: list[nn.Module], folder: str) -> None:
        """Load the model with the rows of the classes of this process; its optimizer state is loaded by `fill`."""
        models.clear()
        state = load_file(Path(folder, "model.safetensors"))
        for name, head in shards.items():
            loaded[name] = _read_rows(Path(folder), name, head.classes, head.num_classes)
            state[name] = loaded[name].pop("")
        model.load_state_dict(state)

    def leave_out(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        for index in indices:
            state["state"].pop(index, None)

    def fill(_: torch.optim.Optimizer) -> None:
        """Add the optimizer state of the class vectors to that of the others."""
        state = {index: loaded.pop(name, {}) for index, name in indices.items()}
        check_state(optimizer, {"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        for index, name in indices.items():
            parameter = model.get_parameter(name)
            # Steps are counted on the CPU, like those that torch loads.
            moved = {k: v if v.ndim == 0 else v.to(parameter.device) for k, v in state[index].items()}
            if moved:
                optimizer.state[parameter] = moved

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    optimizer.register_state_dict_post_hook(leave_out)
    optimizer.register_load_state_dict_post_hook(fill)


def _read_rows(folder: Path, name: str, classes: range, num_classes: int) -> dict[str, Tensor]:
    """Read rows of a parameter, as an empty name, and of its optimizer state, from the files of all processes."""
    pieces: dict[str, list[Tensor]] = {}
    for path in sorted(folder.glob("class_weights-*.safetensors")):
        with safe_open(path, "pt") as file:
            start, stop, total = map(int, file.metadata()[name].split())
            if total != num_classes:
                raise ValueError(f"{path.name} has {name} of {total} classes; expected {num_classes}")
            rows = slice(max(classes.start - start, 0), max(min(classes.stop, stop) - start, 0))
            for key in file.keys():  # noqa: SIM118
                owner, _, part = key.rpartition(":")
                if owner == name:
                    values = file.get_slice(key)
                    piece = values[rows] if values.get_shape() else file.get_tensor(key)
                    pieces.setdefault(part, []).append(piece)
    if not pieces:
        raise ValueError(f"{folder} has no class vectors of processes; it was written without shard_classes")
    return {part: values[0] if values[0].ndim == 0 else torch.cat(values) for part, values in pieces.items()}
