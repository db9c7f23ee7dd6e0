"""Programs whose own processes are forks of them, which need not import torch and transformers again.

It is for the code of `fresh_python` programs, which have imported them, and no threads.
"""

import os
import signal
import sys
from typing import Any

import fresh_python


class Forked:
    """A process like that of `subprocess.Popen`, for the command line of a Python."""

    def __init__(self, args: list[str], env: dict[str, str], stdout: Any = None, stderr: Any = None, **options: Any):
        self.args, self.returncode = args, None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            fresh_python.status = 1
            try:
                if options.get("start_new_session"):
                    os.setsid()
                os.environ.update(env)
                for number, stream in ((1, stdout), (2, stderr)):
                    if stream is not None:
                        os.dup2(stream.fileno(), number)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                fresh_python.run([word for word in args[1:] if word != "-u"])
                fresh_python.status = 0
            except SystemExit as stop:
                fresh_python.status = stop.code if type(stop.code) is int else int(stop.code is not None)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                fresh_python.end()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def poll(self, flags: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, flags)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return self.poll(0)
