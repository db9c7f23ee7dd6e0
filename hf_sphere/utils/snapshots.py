"""Snapshots: model weights saved during training, one safetensors file per epoch, for later analysis.

Checkpoints serve to resume training, and old ones are removed. Snapshots contain only the model, and all are kept.
`hf_sphere.training` writes them to the folder `snapshots` of a run, and `hf_sphere.hyperplanes` reads them.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_model
from torch import nn

from hf_sphere.utils.checks import check_regular
from hf_sphere.utils.files import SNAPSHOT_FOLDER, atomic_file

ORDER_KEY = "order"
"""Metadata key of the tensor names in model order, which safetensors files do not preserve."""

_NAME = re.compile(r"epoch-(\d+)\.safetensors")


@dataclass(frozen=True)
class Snapshot:
    """Weights after a number of epochs, 0 for the initialization, by the names of the state dict; and their file."""

    path: Path
    epoch: int
    metadata: Mapping[str, str] = field(default_factory=dict)


def save_snapshot(
    model: nn.Module, folder: str | PathLike, epoch: int, metadata: Mapping[str, str] | None = None
) -> Path:
    """Write `<folder>/epoch-<epoch>.safetensors` atomically: parameters and buffers, tied ones once; return its path.

    Epoch 0 is the initialization. The `metadata` of the file are added.
    """
    path = Path(folder, f"epoch-{epoch:04d}.safetensors")
    own = {"format": "pt", "epoch": str(epoch), ORDER_KEY: json.dumps(list(model.state_dict()))}
    with atomic_file(path) as unfinished:
        save_model(model, str(unfinished), metadata={**(metadata or {}), **own})
    return path


def read_snapshot(path: str | PathLike) -> Snapshot:
    """Read the header of a snapshot; the epoch is in its metadata or in its name."""
    path = Path(path)
    check_regular(path)
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
    named = _NAME.fullmatch(path.name)
    epoch = str(metadata.get("epoch", named[1] if named else ""))
    if not epoch.isdecimal():
        raise ValueError(f"the epoch of {path} is unknown; name it epoch-<number>.safetensors, or write metadata.")
    return Snapshot(path, int(epoch), metadata)


def list_snapshots(folder: str | PathLike) -> list[Snapshot]:
    """Return the snapshots in the folder of a run, or in their own, sorted by epoch."""
    inner = Path(folder, SNAPSHOT_FOLDER)
    source = inner if inner.is_dir() else Path(folder)  # which may not exist
    snapshots = [read_snapshot(path) for path in source.glob("*.safetensors") if _NAME.fullmatch(path.name)]
    return sorted(snapshots, key=lambda snapshot: snapshot.epoch)
