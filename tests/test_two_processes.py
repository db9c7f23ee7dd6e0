"""Are the two processes of a test kept, and are their errors raised?"""

import os

import pytest
import torch
from torch import distributed
from two_processes import run_two


def note_process(rank: int, folder: str) -> None:
    distributed.init_process_group("gloo")
    pids = [None, None]
    distributed.all_gather_object(pids, os.getpid())
    torch.save(pids, f"{folder}/{rank}.pt")


def fail_in_one(rank: int, folder: str) -> None:
    distributed.init_process_group("gloo")
    if rank:
        raise ValueError(f"of rank {rank}")
    distributed.barrier()


def test_an_error_in_one_process_is_raised_and_the_next_functions_share_a_new_pair(tmp_path):
    with pytest.raises(RuntimeError, match="of rank 1"):
        run_two(fail_in_one, str(tmp_path))
    pids = []
    for _ in range(2):
        run_two(note_process, str(tmp_path))
        pids += [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert pids == [pids[0]] * 4
