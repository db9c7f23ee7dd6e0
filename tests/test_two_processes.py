"""Are the two processes of a test kept, and are their errors raised?"""

import os

import pytest
from torch import distributed
from two_processes import run_two


def print_process(rank: int) -> None:
    distributed.init_process_group("gloo")
    distributed.barrier()  # the first process has the store, from which the other one reads
    print(os.getpid())


def fail_in_one(rank: int) -> None:
    distributed.init_process_group("gloo")
    if rank:
        raise ValueError(f"of rank {rank}")
    distributed.barrier()


def test_an_error_in_one_process_is_raised_and_the_next_functions_share_a_new_pair():
    with pytest.raises(RuntimeError, match="of rank 1"):
        run_two(fail_in_one)
    first, second = ({*run_two(print_process)} for _ in range(2))
    assert len(first) == 2
    assert first == second
