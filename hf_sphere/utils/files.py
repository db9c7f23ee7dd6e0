"""Files: atomic writes, manifests with checksums, and removal of private texts from what is written.

A file or folder that is written atomically appears under its name only when it is complete.
"""

import errno
import json
import os
import re
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hf_sphere.utils.arguments import error_text

UNFINISHED = ".unfinished"
REPLACED = ".replaced"


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to; it replaces `path` when the block ends without an error.

    The file is flushed to disk before it is renamed. One that only its owner may read gets the default mode, because
    some libraries always create theirs that way. The temporary name contains the process id, so that several processes
    can write the same file; the last one wins.

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
        _flush_folder(path.parent)
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
        _flush_folder(folder.parent)
        if replaced.exists():
            remove_folder(replaced)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def atomic_files(folder: str | os.PathLike) -> Iterator[Path]:
    """Yield an empty temporary folder inside `folder`; its files replace those of the same name in `folder`.

    No file is replaced before all have been written and flushed. Each replacement is atomic; the sequence is not.
    Several processes can write to the same folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".", suffix=UNFINISHED, dir=folder))
    try:
        yield unfinished
        _finalize(unfinished)
        for file in unfinished.iterdir():
            file.replace(folder / file.name)
        _flush_folder(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def restore_folder(folder: str | os.PathLike) -> None:
    """Undo a replacement by `atomic_folder` that was interrupted between its two renames."""
    folder = Path(folder)
    _, replaced = _siblings(folder)
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)
    elif replaced.exists():
        remove_folder(replaced)


def remove_folder(folder: Path) -> None:
    """Remove a folder; it is renamed first, so that an interrupted removal leaves no part of it under its name."""
    removed = folder.with_name(f".{folder.name.lstrip('.')}.removed{UNFINISHED}")
    shutil.rmtree(removed, ignore_errors=True)
    folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with atomic_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike, values: Mapping[str, Any], *, strict: bool = False) -> None:
    """Write a JSON file atomically.

    Args:
        path: The file.
        values: Its contents.
        strict: Whether values that are not JSON-serializable raise a `TypeError`; by default they become strings.
    """
    write_text(path, json.dumps(values, indent=2, default=None if strict else str) + "\n")


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Read a JSON file that contains a mapping.

    Raises:
        OSError: If it cannot be opened.
        ValueError: If it is damaged; the message names the file.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error_text(error)}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged: it contains no mapping.")
    return values


class JsonLines(dict[Any, Any]):
    """Values by key, each appended to a file as a line of JSON, so that an interrupted run can continue.

    Lists in keys and values are read as tuples. Several processes can append to a file; each has read the lines that it
    had in the beginning.

    Args:
        path: The file.
        read: Whether to read it. An incomplete last line is ignored; after a kill, the next value replaces it.
        prepare: Called once, before the first line is written.

    Raises:
        ValueError: If the file is damaged.
    """

    def __init__(
        self, path: str | os.PathLike, *, read: bool = True, prepare: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.path = Path(path)
        self._prepare: Callable[[], None] | None = prepare
        content = self.path.read_bytes() if read and self.path.exists() else b""
        end = content.rfind(b"\n") + 1
        try:
            if content[end:] and not content[end:].startswith(b"["):
                raise ValueError("it does not consist of lines of JSON")
            for line in content[:end].splitlines():
                key, value = map(_as_tuples, json.loads(line))
                super().__setitem__(key, value)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {error_text(error)}. Remove it, or choose another file.") from error

    def __setitem__(self, key: Any, value: Any) -> None:
        self.add({key: value})

    def add(self, values: Mapping[Any, Any]) -> None:
        """Add values, and append them to the file in one call."""
        if self._prepare is not None:
            self._prepare()
            self._prepare = None
        self.update(values)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.seek(max(file.tell() - 1, 0))
            if file.read()[-1:] not in (b"", b"\n"):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            # One call, so that the lines of other processes are complete.
            file.write("".join(json.dumps([key, value]) + "\n" for key, value in values.items()).encode())


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _siblings(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}{UNFINISHED}"), folder.with_name(f".{folder.name}{REPLACED}")


def _finalize(path: Path) -> None:
    """Flush a file, or everything in a folder, to disk, and let files have the default mode.

    safetensors creates its files readable by their owner only. Other modes are left to the file system and its ACLs.
    """
    paths = [path, *path.rglob("*")] if path.is_dir() else [path]
    files = [file for file in paths if file.is_file() and not file.is_symlink()]
    private = [file for file in files if stat.S_IMODE(file.stat().st_mode) == 0o600]
    if private:
        with suppress(OSError):  # some mounted file systems have no modes
            mode = _default_mode(private[0].parent)
            for file in private:
                file.chmod(mode)
    for file in files:
        _flush(file)
    for folder in (path for path in paths if path.is_dir()):
        _flush_folder(folder)


def _default_mode(folder: Path) -> int:
    """Return the mode of new files in a folder, by creating one: the umask cannot be read without changing it."""
    probe = folder / f".mode.{os.getpid()}{UNFINISHED}"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY, 0o666))
        return stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.unlink(missing_ok=True)


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


def write_manifest(folder: Path) -> None:
    """Write `manifest.json` for all files below a folder. It is written last, so it marks a complete folder.

    The checksum is CRC-32: it detects any flipped bit, in half the time of SHA-256, but no deliberate changes.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST_FILE)
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "crc32": _checksum(path)} for path in paths
    }
    write_json(folder / MANIFEST_FILE, {"files": files}, strict=True)


def find_damage(folder: Path) -> str | None:
    """Compare the files of a folder with its manifest; files that the manifest does not list are ignored.

    Returns:
        A description of the first file that is missing or has changed, or None.
    """
    name = MANIFEST_FILE
    try:
        files = json.loads((folder / name).read_text(encoding="utf-8"))["files"]
        for name, values in files.items():
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


def _checksum(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
_FOLDERS = re.compile(r"(?<![\w./:~])(?:/[^/\s'\",{}]+)+/(?=[^/\s])")  # not in URLs and relative paths


def hide_tokens(value: Any) -> Any:
    """Replace access tokens of the Hub in a text, or in all texts of a mapping or list."""
    return _map_texts(value, lambda text: _TOKEN.sub("<token>", text))


def hide_private(value: Any) -> Any:
    """Replace access tokens, and also absolute paths.

    A path becomes relative to the working directory if it is below it; otherwise only its last part is kept.
    """
    return _map_texts(hide_tokens(value), _hide_folders)


def _hide_folders(text: str) -> str:
    if here := str(Path.cwd()).rstrip("/"):
        text = re.sub(rf"(?<![\w.~]){re.escape(here)}/", "", text)
    return Path(text).name or text if Path(text).is_absolute() else _FOLDERS.sub("", text)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _map_texts(part, change) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_texts(part, change) for part in value]
    return change(value) if isinstance(value, str) else value
