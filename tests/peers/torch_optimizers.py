"""Generic tests of optimizers on the inputs of torch's `optim_db`, which torch installs.

torch's own `test_optim.py` is in neither of its distributions, so that the tests are written here, after what torch
promises of every optimizer. Ours run with ordinary parameters, and with those of their own rule.
"""

import copy
import inspect
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, OptimizerInfo, OptimizerInput, optim_db

from hf_sphere.optim.optimizers import optimizer_class, optimizer_names

NOT_APPLICABLE = {
    "test_ordinary_parameters_take_the_steps_of_torch[*-sgd_mrt-dampening]": (
        "dampening applies to the first gradient too, as in the paper"
    )
}

KINDS = {name: optimizer_class(name) for name in optimizer_names()}
OWN_RULES = {name: {kind.group_key: [0] if kind.group_key == "channel_dims" else True} for name, kind in KINDS.items()}
OWN_RULES["muon_hyperball"]["muon"] = True


def info(name: str) -> OptimizerInfo:
    """torch's description of the optimizer that one of ours generalizes."""
    return next(info for base in KINDS[name].__mro__ for info in optim_db if info.optim_cls is base)


SUPPORTED = [
    pytest.param(name, value.kwargs, id=f"{name}-{value.desc}")
    for name, kind in KINDS.items()
    for value in info(name).optim_inputs_func(device="cpu")
    if not set(value.kwargs) & set(kind.unsupported)
]
ERRORS = [
    pytest.param(name, error, id=f"{name}-{error.optimizer_error_input.desc}")
    for name in KINDS
    for error in info(name).optim_error_inputs_func(device="cpu", dtype=torch.float32)
]

every_optimizer = pytest.mark.parametrize("name", KINDS)
both_rules = pytest.mark.parametrize("own", [False, True], ids=["ordinary", "own rule"])
all_options = pytest.mark.parametrize(("name", "options"), SUPPORTED)


def build(name: str, own: bool = False, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[list[Tensor], Any]:
    """Return a matrix and a vector, the same in every call, and their optimizer."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(10, 5), (10,)]
    values = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    # Rows of unit norm, to which AdamG moves others in its first step.
    parameters = [nn.Parameter(value) for value in (nn.functional.normalize(values[0]), values[1])]
    groups = [{"params": parameters[:1], **(OWN_RULES[name] if own else {})}, {"params": parameters[1:]}]
    return parameters, KINDS[name](groups, **copy.deepcopy(options))


def loss_of(parameters: list[Tensor]) -> Tensor:
    matrix, vector = parameters
    x = torch.linspace(-1, 1, matrix.shape[1], dtype=matrix.dtype)
    return (nn.functional.normalize(matrix) @ x + vector).square().sum()


def take_steps(parameters: list[Tensor], optimizer: Any, number: int = 3) -> list[Tensor]:
    for _ in range(number):
        optimizer.zero_grad()
        loss_of(parameters).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def assert_equal(ours: list[Tensor], expected: list[Tensor], **tolerances: float) -> None:
    torch.testing.assert_close(ours, expected, **tolerances or {"rtol": 0, "atol": 0})


@pytest.mark.parametrize(("name", "error"), ERRORS)
def test_what_torch_refuses_is_refused(name: str, error: Any) -> None:
    given: OptimizerInput = error.optimizer_error_input
    assert error.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
    params = [nn.Parameter(torch.ones(2, 2))] if given.params is None else given.params
    with warnings.catch_warnings(action="error"), pytest.raises(error.error_type):
        KINDS[name](params, **given.kwargs)


@all_options
@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_ordinary_parameters_take_the_steps_of_torch(
    name: str, options: dict[str, Any], implementation: dict[str, bool]
) -> None:
    if implementation.get("foreach") and isinstance(options.get("lr"), Tensor):
        pytest.skip("torch refuses tensors of rates with foreach")
    parameters, optimizer = build(name, **options, **implementation)
    expected = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    kind = info(name).optim_cls
    same = inspect.signature(kind).parameters.keys() & optimizer.defaults.keys()
    torchs = kind(expected, **{key: optimizer.defaults[key] for key in same})
    assert_equal(take_steps(parameters, optimizer), take_steps(expected, torchs))


@both_rules
@all_options
@pytest.mark.parametrize("scheduler", range(2))
def test_loss_goes_in_the_right_direction(name: str, options: dict[str, Any], own: bool, scheduler: int) -> None:
    parameters, optimizer = build(name, own, **options)
    schedules = [build(optimizer) for build in info(name).scheduler_inputs[-1][scheduler : scheduler + 1]]
    before = loss_of(parameters).item()
    for _ in range(20):
        take_steps(parameters, optimizer, 1)
        for schedule in schedules:
            schedule.step(*[before] * isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau))
    after = loss_of(parameters).item()
    assert after > before if options.get("maximize") else after < before


@both_rules
@every_optimizer
def test_options_of_groups_are_used(name: str, own: bool) -> None:
    for option, value in {"lr": 0.0, "weight_decay": 0.0}.items():
        parameters, optimizer = build(name, own, lr=1e-2, weight_decay=0.1)
        optimizer.param_groups[1][option] = value
        _, vector = take_steps(parameters, optimizer)
        others, optimizer = build(name, own, lr=1e-2, weight_decay=0.1)
        assert not torch.equal(vector, take_steps(others, optimizer)[1])


@both_rules
@every_optimizer
def test_group_can_be_added(name: str, own: bool) -> None:
    parameters, optimizer = build(name, own, lr=1e-2)
    expected = take_steps(parameters, optimizer)
    matrix, vector = build(name)[0]
    optimizer = KINDS[name]([{"params": [matrix], **(OWN_RULES[name] if own else {})}], lr=1e-2)
    optimizer.add_param_group({"params": vector})
    assert_equal(take_steps([matrix, vector], optimizer), expected)


@both_rules
@every_optimizer
def test_state_with_names_is_loaded_without_and_the_reverse(name: str, own: bool) -> None:
    rule = OWN_RULES[name] if own else {}
    for named in itertools.permutations([True, False]):
        results = []
        for is_named in named:
            parameters = build(name)[0]
            given = [("matrix", parameters[0]), ("vector", parameters[1])] if is_named else parameters
            optimizer = KINDS[name]([{"params": given[:1], **rule}, {"params": given[1:]}])
            if results:
                optimizer.load_state_dict(results[0])
            take_steps(parameters, optimizer)
            results.append(copy.deepcopy(optimizer.state_dict()))
