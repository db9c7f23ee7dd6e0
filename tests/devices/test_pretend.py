import copy

import pytest
import torch
from torch import nn


@pytest.fixture
def count(pretend):
    """Count the kernels and synchronizations of a call."""

    def count(call) -> tuple[int, list[str]]:
        pretend.reset()
        call()
        return pretend.kernels(), [wait.operation for wait in pretend.synchronizations()]

    return count


@pytest.fixture
def x(pretend) -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3).to(pretend.NAME)


def test_views_and_allocations_are_no_kernels(count, x):
    assert count(lambda: (x.t(), x[0], x.expand(4, 2, 3), torch.empty_like(x), x.detach())) == (0, [])
    assert count(lambda: torch._foreach_add([x, x], 1.0)) == (1, [])  # which is one


@pytest.mark.parametrize("call", ["item", "nonzero", "mask", "equal", "to device", "index of the CPU", "tolist"])
def test_what_the_host_reads_is_a_synchronization(count, x, call):
    calls = {
        "item": lambda: x[0, 0].item(),
        "nonzero": x.nonzero,
        "mask": lambda: x[x > 1],
        "equal": lambda: torch.equal(x, x),
        "to device": lambda: torch.tensor([1.0], device=x.device),
        "index of the CPU": lambda: x[torch.tensor([1, 0])],
        "tolist": x.tolist,
    }
    assert len(count(calls[call])[1]) == 1


def test_a_capturable_step_refuses_synchronizations(pretend, x):
    with pretend.capturable():
        x.sum()
        with pytest.raises(RuntimeError, match="cannot be captured: _local_scalar_dense at tests/devices"):
            x.sum().item()


def test_tied_parameters_stay_tied(pretend):
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    net = copy.deepcopy(nn.Sequential(first, second).to(pretend.NAME))
    assert net[0].weight is net[1].weight
    assert net[0].weight is not first.weight


def test_kernels_are_recorded_in_order(pretend, x):
    with pretend.recorded_kernels() as kernels:
        (x * 2).sum()
    assert [(kernel.name, kernel.shapes) for kernel in kernels] == [("aten::mul", ((2, 3),)), ("aten::sum", ((2, 3),))]
