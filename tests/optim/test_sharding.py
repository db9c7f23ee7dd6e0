import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer
from two_processes import run_two

from hf_sphere.optim import SGDMRT, AdamG, AdamSRT, AdamWHyperball, Muon, MuonHyperball, build_optimizer
from hf_sphere.optim.optimizers import optimizer_class

pytestmark = pytest.mark.slow

FILTERS = {"channel_dims": [0]}
CASES: dict[str, tuple[type[Optimizer], dict[str, Any], dict[str, Any]]] = {
    "AdamSRT": (AdamSRT, FILTERS, {"lr": 1e-2, "weight_decay": 0.01}),
    "AdamG": (AdamG, FILTERS, {"lr": 1e-2}),
    "SGDMRT": (SGDMRT, FILTERS, {"lr": 1e-1, "weight_decay": 0.01}),
    "AdamSRT in bfloat16": (AdamSRT, FILTERS, {"lr": 1e-2, "low_precision": "master"}),
    "Muon": (Muon, {"muon": True}, {"lr": 1e-2, "weight_decay": 0.01}),
    "MuonHyperball": (MuonHyperball, {"muon": True, "hyperball": True}, {"lr": 1e-2}),
    "MuonHyperball, two matrices": (
        MuonHyperball,
        {"muon": True, "hyperball": True, "matrices": (0, 2, 3)},
        {"lr": 1e-2},
    ),
    "AdamWHyperball": (AdamWHyperball, {"hyperball": True}, {"lr": 1e-2, "fused": True}),
}
FULL = StateDictOptions(full_state_dict=True)
STEPS, MORE = 3, 1
IN_ORDER = ["adam_srt", "muon"]
INPUTS = torch.linspace(-1, 1, 64).reshape(8, 8).sin().cumprod(1)


def small_model(case: str, seed: int = 0) -> nn.Sequential:
    """Of 5 filters, rank 0 gets 3 and rank 1 gets 2; of a single filter, rank 1 gets none."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 1, 3, bias=False),
        nn.BatchNorm2d(1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    ).to(torch.bfloat16 if "bfloat16" in case else torch.float32)


def optimizer_of(model: nn.Sequential, case: str) -> Optimizer:
    kind, group, options = CASES[case]
    rest = [*model[1].parameters(), *model[4].parameters(), *model[7].parameters()]
    first = {"params": [model[0].weight], **group}
    second = {"params": [model[3].weight], **{key: value for key, value in group.items() if key != "matrices"}}
    return kind([first, second, {"params": rest}], **options)


def train(model: nn.Sequential, optimizer: Optimizer, start: int, count: int) -> None:
    for step in range(start, start + count):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(8, 1, 8, 8, generator=generator).to(model[0].weight.dtype)
        labels = torch.randint(0, 3, (8,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(images).float(), labels).backward()
        optimizer.step()


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: getattr(p, "full_tensor", p.clone)().detach().clone() for name, p in model.named_parameters()}


def run_sharded(case: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(small_model(case), mesh=mesh)
    optimizer = optimizer_of(model, case)
    train(model, optimizer, 0, STEPS)
    seen: dict[str, Any] = {"weights": whole(model)}
    seen["steps"] = [int(state["step"]) for state in optimizer.state.values()]
    if (moment := optimizer.state[model[0].weight].get("exp_avg_sq")) is not None:
        is_placed = isinstance(moment, DTensor) and moment.placements == model[0].weight.placements
        seen["moment"] = [is_placed, list(moment.shape), list(moment.to_local().shape)]
    other = fully_shard(small_model(case, seed=1), mesh=mesh)
    resumed = optimizer_of(other, case)
    weights, state = get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)
    seen["state"] = copy.deepcopy(state["state"])  # torch returns references to the counters
    set_model_state_dict(other, copy.deepcopy(weights), options=FULL)
    set_optimizer_state_dict(other, resumed, copy.deepcopy(state), options=FULL)
    train(model, optimizer, STEPS, MORE)
    train(other, resumed, STEPS, MORE)
    return seen | {"continued": whole(model), "resumed": whole(other)}


def cut_through_a_group() -> str:
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    assert isinstance(weight.grad, DTensor)
    try:
        AdamSRT([weight], channel_dims=[]).step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def perceptron() -> nn.Sequential:
    """A model whose scale-invariant weights are rows, which FSDP2 does not divide."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(6, 3))


