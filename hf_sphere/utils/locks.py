"""Locks between processes and threads: a file that the operating system locks for as long as its owner lives."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

logger = logging.getLogger(__name__)

SECONDS_TO_MESSAGE = 1.0
"""A process that waits longer than this says for whom."""


@contextmanager
def locked_file(path: Path, of: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a folder by a lock file, which has the process id and host of the owner and is removed at the end.

    A lock ends with its process, even if that is killed. A thread can lock a folder again. A file system without locks
    is used without one, with a warning; whether the folder is locked is yielded. `of` is the folder, for messages. A
    folder in use is a `FileExistsError` if `wait` is False.
    """
    lock: BaseFileLock = FileLock(path, is_singleton=True)
    is_first = not lock.is_locked
    try:
        if is_first:
            _acquire(lock, path, of, wait=wait)
        else:
            lock.acquire()
    except Timeout as error:
        raise FileExistsError(f"{of} is in use by {_owner(path)}.") from error
    except OSError as error:
        if isinstance(error, PermissionError) and path.exists():  # the lock file of another user
            raise FileExistsError(f"{of} is in use by {_owner(path)}.") from error
        logger.warning("%s cannot be locked (%s); do not write to it from another process.", of, error)
    try:
        yield lock.is_locked
    finally:
        if lock.is_locked:
            if is_first and not isinstance(lock, SoftFileLock):
                with suppress(OSError):
                    path.unlink()
            lock.release()


def _acquire(lock: BaseFileLock, path: Path, of: Path, *, wait: bool) -> None:
    timeout = SECONDS_TO_MESSAGE if wait else 0.0
    while True:
        try:
            lock.acquire(timeout=timeout)
        except Timeout:
            if not path.exists():
                path.touch()  # where no file can be created, the lock would be waited for without end
            if not wait:
                raise
            if timeout > 0:
                logger.warning("Waiting for %s, which writes %s.", _owner(path), of)
            timeout = -1.0
            continue
        descriptor = lock._context.lock_file_fd  # no public name
        if isinstance(lock, SoftFileLock) or descriptor is None:
            return
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                # Windows refuses the lock file to other handles, and its first byte to other readers.
                os.ftruncate(descriptor, 0)
                os.lseek(descriptor, 0, os.SEEK_SET)
                os.write(descriptor, f" process {os.getpid()} on {socket.gethostname()}".encode())
                return
        lock.release()  # the last owner removed this file after it was opened; a third process may hold a new one


def _owner(path: Path) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(1)
        return " ".join(file.read().decode(errors="replace").split()) or "another process"
    return "another process"
