"""Folders of what recipes compute of models: nothing is ever removed from them but what such a recipe writes itself."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hf_sphere.training.checkpoints import RESULTS_FILE, RUN_FILE, marks_of_a_run

MODEL_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")


def check_results_dir(output_dir: Path, *, overwrite: bool, resume: bool = False) -> None:
    """Refuse a folder that holds a model or its training, or results that are not to be replaced.

    Raises:
        FileExistsError: If it does.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"{output_dir} is a file and no folder; choose another --output_dir.")
    own = (RUN_FILE, RESULTS_FILE)
    held = [mark.name for mark in marks_of_a_run(output_dir) if mark.name not in own]
    held += [name for name in MODEL_FILES if (output_dir / name).exists()]
    if held:
        raise FileExistsError(
            f"{output_dir} holds a model or its training ({held[0]}), and results go to a folder of their own; choose "
            "another --output_dir."
        )
    if not overwrite and not resume and any((output_dir / name).exists() for name in own):
        raise FileExistsError(
            f"{output_dir} holds results already. Choose another --output_dir, or replace them with "
            "--overwrite_output_dir."
        )


def claim_results_dir(output_dir: Path, names: Collection[str], *, overwrite: bool, resume: bool = False) -> None:
    """Make a folder for results.

    Args:
        output_dir: The folder.
        names: All files that the recipe may write; those of an earlier call are removed if they are to be replaced.
        overwrite: Whether they are.
        resume: Whether to go on with them instead.

    Raises:
        FileExistsError: See `check_results_dir`.
    """
    check_results_dir(output_dir, overwrite=overwrite, resume=resume)
    output_dir.mkdir(parents=True, exist_ok=True)
    if overwrite and not resume:
        for name in names:
            (output_dir / name).unlink(missing_ok=True)


def holds_same_run(output_dir: Path, settings: Mapping[str, Any], *, free: Collection[str], overwrite: bool) -> bool:
    """Tell whether a folder holds a run with these settings, which then goes on.

    Args:
        output_dir: The folder.
        settings: All settings by name.
        free: Those that may differ, since no result depends on them.
        overwrite: Whether what it holds will be replaced.

    Raises:
        FileExistsError: If it holds another run that is not to be replaced.
    """
    noted = output_dir / RUN_FILE
    if overwrite or not (noted.exists() or (output_dir / RESULTS_FILE).exists()):
        return False
    before = json.loads(noted.read_text(encoding="utf-8")) if noted.is_file() else {}
    now = json.loads(json.dumps({name: value for name, value in settings.items() if name not in free}))
    changed = [name for name, value in now.items() if name not in before or before[name] != value]
    if changed:
        raise FileExistsError(
            f"{output_dir} holds another run, which differs in {', '.join(changed[:5])}. Choose another --output_dir, "
            "or replace it with --overwrite_output_dir."
        )
    return True
