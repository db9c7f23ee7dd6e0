"""The snapshots of a training run."""

from collections.abc import Mapping

from safetensors import SafetensorError
from torch import nn

from hf_sphere.training.checkpoints import RunState
from hf_sphere.training.errors import CheckpointError
from hf_sphere.training.run import Run
from hf_sphere.utils.snapshots import SNAPSHOT_FOLDER, list_snapshots, save_snapshot


class Snapshots:
    """The snapshots of a run; see `hf_sphere.utils.snapshots`.

    Saves the initialization, every `snapshot_epochs`-th epoch, all epochs up to `snapshot_until`, and the last one, if
    either argument is set.

    Args:
        run: The run, with arguments and output directory.
        metadata: Metadata of each file besides seed and epoch.
    """

    def __init__(self, run: Run, metadata: Mapping[str, str]) -> None:
        self.every, self.until = run.args.snapshot_epochs, run.args.snapshot_until
        self.folder = run.output_dir / SNAPSHOT_FOLDER
        self.accelerator = run.accelerator
        self.metadata = {**metadata, "seed": str(run.args.seed)}

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

    def at_end(self, model: nn.Module, state: RunState) -> None:
        """Save the weights of the last epoch, unless training ended in the middle of an epoch."""
        if self.requested and state.batch == 0:
            self._save(model, state.epoch, replace=False)

    def remove_after(self, epoch: int) -> None:
        """Remove snapshots of later epochs, left over if training was resumed from an earlier checkpoint."""
        if self.accelerator.is_main_process:
            for snapshot in list_snapshots(self.folder):
                if snapshot.epoch > epoch:
                    snapshot.path.unlink()

    def _save(self, model: nn.Module, epoch: int, *, replace: bool = True) -> None:
        # Only the main process looks at the folder: the others could find it before or after a file is written.
        if self.accelerator.is_main_process:
            kept = {snapshot.epoch for snapshot in list_snapshots(self.folder)}
            try:
                if replace or epoch not in kept:
                    save_snapshot(model, self.folder, epoch, self.metadata)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"could not write the snapshot of epoch {epoch}: {error}") from error
        self.accelerator.wait_for_everyone()
