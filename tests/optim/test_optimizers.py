import copy
import io
import pickle
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from case_selection import OPTIMIZER_FAMILIES
from steps import give_gradients, groups, make_model, make_optimizer, make_weights, take_steps
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import OneCycleLR

from hf_sphere.optim import SGDMRT, AdamG, AdamS, AdamSRT


def counterpart_of_torch(kind: type) -> type[Adam] | partial[SGD]:
    """The optimizer of torch that a class extends."""
    return Adam if issubclass(kind, Adam) else partial(SGD, momentum=0.9)


OPTIONS = {
    "defaults": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "maximize": {"maximize": True},
    "weight decay": {"weight_decay": 0.1},
    "maximize with weight decay": {"maximize": True, "weight_decay": 0.1, "foreach": False},
}
DECOUPLED = {"weight_decay": 0.1, "decoupled_weight_decay": True}
INVARIANT = {"channel_dims": [0]}


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def all_equal(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("shape", "dims"),
    [((6, 3, 3, 3), None), ((6, 3, 3, 3), [0, 1, 2, 3]), ((6, 1, 1), [0]), ((2, 3, 1), [0, 1]), ((6,), [0])],
    ids=str,
)
def test_weights_without_a_direction_match_torch_bit_for_bit(kind, shape, dims, options):
    ours = torch.randn(shape, requires_grad=True)
    torchs = ours.detach().clone().requires_grad_()
    take_steps(kind([{"params": [ours], "channel_dims": dims}], lr=0.03, **OPTIONS[options]), 5)
    take_steps(counterpart_of_torch(kind)([torchs], lr=0.03, **OPTIONS[options]), 5)
    assert torch.equal(ours, torchs)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("mine", "own", "theirs"),
    [
        *((adam, {"decoupled_weight_decay": True}, AdamW) for adam in (AdamS, AdamSRT, AdamG)),
        (SGDMRT, {"momentum": 0.0, **INVARIANT}, SGD),
    ],
)
def test_decoupled_weight_decay_and_sgd_without_momentum_match_torch_bit_for_bit(mine, own, theirs, options):
    common = {"lr": 0.03, "weight_decay": 0.1 if theirs is AdamW else 0.0, **OPTIONS[options]}
    ours = make_weights()
    torchs = copies(ours)
    take_steps(mine(ours, **own, **common), 5)
    take_steps(theirs(torchs, **common), 5)
    assert all_equal(ours, torchs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [None, [0], []], ids=str)
@pytest.mark.parametrize("options", [*OPTIONS.values(), DECOUPLED], ids=str)
def test_gradients_are_not_modified(kind, dtype, dims, options):
    weights = make_weights(dtype=dtype)
    optimizer = make_optimizer(kind, weights, channel_dims=dims, **options)
    for step in range(2):
        give_gradients(weights, step)
        gradients = [weight.grad for weight in weights]
        before = copies(gradients)
        optimizer.step()
        assert all(weight.grad is gradient for weight, gradient in zip(weights, gradients, strict=True))
        assert all_equal(gradients, before)


def test_parameters_without_a_gradient_are_unchanged(kind):
    weights = [*make_weights(), *make_weights(1)]
    optimizer = make_optimizer(kind, [{"params": weights[:3], **INVARIANT}, {"params": weights[3:]}], weight_decay=0.1)
    before = copies(weights)
    weights[1].grad, weights[4].grad = torch.ones_like(weights[1]), torch.ones_like(weights[4])
    optimizer.step()
    moved = [not torch.equal(weight, old) for weight, old in zip(weights, before, strict=True)]
    assert moved == [False, True, False, False, True, False]
    assert set(optimizer.state) == {weights[1], weights[4]}


