"""Disturbances of forked processes: kills and stops at a file event or any time, full disks and damaged files."""

import contextlib
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOME = Path(tempfile.mkdtemp(prefix="soak-"))
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(HOME / "hf"), "ACCELERATE_USE_CPU": "true"}
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # runs are forked from a process without threads

KILL, FULL_DISK, DAMAGE = "kill", "full disk", "damage"
SECOND_RUN, SECOND_WRITER, READER = "second run", "second writer", "reader"
CRASHED = 99
"""Exit code of a process with a traceback."""

SECONDS = 600
"""Longest duration of a process."""

EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


class UnexpectedEndError(Exception):
    """A disturbed run did not end as it should."""


@dataclass
class Ended:
    """How a run ended.

    Attributes:
        codes: Exit codes of its processes; negative for signals.
        printed: What they printed.
    """

    codes: list[int]
    printed: str

    @property
    def succeeded(self) -> bool:
        return not any(self.codes)


def fork(main: Callable[[], None], output: int) -> int:
    """Call a function in a new process that prints to a file descriptor; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.alarm(SECONDS)
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = CRASHED
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class Process:
    """A function in a new process, and what it printed.

    Args:
        main: The function.
        before: Called in the process before.

    Attributes:
        pid: Its process id.
        code: Its exit code when it has ended; negative for signals.
        printed: What it printed, when it has ended.
    """

    def __init__(self, main: Callable[[], object], before: Callable[[], object] = lambda: None) -> None:
        self._read, write = os.pipe()
        self.pid = fork(lambda: (before(), main()), write)
        os.close(write)
        self.code: int | None = None
        self.printed = ""

    def wait(self, seconds: float = SECONDS, *, stopped: bool = False) -> bool:
        """Return whether the process has ended, or also whether it is stopped, after at most this time."""
        end = time.monotonic() + seconds
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | (os.WUNTRACED if stopped else 0))
            if pid and os.WIFSTOPPED(status):
                return True
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                with os.fdopen(self._read, errors="replace") as pipe:
                    self.printed = pipe.read()
            elif time.monotonic() > end:
                return False
            else:
                time.sleep(0.002)
        return True

    def proceed(self) -> None:
        """Let it continue if it was stopped, and wait for its end."""
        if self.code is None:
            os.kill(self.pid, signal.SIGCONT)
            self.wait()


def signal_at_event(folder: Path, number: int, kind: int = signal.SIGKILL, events: tuple[str, ...] = EVENTS) -> None:
    """Let the process send itself a signal when it does something to a file in a folder for the n-th time."""
    left = number

    def count(event: str, values: tuple[Any, ...]) -> None:
        nonlocal left
        # `shutil.rmtree` names files relative to the descriptor of their folder.
        is_inside = event in events and (
            str(folder) in str(values[:2]) or (event != "open" and values[-1] not in (-1, None))
        )
        if is_inside:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), kind)

    sys.addaudithook(count)


def kill_after(seconds: float) -> None:
    """Let the process end without notice after this much CPU time, at any instruction."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def fill_disk(size: int) -> None:
    """Let every write beyond this size of a file fail."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def damage(path: Path, draw: random.Random) -> None:
    """Flip a bit of a file, truncate it, or remove it."""
    data = bytearray(path.read_bytes())
    kind = draw.choice(("flip", "truncate", "remove"))
    if kind == "remove":
        path.unlink()
    elif kind == "truncate":
        path.write_bytes(data[: draw.randrange(len(data))])
    else:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
