"""Files and folders: atomic writes, reading while others write, and manifests with checksums.

A file or folder that is written atomically appears under its name only when it is complete.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from hf_sphere.utils.checks import check_regular, error_text
from hf_sphere.utils.locks import locked_file

Result = TypeVar("Result")

IS_WINDOWS = os.name == "nt"
"""Windows refuses to replace files that are mapped into memory, and to rename their folders."""

UNFINISHED = ".unfinished"
REPLACED = ".replaced"
READING_ATTEMPTS = 100

logger = logging.getLogger(__name__)

SYSTEM_FILES = {
    *(".ds_store", "thumbs.db", "ehthumbs.db", "desktop.ini", ".directory", ".localized", "icon\r", "@eadir"),
    *("__macosx", "$recycle.bin", "system volume information", "lost+found", "#recycle", "#snapshot", "@recycle"),
}
"""Files and folders that systems and file managers put into folders, in lower case; @eaDir is Synology's."""


def is_of_system(name: str) -> bool:
    """Whether a file or folder is of the file manager; macOS writes `._name` beside each file on foreign disks."""
    return name.lower() in SYSTEM_FILES or name.startswith("._")


def list_folder(folder: str | os.PathLike) -> list[Path]:
    """Return what is in a folder, but for files of the system; nothing if it is missing."""
    return [path for path in Path(folder).glob("*") if not is_of_system(path.name)]


def resolve_output(path: str | os.PathLike) -> Path:
    """Return the path that is really written to: a link is kept, and its target is replaced.

    The target must be a folder or a regular file, not a device, and links must lead somewhere.
    """
    for link in (Path(path), *Path(path).parents):
        if not link.is_symlink() or link.exists():
            continue
        if not _replaced(Path(os.path.realpath(link))).exists() and not link.exists():  # it is not just being replaced
            raise FileNotFoundError(errno.ENOENT, f"{link} is a link to nothing; is its disk mounted?", str(path))
    target = Path(os.path.realpath(path))
    if target.exists() and not (target.is_dir() or target.is_file()):
        raise OSError(errno.EINVAL, "it is neither a regular file nor a folder, so it is not replaced", str(path))
    return target


