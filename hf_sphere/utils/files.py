"""Atomic writes: a file or folder appears under its name only when it is complete."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

UNFINISHED = ".unfinished"
REPLACED = ".replaced"


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to; it replaces `path` when the block ends without an error.

    The file is flushed to disk before it is renamed, and its mode is set according to the umask (some libraries make
    their files readable by the owner only). The temporary name contains the process id, so that several processes can
    write the same file; the last one wins.

    Args:
        path: The file; its folder is created if necessary.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        yield unfinished
        _finalize(unfinished)
        unfinished.replace(path)
        _flush(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: str | os.PathLike) -> Iterator[Path]:
    """Yield an empty temporary folder beside `folder`; it replaces `folder` when the block ends without an error.

    A folder cannot be replaced in one step. The old one is renamed first, and `restore_folder` restores it if the
    process is killed between the two renames.
    """
    folder = Path(folder)
    unfinished, replaced = _siblings(folder)
    restore_folder(folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        _finalize(unfinished)
        if folder.exists():
            folder.rename(replaced)
        unfinished.rename(folder)
        _flush(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def atomic_files(folder: str | os.PathLike) -> Iterator[Path]:
    """Yield an empty temporary folder inside `folder`; its files replace those of the same name in `folder`.

    No file is replaced before all have been written and flushed. Each replacement is atomic; the sequence is not.
    """
    folder = Path(folder)
    unfinished = folder / UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        _finalize(unfinished)
        for file in unfinished.iterdir():
            file.replace(folder / file.name)
        _flush(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def restore_folder(folder: str | os.PathLike) -> None:
    """Undo a replacement by `atomic_folder` that was interrupted between its two renames."""
    folder = Path(folder)
    _, replaced = _siblings(folder)
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with atomic_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike, values: Mapping[str, Any]) -> None:
    """Write a JSON file atomically; values that are not JSON-serializable are written as strings."""
    write_text(path, json.dumps(values, indent=2, default=str) + "\n")


def _siblings(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}{UNFINISHED}"), folder.with_name(f".{folder.name}{REPLACED}")


def _finalize(path: Path) -> None:
    """Set the mode of a file, or of all files in a folder, according to the umask, and flush them to disk."""
    umask = os.umask(0)
    os.umask(umask)
    for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
        if file.is_file() and not file.is_symlink():
            file.chmod(0o666 & ~umask)
        _flush(file)


def _flush(path: Path) -> None:
    # Windows cannot open folders, and some network file systems cannot flush them.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
