"""Snapshots: the weights along a training, a safetensors file an epoch, for what is asked of them afterwards.

A checkpoint is there to go on from and is soon replaced; snapshots hold the model alone, and all of them stay.
`hf_sphere.training` writes them to the folder `snapshots` of a run, `hf_sphere.analysis` reads them.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_model
from torch import nn

from hf_sphere.utils.files import atomic_file

SNAPSHOT_FOLDER = "snapshots"
"""Where a run keeps them."""

ORDER_KEY = "order"
"""Of the header: the names of the tensors in the order of the model, which safetensors files do not keep."""

_NAME = re.compile(r"epoch-(\d+)\.safetensors")


@dataclass(frozen=True)
class Snapshot:
    """Weights after some epoch of a training.

    Attributes:
        path: A safetensors file whose names are those of the model's state dict.
        epoch: Epochs trained; 0 is the initialisation.
        metadata: What else the file says of itself.
    """

    path: Path
    epoch: int
    metadata: Mapping[str, str] = field(default_factory=dict)


def save_snapshot(
    model: nn.Module, folder: str | PathLike, epoch: int, metadata: Mapping[str, str] | None = None
) -> Path:
    """Write `<folder>/epoch-<epoch>.safetensors`, whole or not at all.

    Args:
        model: Its parameters and buffers are written, tied ones once.
        folder: Made if it is not there.
        epoch: Epochs trained.
        metadata: Further words for the file's header.

    Returns:
        The path of the file.
    """
    path = Path(folder, f"epoch-{epoch:04d}.safetensors")
    order = json.dumps(list(model.state_dict()))
    about = {**(metadata or {}), "format": "pt", "epoch": str(epoch), ORDER_KEY: order}
    with atomic_file(path) as unfinished:
        save_model(model, str(unfinished), metadata=about)
    return path


def read_snapshot(path: str | PathLike) -> Snapshot:
    """Read the header of a snapshot.

    Raises:
        FileNotFoundError: If it is not there.
        ValueError: If it is no safetensors file, or neither its header nor its name says the epoch.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no snapshot {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from error
    named = _NAME.fullmatch(path.name)
    epoch = str(metadata.get("epoch", named[1] if named else ""))
    if not epoch.isdigit():
        raise ValueError(
            f"{path} does not say after which epoch it was taken; a snapshot has `epoch` in its metadata, or is called "
            "epoch-<number>.safetensors."
        )
    return Snapshot(path, int(epoch), metadata)


def list_snapshots(folder: str | PathLike) -> list[Snapshot]:
    """Return the snapshots of a run, by epoch.

    Args:
        folder: Folder of the run, or of the snapshots themselves.
    """
    inner = Path(folder, SNAPSHOT_FOLDER)
    place = inner if inner.is_dir() else Path(folder)  # which need not be there
    found = [read_snapshot(path) for path in place.glob("*.safetensors") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda snapshot: snapshot.epoch)


def find_snapshots(paths: Iterable[Snapshot | str | PathLike]) -> tuple[list[Snapshot], list[Path]]:
    """Tell those of a list of snapshots that are there from those that are missing.

    Raises:
        ValueError: If one is there but is no snapshot.
    """
    found, missing = [], []
    for one in paths:
        path = Path(one.path if isinstance(one, Snapshot) else one)
        if not path.is_file():
            missing.append(path)
        else:
            found.append(one if isinstance(one, Snapshot) else read_snapshot(path))
    return found, missing
