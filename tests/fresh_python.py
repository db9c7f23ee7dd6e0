"""Start Python with the libraries around ours already imported, and ours not.

Importing torch and transformers takes six seconds of a core. A server imports them once per test process, and each
program runs in a fork of it, which has its own modules, environment, working directory and streams. Servers with other
variables of Hugging Face are forks of one that has imported the rest. A program that measures its imports or memory
needs a new process of `subprocess` instead.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from select import select
from subprocess import Popen, run as run_program  # which tests replace
from types import ModuleType
from typing import Any
from unittest import mock

LIBRARIES = [
    "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torchvision", "scipy.stats",
    "scipy.optimize", "sklearn.metrics", "pandas", "pyarrow.dataset", "aiohttp", "httpx", "jinja2", "pydantic",
]  # fmt: skip
"""Modules that do not read the variables of Hugging Face."""
HUGGING_FACE = ["transformers.trainer", "transformers.pipelines", "timm", "datasets", "accelerate"]
READ_ON_IMPORT = ("OMP_", "MKL_", "PYTHON", "TQDM_")
READ_BY_HUGGING_FACE = ("HF_", "TRANSFORMERS_", "XDG_", "HOME")
"""Beginnings of the variables that these modules read when they are imported."""
READ_BY_PYTHON = ("PYTHONPATH", "PYTHONWARNINGS")
"""Variables that are applied in each process."""

_servers: dict[tuple, socket.socket] = {}
_processes: list[Popen] = []


class FreshPython(Popen):
    """A process like that of `subprocess.Popen`, for the command line of a Python without options other than `-P`.

    Args:
        args: Words of the command line, the first of which is the path of Python.
        hugging_face: Whether transformers, datasets and the like are imported as well. Those that are to read `HF_HOME`
            of `env`, or to be imported after ours, are not.
        options: Options of `subprocess.Popen`.
    """

    def __init__(self, args: Sequence[object], hugging_face: bool = True, **options: Any) -> None:
        self.hugging_face = hugging_face
        super().__init__([*map(str, args)], **options)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, *rest):
        pipes, new_session = rest[2:8], rest[13]
        if preexec_fn is not None or pass_fds or args[0] != sys.executable:
            raise ValueError(f"needs a command line of Python, and no preexec_fn or pass_fds; got {args}")
        job = {"args": args[1:], "cwd": os.fspath(cwd or os.getcwd()), "new_session": new_session}
        job["env"] = dict(os.environ if env is None else env)
        server = _connect(self.hugging_face, job["env"])
        self.report, theirs = socket.socketpair()
        streams = [own if own != -1 else number for number, own in enumerate((pipes[0], pipes[3], pipes[5]))]
        with theirs:
            socket.send_fds(server, [json.dumps(job).encode()], [theirs.fileno(), *streams])
        self._child_created = True
        self.pid = self._read_report()
        self._close_pipe_fds(*pipes)

    def _read_report(self) -> int:
        return struct.unpack("i", self.report.recv(4))[0]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and select([self.report], [], [], 0)[0]:
            self._wait(None)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not select([self.report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = self._read_report()
            self.report.close()
        return self.returncode


def run_fresh(args: Sequence[object], *, hugging_face: bool = True, **options: Any) -> subprocess.CompletedProcess:
    """Run a Python program to its end, as `subprocess.run` does."""
    with mock.patch.object(subprocess, "Popen", partial(FreshPython, hugging_face=hugging_face)):
        return run_program(args, **options)


def _connect(hugging_face: bool, env: dict[str, str]) -> socket.socket:
    """Return the socket of a server in this environment."""
    prefixes = READ_ON_IMPORT + READ_BY_HUGGING_FACE if hugging_face else READ_ON_IMPORT
    given = {key: env[key] for key in sorted(env) if key.startswith(prefixes) and key not in READ_BY_PYTHON}
    key = (hugging_face, *given.items())
    if key not in _servers:
        own, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        other = {key: value for key, value in env.items() if key not in READ_BY_PYTHON}
        # A session of its own is not interrupted by Ctrl-C; a server ends when this process does.
        with theirs:
            if hugging_face:
                job = {"cwd": os.getcwd(), "new_session": True, "env": other}
                message = [json.dumps(job).encode()], [theirs.fileno()]
                socket.send_fds(_connect(False, env), *message)
            else:
                command = [sys.executable, "-P", __file__, str(theirs.fileno())]
                _processes.append(Popen(command, env=other, pass_fds=[theirs.fileno()], start_new_session=True))
        _servers[key] = own
    return _servers[key]


# In the server


def serve(connection: socket.socket, modules: list[str]) -> dict:
    """Import modules, and return a job in a new process for each that is asked for; end with the process that asks."""
    for name in modules:
        with suppress(ImportError):
            import_module(name)
    gc.freeze()
    while True:
        message, fds, *_ = socket.recv_fds(connection, 1 << 20, 4)
        if not message:
            os._exit(0)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those that have reported
                pass
        if os.fork() == 0:
            break
        for fd in fds:
            os.close(fd)
    connection.close()
    work = json.loads(message)
    report, *streams = fds
    if not streams:  # a server of Hugging Face
        prepare(work)
        return serve(socket.socket(fileno=report), HUGGING_FACE)
    if (pid := os.fork()) != 0:
        for fd in (*streams, 0, 1, 2):
            os.close(fd)
        os.write(report, struct.pack("i", pid))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):
            os.write(report, struct.pack("i", status))
        os._exit(0)
    os.close(report)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    return work


def prepare(job: dict) -> None:
    """Set what a new process has from its start."""
    if job["new_session"]:
        os.setsid()
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    path, warned = (job["env"].get(name, "") for name in READ_BY_PYTHON)
    sys.path[:0] = filter(None, path.split(os.pathsep))
    for action in filter(None, warned.split(",")):
        warnings.simplefilter(action)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import_module("numpy").random.seed()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty())


def run(args: list[str]) -> None:
    """Run the program of a command line."""
    sys.orig_argv[1:] = args
    first, *others = args
    safe = first == "-P"
    if safe:
        first, *others = others
    if first == "-c":
        code, *others = others
        sys.argv = ["-c", *others]
        sys.path[:0] = [""] * (not safe)
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(main))
    elif first == "-m":
        module, *others = others
        sys.argv = ["-m", *others]
        sys.path[:0] = [os.getcwd()] * (not safe)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif first.startswith("-"):
        raise ValueError(f"option of Python that is not supported: {first}")
    else:
        sys.argv = [first, *others]
        sys.path[:0] = [str(Path(first).parent.resolve())] * (not safe)
        runpy.run_path(first, run_name="__main__")


def end() -> None:
    """Leave without freeing every object, which would copy the memory that is shared with the server."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if status is not None:
        os._exit(status)


if __name__ == "__main__":
    atexit.register(end)  # the first is called last
    work = serve(socket.socket(fileno=int(sys.argv[1])), LIBRARIES)
    prepare(work)
    status: int | None = 1
    try:
        run(work["args"])
        status = 0
    except SystemExit as stop:
        if not isinstance(stop.code, str):
            status = stop.code or 0
        raise
    except KeyboardInterrupt:
        status = None  # a process that is interrupted ends by a signal
        raise
