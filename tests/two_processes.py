"""Set-up of the processes of a test on the CPU."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def run_two(function: Callable[..., None], *args: Any) -> None:
    """Call a function of a module with the rank and these arguments, in two processes with the present environment."""
    mp.start_processes(_run, args=(dict(os.environ), function, *args), nprocs=2, start_method="forkserver")


def _run(rank: int, environment: dict[str, str], function: Callable[..., None], *args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    function(rank, *args)


def join(rank: int, port: int) -> None:
    """Set the environment of one of two processes."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    torch.set_num_threads(1)


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
