"""Output directories: the files that runs and results consist of, and which may be replaced."""

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hf_sphere.utils import files
from hf_sphere.utils.commands import command_of
from hf_sphere.utils.locks import locked_file
from hf_sphere.utils.privacy import hide_private, hide_tokens

CHECKPOINT_PREFIX = "checkpoint-"
LOCK_FILE = ".run.lock"
RUN_FILE = "run.json"
LOCAL_PATHS_FILE = ".local_paths.json"
RESULTS_FILE = "all_results.json"
BEST_FOLDER = "best"
MODEL_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    return [path for path in checkpoint_folders(output_dir) if (path / files.MANIFEST_FILE).is_file()]


def checkpoint_folders(output_dir: Path) -> list[Path]:
    """Return the folders with the name of a checkpoint, sorted by step, whether complete or not."""
    folders: dict[int, Path] = {}
    for path in output_dir.glob(f"{CHECKPOINT_PREFIX}*"):
        step = path.name.removeprefix(CHECKPOINT_PREFIX)
        if step.isdigit() and path.is_dir():
            folders[int(step)] = path
    return [folders[step] for step in sorted(folders)]


@contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Create and lock a directory, see `hf_sphere.utils.locks`; one that another process has locked is an error."""
    output_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked_file(output_dir.resolve() / LOCK_FILE, output_dir, wait=False))
        except FileExistsError as error:
            raise FileExistsError(f"{error} Wait for its end, or choose another --output_dir.") from error
        yield


def check_output_dir(output_dir: Path, *, overwrite: bool, resume: bool, recipe: str | None = None) -> None:
    """Raise an error if the directory contains anything that a training run must not replace.

    Hidden files are ignored. Arguments and errors are those of `prepare_output_dir`.
    """
    _check_directory(output_dir)
    if overwrite or not output_dir.is_dir():
        return
    traces = _traces_of_a_run(output_dir)
    if traces and not resume:
        raise FileExistsError(
            f"{output_dir} already contains a run ({traces[0].name}). Choose another --output_dir, resume it with "
            "--resume_from_checkpoint latest, or replace it with --overwrite_output_dir."
        )
    before = read_settings(output_dir)
    if before is not None and before.get("recipe") != recipe:
        raise FileExistsError(
            f"{output_dir} contains a run of {command_of(before.get('recipe'))}, which {command_of(recipe)} does not "
            "resume. Choose another --output_dir, or replace it with --overwrite_output_dir."
        )
    foreign = sorted(p.name for p in files.list_folder(output_dir) if not p.name.startswith(".") and p not in traces)
    if foreign and before is None:
        raise FileExistsError(
            f"{output_dir} contains files that no run wrote ({foreign[0]}). Choose another --output_dir, or "
            "let the run replace files of the same name with --overwrite_output_dir."
        )


def prepare_output_dir(output_dir: Path, *, overwrite: bool, resume: bool, recipe: str | None = None) -> None:
    """Create the output directory of a training run, and remove the run that it replaces.

    Args:
        output_dir: The directory; it may be missing.
        overwrite: Whether to replace its contents.
        resume: Whether to resume the run in it.
        recipe: Name of the recipe.

    Raises:
        FileExistsError: If the directory is not empty and neither overwriting nor resuming was requested, or if it is
            not the run of the recipe to resume.
        ValueError: If the settings of the run to resume are damaged.
    """
    check_output_dir(output_dir, overwrite=overwrite, resume=resume, recipe=recipe)
    for folder in (output_dir, output_dir / files.SNAPSHOT_FOLDER, output_dir / BEST_FOLDER):
        for leftover in folder.glob(f"*{files.UNFINISHED}"):  # of a run that was killed
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    for path in [] if resume else _traces_of_a_run(output_dir):
        files.remove_folder(path) if path.is_dir() else path.unlink()
    output_dir.mkdir(parents=True, exist_ok=True)


def read_settings(output_dir: Path) -> dict[str, Any] | None:
    """Return the settings of the run in a directory, or None if it has none; a damaged `run.json` is an error."""
    path, local = output_dir / RUN_FILE, output_dir / LOCAL_PATHS_FILE
    if not path.is_file():
        return None
    try:
        return files.read_json(path) | (files.read_json(local) if local.is_file() else {})
    except ValueError as error:
        raise ValueError(f"{error} Restore it, or pass --overwrite_output_dir.") from error


def write_settings(output_dir: Path, settings: Mapping[str, Any]) -> None:
    """Write `run.json`, which is published with a model: absolute paths are kept in a hidden file instead."""
    settings = hide_tokens(json.loads(json.dumps(settings, default=str)))
    public = hide_private(settings)
    files.write_json(output_dir / RUN_FILE, public)
    if paths := {name: value for name, value in settings.items() if public[name] != value}:
        files.write_json(output_dir / LOCAL_PATHS_FILE, paths)
    else:
        (output_dir / LOCAL_PATHS_FILE).unlink(missing_ok=True)


def check_results_dir(output_dir: Path, *, overwrite: bool, resume: bool = False) -> None:
    """Raise an error if a directory has a model, a training run, or results that must not be replaced."""
    _check_directory(output_dir)
    results = (RUN_FILE, RESULTS_FILE)
    held = [path.name for path in _traces_of_a_run(output_dir) if path.name not in results]
    held += [name for name in MODEL_FILES if (output_dir / name).exists()]
    if held:
        raise FileExistsError(f"{output_dir} contains a model or a run ({held[0]}); choose another --output_dir.")
    if not overwrite and not resume and any((output_dir / name).exists() for name in results):
        raise FileExistsError(f"{output_dir} already contains results. Choose another, or pass --overwrite_output_dir.")


@contextmanager
def results_dir(output_dir: Path, names: Collection[str], *, overwrite: bool, resume: bool = False) -> Iterator[None]:
    """Create a directory for results that are computed from models, and lock it; see `check_results_dir`.

    Earlier files with one of the names, all that the recipe may write, are removed if they are to be replaced.
    """
    with locked(output_dir):
        check_results_dir(output_dir, overwrite=overwrite, resume=resume)
        if overwrite and not resume:
            for name in names:
                (output_dir / name).unlink(missing_ok=True)
        yield


def check_output_file(path: str, *, overwrite: bool) -> None:
    """Raise an error if a file of `--output` exists and must not be replaced, or cannot be written."""
    if Path(path).exists() and not overwrite:
        raise FileExistsError(f"{path} exists. Choose another --output, or replace it with --overwrite_output.")
    files.check_writable(path, is_folder=False)


def can_resume_results(
    output_dir: Path, settings: Mapping[str, Any], *, ignored: Collection[str], overwrite: bool
) -> bool:
    """Return whether a directory contains unfinished results with these settings, which can be continued.

    Those with other settings are an error, unless they are to be replaced. No result depends on the `ignored` settings.
    """
    _check_directory(output_dir)
    if overwrite or not any((output_dir / name).exists() for name in (RUN_FILE, RESULTS_FILE)):
        return False
    before = read_settings(output_dir) or {}
    now = json.loads(json.dumps({name: value for name, value in settings.items() if name not in ignored}))
    changed = [name for name, value in now.items() if name not in before or before[name] != value]
    if changed:
        raise FileExistsError(
            f"{output_dir} contains another run, which differs in {', '.join(changed[:5])}. Choose another "
            "--output_dir, or replace it with --overwrite_output_dir."
        )
    return True


def _check_directory(output_dir: Path) -> None:
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"{output_dir} is a file, not a directory; choose another --output_dir.")
    files.check_writable(output_dir / RUN_FILE, is_folder=False)


def _traces_of_a_run(output_dir: Path) -> list[Path]:
    """Return the files and folders of a run in a directory."""
    names = (RUN_FILE, RESULTS_FILE, files.RECORD_FILE, BEST_FOLDER, files.SNAPSHOT_FOLDER)
    return [*checkpoint_folders(output_dir), *filter(Path.exists, map(output_dir.joinpath, names))]
