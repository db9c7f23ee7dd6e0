"""Output directories: the files that runs and results consist of, and which may be replaced."""

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_sphere.utils import files
from hf_sphere.utils.commands import command_of
from hf_sphere.utils.texts import hide_private

CHECKPOINT_PREFIX = "checkpoint-"
LOCK_FILE = ".run.lock"
RUN_FILE = "run.json"
LOCAL_PATHS_FILE = ".local_paths.json"
RESULTS_FILE = "all_results.json"
MODEL_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")


def list_checkpoints(output_dir: Path, *, complete: bool = True) -> list[Path]:
    """Return the checkpoints of a run, by default only the complete ones, oldest first."""
    found: dict[int, Path] = {}
    for path in filter(Path.is_dir, output_dir.glob(f"{CHECKPOINT_PREFIX}*")):
        step = path.name.removeprefix(CHECKPOINT_PREFIX)
        if step.isdigit() and (not complete or (path / files.MANIFEST_FILE).exists()):
            found[int(step)] = path
    return [*map(found.__getitem__, sorted(found))]


@contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Create and lock a directory; one that another process has locked is a `FileExistsError`."""
    output_dir.mkdir(parents=True, exist_ok=True)
    with files.locked_file(output_dir.resolve() / LOCK_FILE, output_dir, wait=False):
        yield


def check_output_dir(output_dir: Path, *, overwrite: bool, resume: bool, recipe: str | None = None) -> None:
    """Raise an error if the directory contains anything that a training run must not replace.

    Hidden files are ignored. Arguments and errors are those of `prepare_output_dir`.
    """
    files.check_writable(output_dir / RUN_FILE, is_folder=False)
    if overwrite:
        return
    traces = _traces_of_a_run(output_dir)
    others = [p.name for p in files.list_folder(output_dir) if not p.name.startswith(".") and p not in traces]
    if traces and not resume:
        what = f"already contains a run ({traces[0].name})"
    elif (before := read_settings(output_dir)) is not None and before.get("recipe") != recipe:
        what = f"contains a run of {command_of(before.get('recipe'))}, which {command_of(recipe)} does not resume"
    elif others and before is None:
        what = f"contains files that no run wrote ({min(others)})"
    else:
        return
    advice = "Choose another --output_dir, replace it with --overwrite_output_dir, or resume the run of this task"
    raise FileExistsError(f"{output_dir} {what}. {advice} with --resume_from_checkpoint latest.")


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
    output_dir.mkdir(parents=True, exist_ok=True)
    old = [] if resume else _traces_of_a_run(output_dir)
    for folder in (output_dir, output_dir / files.SNAPSHOT_FOLDER):  # not those of other runs below it
        old += folder.glob(f"*{files.UNFINISHED}")  # of a killed run
    for path in old:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def read_settings(output_dir: Path) -> dict[str, Any] | None:
    """Return the settings of the run in a directory, or None if it has none; a damaged `run.json` is an error."""
    path, local = output_dir / RUN_FILE, output_dir / LOCAL_PATHS_FILE
    if not path.is_file():
        return None
    return files.read_json(path) | (files.read_json(local) if local.is_file() else {})


def write_settings(output_dir: Path, settings: Mapping[str, Any]) -> None:
    """Write `run.json`, which is published with a model: absolute paths are kept in a hidden file instead."""
    settings = hide_private(json.loads(json.dumps(settings, default=str)), paths=False)
    public = hide_private(settings)
    files.write_json(output_dir / RUN_FILE, public)
    (output_dir / LOCAL_PATHS_FILE).unlink(missing_ok=True)
    if paths := {name: value for name, value in settings.items() if public[name] != value}:
        files.write_json(output_dir / LOCAL_PATHS_FILE, paths)


def check_results_dir(output_dir: Path, *, overwrite: bool, resume: bool = False) -> None:
    """Raise an error if a directory has a model, a training run, or results that must not be replaced."""
    files.check_writable(output_dir / RUN_FILE, is_folder=False)
    found = [*_traces_of_a_run(output_dir), *filter(Path.exists, map(output_dir.joinpath, MODEL_FILES))]
    held = [path.name for path in found if path.name not in (RUN_FILE, RESULTS_FILE)]
    if held or (found and not overwrite and not resume):
        what = f"a model or a run ({held[0]})" if held else "results"
        advice = "" if held else ", or pass --overwrite_output_dir"
        raise FileExistsError(f"{output_dir} already contains {what}. Choose another --output_dir{advice}.")


@contextmanager
def results_dir(output_dir: Path, names: Collection[str], *, overwrite: bool, resume: bool = False) -> Iterator[None]:
    """Create a directory for results that are computed from models, and lock it; see `check_results_dir`.

    Earlier files with one of the names, all that the recipe may write, are removed if they are to be replaced.
    """
    with locked(output_dir):
        check_results_dir(output_dir, overwrite=overwrite, resume=resume)
        for name in names if overwrite and not resume else ():
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
    if overwrite or not any((output_dir / name).exists() for name in (RUN_FILE, RESULTS_FILE)):
        return False
    before, now = read_settings(output_dir) or {}, json.loads(json.dumps(settings))
    if changed := [name for name in now if name not in ignored and before.get(name, before) != now[name]]:
        raise FileExistsError(
            f"{output_dir} contains another run, which differs in {', '.join(changed[:5])}. Choose another "
            "--output_dir, or replace it with --overwrite_output_dir."
        )
    return True


def _traces_of_a_run(output_dir: Path) -> list[Path]:
    names = (RUN_FILE, RESULTS_FILE, files.RECORD_FILE, files.SNAPSHOT_FOLDER)
    return [*list_checkpoints(output_dir, complete=False), *filter(Path.exists, map(output_dir.joinpath, names))]