def train_perceptron(model: nn.Sequential, optimizer: Optimizer) -> dict[str, Tensor]:
    for _ in range(STEPS):
        model(INPUTS).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def build_in_order(name: str) -> dict[str, Any]:
    """Follow the error of the wrong order."""
    mesh, model = init_device_mesh("cpu", (2,)), perceptron()
    try:
        build_optimizer(fully_shard(perceptron(), mesh=mesh), name, INPUTS)
        said = "no error"
    except ValueError as error:
        said = str(error)
    groups = optimizer_class(name).form_groups(model, INPUTS)
    sharded = dict(fully_shard(model, mesh=mesh).named_parameters())
    groups = [{**group, "params": [(name, sharded[name]) for name, _ in group["params"]]} for group in groups]
    return {"said": said, "weights": train_perceptron(model, optimizer_class(name)(groups, lr=1e-2))}


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo")
    seen = {case: run_sharded(case) for case in CASES}
    seen |= {name: build_in_order(name) for name in IN_ORDER}
    torch.save(seen | {"cut": cut_through_a_group()}, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of two processes, run once for all tests."""
    folder: Path = tmp_path_factory.mktemp("sharded")
    run_two(work, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> str:
    """Each optimizer."""
    return request.param


@pytest.mark.parametrize("rank", [0, 1])
def test_sharded_weights_and_the_full_state_match_unsharded_ones(case, rank, processes):
    model, seen = small_model(case), processes[rank][case]
    optimizer = optimizer_of(model, case)
    train(model, optimizer, 0, STEPS)
    torch.testing.assert_close(seen["weights"], whole(model), rtol=1e-6, atol=1e-6)
    assert seen["steps"] == [STEPS] * 8
    if case.startswith(("AdamSRT", "AdamG")):  # the second moment is sharded like the weight
        assert seen["moment"] == [True, [5, 1, 1, 1], [(3, 2)[rank], 1, 1, 1]]
    torch.testing.assert_close(seen["resumed"], seen["continued"], rtol=1e-6, atol=1e-6)
    if rank == 0:
        names = {parameter: name for name, parameter in model.named_parameters()}
        expected = {names[parameter]: state for parameter, state in optimizer.state.items()}
        torch.testing.assert_close(seen["state"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", IN_ORDER)
def test_optimizer_of_a_sharded_model_is_refused_with_the_order_to_follow(name, processes):
    said, weights = processes[0][name].values()
    assert "call `form_groups` of the optimizer first, then fully_shard, then build it" in said
    model = perceptron()
    expected = train_perceptron(model, build_optimizer(model, name, INPUTS, lr=1e-2))
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_a_sharded_run_resumes_unsharded(case, processes):
    other = small_model(case, seed=1)
    resumed = optimizer_of(other, case)
    set_model_state_dict(other, processes[0][case]["weights"], options=StateDictOptions(strict=False))
    groups = get_optimizer_state_dict(other, resumed)["param_groups"]
    state = copy.deepcopy({"state": processes[0][case]["state"], "param_groups": groups})
    set_optimizer_state_dict(other, resumed, state)
    train(other, resumed, STEPS, MORE)
    torch.testing.assert_close(whole(other), processes[0][case]["continued"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_error_for_split_groups_names_the_placement(rank, processes):
    assert "shape [4, 3] with channel_dims [] is placed as [Shard(dim=0)]" in processes[rank]["cut"]
