"""The snapshots of a training run."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from accelerate import PartialState
from safetensors import SafetensorError
from torch import nn

from hf_sphere.training.errors import CheckpointError
from hf_sphere.utils.snapshots import SNAPSHOT_FOLDER, list_snapshots, save_snapshot


class Snapshots:
    """The snapshots of a run; see `hf_sphere.utils.snapshots`.

    Saves the initialization, every `every`-th epoch, all epochs up to `until`, and the last one, if either is set.

    Args:
        output_dir: Output directory of the run.
        every: Epochs between two snapshots.
        until: Save every epoch up to this one.
        metadata: Metadata of each file besides the epoch.
    """

    def __init__(
        self, output_dir: str | PathLike, every: int | None, until: int | None, metadata: Mapping[str, str]
    ) -> None:
        if min(every or 1, until or 1) < 1 or 0 in (every, until):
            raise ValueError(f"snapshot_epochs and snapshot_until must be at least 1; got {every} and {until}.")
        self.every, self.until = every, until
        self.folder = Path(output_dir, SNAPSHOT_FOLDER)
        self.processes = PartialState()
        self.metadata = metadata

    @property
    def requested(self) -> bool:
        """Whether snapshots were requested."""
        return self.every is not None or self.until is not None

    def after_epoch(self, model: nn.Module, epoch: int) -> None:
        """Save the weights after an epoch (0 for the initialization) if requested."""
        regular = self.every is not None and epoch % self.every == 0
        early = epoch <= (self.until or 0)
        if self.requested and (regular or early):
            self._save(model, epoch)

    def at_end(self, model: nn.Module, epoch: int) -> None:
        """Save the weights of the last epoch if requested."""
        if self.requested:
            self._save(model, epoch, replace=False)

    def remove_after(self, epoch: int) -> None:
        """Remove snapshots of later epochs, left over if training was resumed from an earlier checkpoint."""
        if self.processes.is_main_process:
            for snapshot in list_snapshots(self.folder):
                if snapshot.epoch > epoch:
                    snapshot.path.unlink()

    def _save(self, model: nn.Module, epoch: int, *, replace: bool = True) -> None:
        # Only the main process looks at the folder: the others could find it before or after a file is written.
        if self.processes.is_main_process:
            kept = {snapshot.epoch for snapshot in list_snapshots(self.folder)}
            try:
                if replace or epoch not in kept:
                    save_snapshot(model, self.folder, epoch, self.metadata)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"could not write the snapshot of epoch {epoch}: {error}") from error
        self.processes.wait_for_everyone()
