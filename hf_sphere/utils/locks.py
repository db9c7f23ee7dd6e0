"""Locks between processes and threads: a file that the operating system locks for as long as its owner lives."""

import errno
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

SECONDS_TO_MESSAGE = 1.0
"""A process that waits longer than this says for whom."""

_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def locked_file(path: Path, of: Path, *, wait: bool) -> Iterator[None]:
    """Lock a folder by a lock file, which has the process id and host of the owner and is removed at the end.

    A lock ends with its process, even if that is killed. A thread can lock a folder again. A file system without locks
    is used without one, with a warning. `of` is the folder, for messages. A folder in use is a `FileExistsError` if
    `wait` is False.
    """
    lock = FileLock(path, is_singleton=True, on_acquired=_write_owner)
    is_first, timeout = not lock.is_locked, SECONDS_TO_MESSAGE if wait else 0.0
    while True:
        try:
            lock.acquire(timeout=timeout)
            break
        except InterruptedError:
            continue
        except Timeout as error:
            if not wait:
                raise FileExistsError(f"{of} is in use by {_owner(path)}.") from error
            logger.warning("Waiting for %s, which writes %s.", _owner(path), of)
            timeout = -1
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            logger.warning("%s cannot be locked (%s); do not write to it from another process.", of, error)
            break
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                path.unlink() if is_first else None
            lock.release()


def _write_owner(descriptor: int) -> None:
    if not os.fstat(descriptor).st_nlink:
        raise InterruptedError("the last owner removed this file after it was opened")
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())


def _owner(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip() or "another process"
    return "another process"
