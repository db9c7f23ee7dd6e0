"""Two processes of a group on the CPU, started once for all tests of a session."""

import atexit
import io
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from fresh_python import FreshPython
from torch import distributed

_started: dict[Connection, FreshPython] = {}


def run_two(function: Callable[..., None], *args: Any) -> list[str]:
    """Call a function of a module with the rank and these arguments in two processes, with the present environment.

    Returns what each of them printed.

    The processes are those of earlier calls, without their process group and the state of Accelerate. The environment
    has the variables by which they find each other; `function` creates the process group.
    """
    if not _started:
        code = "import sys, two_processes; two_processes.serve(*sys.argv[1:])"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with Listener(family="AF_UNIX") as listener:
            for rank in (0, 1):
                process = FreshPython([sys.executable, "-P", "-c", code, listener.address, rank], env=environment)
                _started[listener.accept()] = process
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    for connection in _started:
        connection.send((os.environ | group, function, args))
    waiting, printed = [*_started], []
    while waiting:
        for connection in wait(waiting):
            waiting.remove(connection)
            error, text = _receive(connection)
            printed.append(text)
            if error:  # the other one may wait for it forever, or have failed first
                errors = [error, *(_receive(each)[0] or "" for each in wait(waiting, timeout=1))]
                _stop()
                raise RuntimeError(f"in one of two processes: {' and '.join(errors)}")
    return printed


def _receive(connection: Any) -> tuple[str | None, str]:
    """Return the error of a process, and what it printed."""
    try:
        return connection.recv()
    except EOFError:
        return "it has ended", ""


@atexit.register
def _stop() -> None:
    while _started:
        connection, process = _started.popitem()
        connection.close()
        process.kill()
        process.wait()


def serve(address: str, rank: str) -> None:
    """Call the functions that are sent to this address, until it is closed."""
    connection = Client(address)
    torch.set_num_threads(1)
    while True:
        error, printed = None, io.StringIO()
        try:
            environment, function, args = connection.recv()
            os.environ.clear()
            os.environ.update(environment, RANK=rank, LOCAL_RANK=rank)
            torch.manual_seed(0)
            with redirect_stdout(printed):
                function(int(rank), *args)
        except EOFError:
            return
        except BaseException:
            error = traceback.format_exc()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        forget()
        torch.set_flush_denormal(False)
        connection.send((error, printed.getvalue()))


def forget() -> None:
    """Reset the process-wide state of accelerate."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def sharding_accelerator(**_: Any) -> Accelerator:
    """Return an accelerator that applies FSDP2 on the CPU, which torch supports, but Accelerate ignores."""
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="FULL_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )
    state = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    AcceleratorState._shared_state.update(state)
    PartialState._shared_state.update(state)
    return accelerator
