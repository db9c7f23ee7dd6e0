"""Output directories: the files that runs and results consist of, and which may be replaced."""

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hf_sphere.utils.files import UNFINISHED
from hf_sphere.utils.snapshots import SNAPSHOT_FOLDER

CHECKPOINT_PREFIX = "checkpoint-"
RUN_FILE = "run.json"
RESULTS_FILE = "all_results.json"
BEST_FOLDER = "best"
MODEL_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = [path for path in output_dir.glob(f"{CHECKPOINT_PREFIX}*") if path.is_dir()]
    steps = {path: path.name.removeprefix(CHECKPOINT_PREFIX) for path in found}
    return sorted((path for path in found if steps[path].isdigit()), key=lambda path: int(steps[path]))


def check_output_dir(output_dir: Path, *, overwrite: bool, resume: bool) -> None:
    """Raise an error if the directory contains another training run.

    Raises:
        FileExistsError: If the directory contains a run and neither overwriting nor resuming was requested.
    """
    _check_is_directory(output_dir)
    traces = _traces_of_a_run(output_dir)
    if traces and not resume and not overwrite:
        raise FileExistsError(
            f"{output_dir} already contains a run ({traces[0].name}). Choose another --output_dir, resume it with "
            "--resume_from_checkpoint latest, or replace it with --overwrite_output_dir."
        )


def prepare_output_dir(output_dir: Path, *, overwrite: bool, resume: bool) -> None:
    """Create the output directory of a training run, and remove the run that it replaces.

    Raises:
        FileExistsError: See `check_output_dir`.
    """
    check_output_dir(output_dir, overwrite=overwrite, resume=resume)
    for folder in (output_dir, output_dir / SNAPSHOT_FOLDER, output_dir / BEST_FOLDER):
        for leftover in folder.glob(f"*{UNFINISHED}"):  # of a run that was killed
            _remove(leftover, ignore_errors=True)
    for path in [] if resume else _traces_of_a_run(output_dir):
        _remove(path)
    output_dir.mkdir(parents=True, exist_ok=True)


def check_results_dir(output_dir: Path, *, overwrite: bool, resume: bool = False) -> None:
    """Check that results can be written to a directory.

    Raises:
        FileExistsError: If it contains a model, a training run, or results that must not be replaced.
    """
    _check_is_directory(output_dir)
    own = (RUN_FILE, RESULTS_FILE)
    held = [path.name for path in _traces_of_a_run(output_dir) if path.name not in own]
    held += [name for name in MODEL_FILES if (output_dir / name).exists()]
    if held:
        raise FileExistsError(
            f"{output_dir} contains a model or a training run ({held[0]}), and results go to a separate directory; "
            "choose another --output_dir."
        )
    if not overwrite and not resume and any((output_dir / name).exists() for name in own):
        raise FileExistsError(
            f"{output_dir} already contains results. Choose another --output_dir, or replace them with "
            "--overwrite_output_dir."
        )


def prepare_results_dir(output_dir: Path, names: Collection[str], *, overwrite: bool, resume: bool = False) -> None:
    """Create a directory for results that are computed from models.

    Args:
        output_dir: The directory.
        names: All files that the recipe may write; earlier ones are removed if they are to be replaced.
        overwrite: Whether to replace earlier results.
        resume: Whether to continue earlier results instead.

    Raises:
        FileExistsError: See `check_results_dir`.
    """
    check_results_dir(output_dir, overwrite=overwrite, resume=resume)
    output_dir.mkdir(parents=True, exist_ok=True)
    if overwrite and not resume:
        for name in names:
            (output_dir / name).unlink(missing_ok=True)


def can_resume_results(
    output_dir: Path, settings: Mapping[str, Any], *, ignored: Collection[str], overwrite: bool
) -> bool:
    """Return whether a directory contains unfinished results with these settings, which can be continued.

    Args:
        output_dir: The directory.
        settings: All settings by name.
        ignored: Names of settings that may differ because no result depends on them.
        overwrite: Whether the contents will be replaced.

    Raises:
        FileExistsError: If it contains results with other settings that must not be replaced.
    """
    run_file = output_dir / RUN_FILE
    if overwrite or not (run_file.exists() or (output_dir / RESULTS_FILE).exists()):
        return False
    before = json.loads(run_file.read_text(encoding="utf-8")) if run_file.is_file() else {}
    now = json.loads(json.dumps({name: value for name, value in settings.items() if name not in ignored}))
    changed = [name for name, value in now.items() if name not in before or before[name] != value]
    if changed:
        raise FileExistsError(
            f"{output_dir} contains another run, which differs in {', '.join(changed[:5])}. Choose another "
            "--output_dir, or replace it with --overwrite_output_dir."
        )
    return True


def _remove(path: Path, *, ignore_errors: bool = False) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=ignore_errors)
    else:
        path.unlink(missing_ok=True)


def _check_is_directory(output_dir: Path) -> None:
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"{output_dir} is a file, not a directory; choose another --output_dir.")


def _traces_of_a_run(output_dir: Path) -> list[Path]:
    """Return the files and folders of a run in a directory."""
    names = (RUN_FILE, RESULTS_FILE, BEST_FOLDER, SNAPSHOT_FOLDER)
    traces = [*list_checkpoints(output_dir), *(output_dir / name for name in names)]
    return [trace for trace in traces if trace.exists()]
