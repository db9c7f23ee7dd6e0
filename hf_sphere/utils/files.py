"""Files and folders: atomic writes, reading while others write, manifests with checksums, and lines of JSON.

A file or folder that is written atomically appears under its name only when it is complete.
"""

import glob
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from filelock import FileLock, Timeout

from hf_sphere.utils.checks import check_regular, error_text

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

SECONDS_TO_MESSAGE = 1.0
"""A process that waits longer than this for a lock logs it."""

IS_WINDOWS = os.name == "nt"
"""Windows refuses to replace files that are mapped into memory, and to rename their folders."""

UNFINISHED = ".unfinished"
REPLACED = ".replaced"

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


def check_writable(path: str | os.PathLike, *, is_folder: bool = True) -> None:
    """Check that a file or folder can be written, by writing beside it; before the work whose result it will hold."""
    target = Path(path).resolve()
    if target.exists() and not (target.is_dir() if is_folder else target.is_file()):
        raise FileExistsError(f"{path} exists and is no {'folder' if is_folder else 'file'}; choose another name.")
    if is_folder and (target == Path.cwd() or os.path.ismount(target)):
        why = "it is the working directory or a mount; name a folder in it"
        raise FileExistsError(f"{path} cannot be replaced: {why}.")
    try:
        with tempfile.TemporaryFile(dir=next(filter(Path.exists, target.parents))) as probe:
            probe.write(bytes(1 << 12))  # a full disk still creates files
    except OSError as error:
        raise OSError(error.errno, f"it cannot be written: {error.strerror}", str(path)) from error


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to; it replaces `path` when the block ends without an error.

    The file is flushed to disk before it is renamed, and has the mode of new files. Several processes and threads can
    write the same file; the last one wins. Missing folders are created, and a link is kept.
    """
    path = Path(path).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _unfinished(path)
    unfinished.touch()
    mode = unfinished.stat().st_mode
    try:
        yield unfinished
        _finalize(unfinished, mode)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def locked_file(path: Path, of: Path, *, wait: bool) -> Iterator[None]:
    """Lock a folder, `of`, by a lock file, which is removed at the end.

    A lock ends with its process, even if that is killed. A thread can lock a folder again. A folder in use is a
    `FileExistsError` if `wait` is False.
    """
    lock = FileLock(path, is_singleton=True, fallback_to_soft=False)
    is_first = not lock.is_locked
    try:
        lock.acquire(timeout=SECONDS_TO_MESSAGE if wait else 0.0)
    except Timeout as error:
        if not wait:
            raise FileExistsError(f"{of} is in use by another process.") from error
        logger.warning("Waiting for another process, which writes %s.", of)
        lock.acquire()
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink() if is_first else None
        lock.release()


@contextmanager
def lock_folder(folder: str | os.PathLike, *, wait: bool = True) -> Iterator[None]:
    """Lock a folder, or a file, against writers in other processes and threads.

    `atomic_folder` locks it for its block. Lock it around the reading and the writing of what depends on its contents.
    The folder need not exist. What killed writers left beside it is removed. Another writer is a `FileExistsError` if
    `wait` is False.
    """
    folder = Path(folder).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked_file(folder.with_name(f".{folder.name}.lock{UNFINISHED}"), folder, wait=wait):
        for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.{'[0-9a-f]' * 8}{UNFINISHED}"):
            _remove(leftover)
        yield


@contextmanager
def atomic_folder(folder: str | os.PathLike) -> Iterator[Path]:
    """Yield an empty temporary folder beside `folder`; it replaces `folder` when the block ends without an error.

    A folder cannot be replaced in one step. The old one is renamed first, and `restore_folder` restores it if the
    process is killed between the two renames. The folder is locked for the block.
    """
    check_writable(folder)
    folder = Path(folder).resolve()
    with lock_folder(folder):
        restore_folder(folder)
        (unfinished := _unfinished(folder)).mkdir()
        try:
            yield unfinished
            _finalize(unfinished, unfinished.stat().st_mode)
            if folder.exists():
                folder.rename(_replaced(folder))
            unfinished.rename(folder)
        finally:
            restore_folder(folder)
            _remove(unfinished)


@contextmanager
def atomic_files(folder: str | os.PathLike) -> Iterator[Path]:
    """Yield an empty temporary folder inside `folder`; its files replace those of the same name in `folder`.

    No file is replaced before all have been written and flushed. Each replacement is atomic; the sequence is not.
    Several processes can write to the same folder.
    """
    folder = Path(folder).resolve()
    (unfinished := folder / f".{uuid4().hex[:8]}{UNFINISHED}").mkdir(parents=True)
    try:
        yield unfinished
        _finalize(unfinished, unfinished.stat().st_mode)
        for file in unfinished.iterdir():
            file.replace((folder / file.name).resolve())
    finally:
        _remove(unfinished)


def restore_folder(folder: str | os.PathLike) -> None:
    """Undo a replacement by `atomic_folder` that was interrupted between its two renames; lock the folder before."""
    folder = Path(folder).resolve()
    replaced = _replaced(folder)
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)
    elif replaced.exists():
        _remove(replaced.rename(_unfinished(folder)))


def read_whole(folder: str | os.PathLike, read: Callable[[Path], Result]) -> Result:
    """Read several files of a folder that `atomic_folder` may replace meanwhile: all of one version of it.

    An interrupted replacement is undone first. `read` is called again if the folder was replaced before it returned.
    """
    folder = Path(folder).resolve()
    while True:
        version = _version(folder)
        if version is None and _replaced(folder).exists():
            with lock_folder(folder):
                restore_folder(folder)
            continue
        try:
            result = read(folder)
        except (OSError, ValueError):
            if version == _version(folder):
                raise
        else:
            if version == _version(folder):
                return result


def _version(folder: Path) -> int | None:
    with suppress(FileNotFoundError):
        return folder.stat().st_ctime_ns
    return None


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
        if not isinstance(values, dict):
            raise ValueError("it contains no mapping")
        return values
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error_text(error)}.") from error


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid4().hex[:8]}{UNFINISHED}")


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{REPLACED}")


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _finalize(path: Path, mode: int) -> None:
    """Flush a file, or those in a folder, to disk; one that only its owner may read, as of safetensors, gets a mode."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            if stat.S_IMODE(file.stat().st_mode) == 0o600:
                file.chmod(mode & 0o666)
            with file.open("rb+") as opened:
                os.fsync(opened)  # on a full network file system this can be the only call that fails