def check_writable(path: str | os.PathLike, *, is_folder: bool = True) -> None:
    """Check that a file or folder can be written, by writing beside it; before the work whose result it will hold."""
    target = resolve_output(path)
    if target.exists() and target.is_dir() != is_folder:
        kind = errno.ENOTDIR if is_folder else errno.EISDIR
        raise OSError(kind, "it is a file, not a folder" if is_folder else "it is a folder, not a file", str(path))
    if is_folder and (os.path.ismount(target) or target == Path.cwd()):
        which = "a mount point" if os.path.ismount(target) else "the working directory"
        raise OSError(errno.EBUSY, f"{which} cannot be replaced by a new folder; name a folder in it", str(path))
    base = next(parent for parent in target.parents if parent.exists())
    try:
        for name in target.relative_to(base).parts:  # each can be too long
            probe = _unfinished(base / name)
            probe.touch()
            try:
                probe.write_bytes(bytes(1 << 12))  # a full disk still creates files
            finally:
                probe.unlink(missing_ok=True)  # another writer may take it for a leftover
    except OSError as error:
        raise OSError(error.errno, f"it cannot be written: {error.strerror}", str(path)) from error


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to; it replaces `path` when the block ends without an error.

    The file is flushed to disk before it is renamed. One that only its owner may read gets the default mode, because
    some libraries always create theirs that way. Several processes and threads can write the same file; the last one
    wins. Missing folders are created.
    """
    path = resolve_output(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _unfinished(path)
    try:
        yield unfinished
        _finalize(unfinished)
        unfinished.replace(path)
        _flush_folder(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def lock_folder(folder: str | os.PathLike, *, wait: bool = True) -> Iterator[bool]:
    """Lock a folder, or a file, against writers in other processes and threads; yields whether locks are supported.

    `atomic_folder` locks it for its block. Lock it around the reading and the writing of what depends on its contents.
    The folder need not exist. What killed writers left beside it is removed. Another writer is a `FileExistsError` if
    `wait` is False.
    """
    folder = resolve_output(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked_file(folder.with_name(f".{folder.name}.lock{UNFINISHED}"), folder, wait=wait) as held:
        leftover = re.compile(re.escape(f".{folder.name}.") + "[0-9a-f]{8}" + re.escape(UNFINISHED))
        for path in folder.parent.iterdir() if held else ():
            if leftover.fullmatch(path.name):  # of a killed process
                _remove(path)
        yield held


@contextmanager
def atomic_folder(folder: str | os.PathLike) -> Iterator[Path]:
    """Yield an empty temporary folder beside `folder`; it replaces `folder` when the block ends without an error.

    A folder cannot be replaced in one step. The old one is renamed first, and `restore_folder` restores it if the
    process is killed between the two renames. The folder is locked for the block.
    """
    check_writable(folder)
    folder = resolve_output(folder)
    with lock_folder(folder):
        restore_folder(folder)
        unfinished, replaced = _unfinished(folder), _replaced(folder)
        unfinished.mkdir()
        try:
            yield unfinished
            _finalize(unfinished)
            if folder.exists():
                folder.rename(replaced)
            unfinished.rename(folder)
            _flush_folder(folder.parent)
        finally:
            try:
                restore_folder(folder)
            except OSError as error:
                if unfinished.exists():
                    raise
                logger.warning("%s is complete, but its old version remains in %s: %s.", folder, replaced, error)
            _remove(unfinished)


@contextmanager
def atomic_files(folder: str | os.PathLike) -> Iterator[Path]:
    """Yield an empty temporary folder inside `folder`; its files replace those of the same name in `folder`.

    No file is replaced before all have been written and flushed. Each replacement is atomic; the sequence is not.
    Several processes can write to the same folder.
    """
    folder = resolve_output(folder)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".", suffix=UNFINISHED, dir=folder))
    try:
        yield unfinished
        _finalize(unfinished)
        for file in unfinished.iterdir():
            if (folder / file.name).is_symlink():  # its target may be on another disk
                with atomic_file(folder / file.name) as copy:
                    shutil.copyfile(file, copy)
            else:
                file.replace(folder / file.name)
        _flush_folder(folder)
    finally:
        _remove(unfinished)


def restore_folder(folder: str | os.PathLike) -> None:
    """Undo a replacement by `atomic_folder` that was interrupted between its two renames; lock the folder before."""
    folder = resolve_output(folder)
    replaced = _replaced(folder)
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)
    elif replaced.exists():
        _remove(replaced.rename(_unfinished(folder)))


def read_whole(folder: str | os.PathLike, read: Callable[[Path], Result]) -> Result:
    """Read several files of a folder that `atomic_folder` may replace meanwhile: all of one version of it.

    An interrupted replacement is undone first. `read` is called again if the folder was replaced before it returned.
    """
    folder = resolve_output(folder)
    for attempt in range(READING_ATTEMPTS):
        _restore_to_read(folder)
        before = _version(folder)
        try:
            result = read(folder)
        except (OSError, ValueError):
            if before == _version(folder) and (before is not None or not _replaced(folder).exists()):
                raise
        else:
            if before == _version(folder):
                return result
        time.sleep(0.01 * min(attempt, 10))
    raise OSError(errno.EBUSY, "it is replaced again and again while it is read; try again later", str(folder))


def _restore_to_read(folder: Path) -> None:
    """Undo an interrupted replacement, unless its process is still at work."""
    replaced = _replaced(folder)
    if folder.exists() or not replaced.exists():
        return
    try:
        with lock_folder(folder, wait=False):
            if not folder.exists():
                replaced.rename(folder)
    except FileExistsError:
        return
    except OSError as error:
        if replaced.exists() and not folder.exists():
            text = f"the replacement of {folder} was interrupted; rename {replaced}, its last version, to {folder.name}"
            raise OSError(error.errno, f"{text} ({error.strerror})") from error


def _version(folder: Path) -> tuple[int, ...] | None:
    with suppress(OSError):
        status = folder.stat()
        return status.st_dev, status.st_ino, status.st_ctime_ns
    return None


def remove_folder(folder: Path) -> None:
    """Remove a folder; it is renamed first, so that an interrupted removal leaves no part of it under its name."""
    if folder.is_symlink():
        folder.unlink()
    else:
        _remove(folder.rename(_unfinished(folder)))


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with atomic_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike, values: Mapping[str, Any], *, strict: bool = False) -> None:
    """Write a JSON file atomically; values that are not JSON-serializable become strings, or an error if `strict`."""
    write_text(path, json.dumps(values, indent=2, default=None if strict else str) + "\n")


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Read a JSON file that contains a mapping; the error of a damaged one names it."""
    check_regular(path)
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error_text(error)}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged: it contains no mapping.")
    return values


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid4().hex[:8]}{UNFINISHED}")


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{REPLACED}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _finalize(path: Path) -> None:
    """Flush a file, or everything in a folder, to disk, and let files have the default mode.

    safetensors creates its files readable by their owner only. Other modes are left to the file system and its ACLs.
    """
    paths = [path, *path.rglob("*")] if path.is_dir() else [path]
    files = [file for file in paths if file.is_file() and not file.is_symlink()]
    private = [file for file in files if stat.S_IMODE(file.stat().st_mode) == 0o600]
    if private:
        # That of new files, by creating one: the umask cannot be read without changing it.
        probe = private[0].parent / f".mode.{os.getpid()}{UNFINISHED}"
        with suppress(OSError):  # some mounted file systems have no modes
            try:
                os.close(os.open(probe, os.O_CREAT | os.O_WRONLY, 0o666))
                for file in private:
                    file.chmod(stat.S_IMODE(probe.stat().st_mode))
            finally:
                probe.unlink(missing_ok=True)
    for file in files:
        _flush(file)
    for folder in (path for path in paths if path.is_dir()):
        _flush_folder(folder)