def test_groups_have_their_own_channel_dims_or_opt_out_and_those_of_the_caller_are_not_modified(kind):
    together, later, ordinary = make_weights(), make_weights(), make_weights()
    mine = [{"params": together[:1], "channel_dims": None}, {"params": together[1:]}]
    optimizer = make_optimizer(kind, mine, channel_dims=[1])
    assert [set(group) for group in mine] == [{"params", "channel_dims"}, {"params"}]
    take_steps(optimizer, 3)
    optimizer = make_optimizer(kind, later[:1])
    optimizer.add_param_group({"params": later[1:], "channel_dims": [1]})
    take_steps(optimizer, 3)
    assert [group["channel_dims"] for group in optimizer.param_groups] == [None, (1,)]
    take_steps(make_optimizer(kind, [{"params": ordinary[:1]}, {"params": ordinary[1:], "channel_dims": [1]}]), 3)
    assert all_equal(together, later)
    assert all_equal(together, ordinary)


def test_a_parameter_with_late_gradients_counts_its_own_steps(kind):
    weights, alone = make_weights(), make_weights()
    optimizer = make_optimizer(kind, weights, **INVARIANT)
    give_gradients(weights[1:], 100)
    optimizer.step()
    give_gradients(weights[:1], 200)
    optimizer.step()
    single = make_optimizer(kind, alone[:1], **INVARIANT)
    give_gradients(alone[:1], 200)
    single.step()
    torch.testing.assert_close(weights[0], alone[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dims", [None, [0], []], ids=str)
def test_reading_the_state_before_the_first_step_keeps_the_weights(kind, dims):
    model = torch.nn.Linear(3, 4, bias=False)
    before = model.weight.detach().clone()
    get_optimizer_state_dict(model, make_optimizer(kind, model.parameters(), channel_dims=dims))
    assert torch.equal(model.weight, before)


def test_the_state_has_one_number_per_weight_and_one_per_group(kind):
    weights = [torch.randn(6, 3, 3, 3, requires_grad=True) for _ in range(5)]
    dims = [[0], [], [0, 1], [1], None]
    optimizer = make_optimizer(
        kind, [{"params": [weight], "channel_dims": own} for weight, own in zip(weights, dims, strict=True)]
    )
    take_steps(optimizer, 1)
    sizes = [{k: v.numel() for k, v in optimizer.state[weight].items()} for weight in weights]
    if kind is SGDMRT:
        assert sizes == [{"step": 1, "momentum_buffer": 162}] * 5
    else:
        assert sizes == [{"step": 1, "exp_avg": 162, "exp_avg_sq": n} for n in (6, 1, 18, 3, 162)]


def test_a_scheduler_can_cycle_rate_and_momentum(kind):
    weights, others = make_weights(), make_weights()
    optimizer, by_hand = kind(weights, lr=0.1, **INVARIANT), kind(others, lr=0.1, **INVARIANT)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=10, base_momentum=0.0, max_momentum=0.5)
    seen = []
    for step in range(9):
        by_hand.param_groups[0] |= {
            name: optimizer.param_groups[0][name]
            for name in {"lr", "betas", "momentum"} & set(optimizer.param_groups[0])
        }
        take_steps(optimizer, 1, start=step)
        take_steps(by_hand, 1, start=step)
        scheduler.step()
        seen.append(optimizer.param_groups[0].get("momentum", optimizer.param_groups[0].get("betas", [None])[0]))
    assert min(seen) < 0.01 < 0.49 < max(seen)
    assert all_equal(weights, others)


def test_a_copy_takes_the_same_steps(kind):
    model = make_model()
    optimizer = make_optimizer(kind, groups(model), weight_decay=0.1)
    take_steps(optimizer, 2)
    other_model, other = pickle.loads(pickle.dumps(copy.deepcopy((model, optimizer))))
    take_steps(optimizer, 2, start=2)
    take_steps(other, 2, start=2)
    assert all_equal(model.parameters(), other_model.parameters())


ONE_BACKEND = pytest.mark.settings(backend=lambda name: {})
"""By default only `aot_eager`: inductor takes ten seconds a case, and its steps are compared by other tests."""


@OPTIMIZER_FAMILIES
@ONE_BACKEND
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_step_compiled_by_the_user_is_one_graph_for_all_learning_rates(kind, backend):
    weights = [torch.randn(4, 3, 2, requires_grad=True), torch.randn(5, requires_grad=True)]
    others = copies(weights)
    rate = torch.tensor(0.05)
    optimizer, other = (
        make_optimizer(kind, [{"params": [invariant], **INVARIANT}, {"params": [ordinary]}], weight_decay=0.1, lr=rate)
        for invariant, ordinary in (weights, others)
    )
    give_gradients(weights, 0)
    counter = CompileCounterWithBackend(backend)
    step = torch.compile(lambda: optimizer.step(), fullgraph=True, backend=counter)
    for number in range(3):
        give_gradients(others, number)
        for weight, copied in zip(weights, others, strict=True):
            weight.grad.copy_(copied.grad)
        with torch.no_grad():
            step()
        other.step()
        rate.mul_(0.5)
    assert counter.frame_count == 1
    torch.testing.assert_close(weights, others, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=["aot_eager", "inductor"])
def backend(request, monkeypatch):
    """The backend of compiled steps."""
    if request.param == "aot_eager":
        with_inductor = torch.compile
        monkeypatch.setattr(
            torch, "compile", lambda step, options, **other: with_inductor(step, backend="aot_eager", **other)
        )


COMPILED = {
    "defaults": {},
    "L2 and maximize": {"weight_decay": 0.1, "maximize": True},
    "decoupled": DECOUPLED,
    "tensor": {"lr": torch.tensor(0.05)},
    "master": {"low_precision": "master"},
    "stochastic": {"low_precision": "stochastic"},
}


@OPTIMIZER_FAMILIES
@pytest.mark.slow
@pytest.mark.parametrize("options", COMPILED)
def test_the_compiled_update_matches_the_eager_one(kind, options):
    low = "low_precision" in COMPILED[options]
    results = []
    for compiles in (True, False):
        weights = make_weights(dtype=torch.bfloat16 if low else torch.float32)
        groups = [
            {"params": weights[:1], **INVARIANT}, {"params": weights[1:2], "channel_dims": [], "weight_decay": 0.05},
            {"params": weights[2:]},
        ]  # fmt: skip
        optimizer = make_optimizer(kind, groups, compile=compiles, **COMPILED[options])
        take_steps(optimizer, 4)
        results.append([*weights, *(value for state in optimizer.state.values() for value in state.values())])
    torch.testing.assert_close(*results, rtol=1e-2 if low else 1e-6, atol=1e-6)


@OPTIMIZER_FAMILIES
@ONE_BACKEND
@pytest.mark.slow
@pytest.mark.parametrize("decay", [{"weight_decay": 0.1}, DECOUPLED], ids=["L2", "decoupled"])
def test_compiled_steps_match_the_eager_ones_if_gradients_are_missing(kind, decay, backend):
    results = []
    for compiles in (True, False):
        weights = make_weights()
        with torch.no_grad():
            weights[0][1] = 0.0  # a filter without a direction
        optimizer = kind([{"params": weights[:1], **INVARIANT}], lr=0.005, compile=compiles, **decay)
        for step in range(20):
            if step == 1:
                optimizer.add_param_group({"params": weights[1:], **INVARIANT})
            give_gradients(weights, step)
            weights[1 - step % 2].grad = None
            optimizer.step()
        results.append([*weights, *(value for state in optimizer.state.values() for value in state.values())])
    for compiled, eager in zip(*results, strict=True):
        assert (compiled - eager).abs().max() <= 1e-6 * max(1.0, eager.abs().max())


@OPTIMIZER_FAMILIES
@ONE_BACKEND
@pytest.mark.slow
def test_schedules_and_resumed_runs_do_not_compile_again(kind, backend):
    model, other = make_model(), make_model()
    optimizer = make_optimizer(kind, groups(model), compile=True)
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=10, base_momentum=0.5, max_momentum=0.8)
    eager = make_optimizer(kind, groups(other))
    other_schedule = OneCycleLR(eager, max_lr=0.1, total_steps=10, base_momentum=0.5, max_momentum=0.8)
    take_steps(optimizer, 1)
    take_steps(eager, 1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(1, 5):
            optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
            schedule.step()
            other_schedule.step()
            take_steps(optimizer, 1, start=step)
            take_steps(eager, 1, start=step)
    torch.testing.assert_close([*model.parameters()], [*other.parameters()], rtol=1e-5, atol=1e-6)