MANIFEST_FILE = "manifest.json"

RECORD_FILE = "training_data.json"
"""Record of the images of a training run, beside its model."""

SNAPSHOT_FOLDER = "snapshots"
"""Folder of the snapshots in the folder of a training run."""


def write_manifest(folder: Path) -> None:
    """Write `manifest.json` for all files below a folder. It is written last, so it marks a complete folder.

    The checksum is CRC-32: it detects any flipped bit, in half the time of SHA-256, but no deliberate changes.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not is_of_system(path.name) and path != folder / MANIFEST_FILE:
            name = path.relative_to(folder).as_posix()
            files[name] = {"size": path.stat().st_size, "crc32": _checksum(path)}
    write_json(folder / MANIFEST_FILE, {"files": files}, strict=True)


def find_damage(folder: Path, required: Collection[str] = ()) -> str | None:
    """Return a description of the first file of a folder that is missing or differs from its manifest, or None.

    The manifest must list the `required` names; files that it does not list are ignored.
    """
    try:
        files = read_json(folder / MANIFEST_FILE)["files"]
        for name, values in (dict.fromkeys(required) | files).items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (folder / name).stat().st_size != values["size"] or _checksum(folder / name) != values["crc32"]:
                return f"{name} is damaged: it does not match its checksum in {MANIFEST_FILE}"
    except FileNotFoundError:
        return f"{MANIFEST_FILE} is missing"
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


class JsonLines(dict[Any, Any]):
    """Values by key, each appended to a file as a line of JSON, so that an interrupted run can continue.

    Lists in keys and values are read as tuples. Several processes can append to a file; each has read the lines that it
    had in the beginning. An incomplete last line is ignored; after a kill, the next value replaces it. `prepare` is
    called once, before the first line is written.
    """

    def __init__(
        self, path: str | os.PathLike, *, read: bool = True, prepare: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.path, self._prepare = Path(path), prepare
        content = self.path.read_bytes() if read and self.path.exists() else b""
        try:
            for line in content[: content.rfind(b"\n") + 1].splitlines():
                key, value = map(_as_tuples, json.loads(line))
                super().__setitem__(key, value)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {error_text(error)}. Remove it, or choose another file.") from error

    def __setitem__(self, key: Any, value: Any) -> None:
        self._prepare()
        self._prepare = lambda: None
        super().__setitem__(key, value)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.seek(max(file.tell() - 1, 0))
            if file.read()[-1:] not in (b"", b"\n"):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            # One call, so that the lines of other processes are complete.
            file.write(f"{json.dumps([key, value])}\n".encode())


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