def _flush(path: Path) -> None:
    """Flush a file or folder to disk. On a full network file system this can be the only call that fails."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # not supported for this kind of file
            raise
    finally:
        os.close(descriptor)


def _flush_folder(folder: Path) -> None:
    with suppress(OSError):  # Windows cannot open folders, and some file systems cannot flush them
        _flush(folder)


MANIFEST_FILE = "manifest.json"

RECORD_FILE = "training_data.json"
"""Record of the images of a training run, beside its model."""

SNAPSHOT_FOLDER = "snapshots"
"""Folder of the snapshots in the folder of a training run."""


def write_manifest(folder: Path) -> None:
    """Write `manifest.json` for all files below a folder. It is written last, so it marks a complete folder.

    The checksum is CRC-32: it detects any flipped bit, in half the time of SHA-256, but no deliberate changes.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not is_of_system(path.name))
    paths = [path for path in paths if path != folder / MANIFEST_FILE]
    files = {p.relative_to(folder).as_posix(): {"size": p.stat().st_size, "crc32": _checksum(p)} for p in paths}
    write_json(folder / MANIFEST_FILE, {"files": files}, strict=True)


def find_damage(folder: Path, required: Collection[str] = ()) -> str | None:
    """Return a description of the first file of a folder that is missing or differs from its manifest, or None.

    The manifest must list the `required` names; files that it does not list are ignored.
    """
    name = MANIFEST_FILE
    try:
        files = read_json(folder / name)["files"]
        if missing := [name for name in required if name not in files]:
            return f"{MANIFEST_FILE} is damaged: it does not list {missing[0]}"
        for name, values in files.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                return f"{MANIFEST_FILE} is damaged: {name} is not below the folder"
            if (folder / name).exists() and not (folder / name).is_file():
                return f"{name} is not a regular file"
            size = (folder / name).stat().st_size
            if size != values["size"]:
                return f"{name} is damaged: it has {size:,} bytes instead of {values['size']:,}"
            if _checksum(folder / name) != values["crc32"]:
                return f"{name} is damaged: it does not match its checksum in {MANIFEST_FILE}"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST_FILE} is damaged"
    return None


def read_tensors(path: str | os.PathLike) -> dict[str, Any]:
    """Read the tensors of a safetensors file; they are mapped into memory, but copied on Windows."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    return {name: tensor.clone() for name, tensor in tensors.items()} if IS_WINDOWS else tensors


def digest_file(path: Path) -> str | None:
    """Return the SHA-256 digest of a file, or None if it is missing."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return f"{value:08x}"
