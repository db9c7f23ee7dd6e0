import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from steps import make_optimizer, make_weights, take_steps
from torch import Tensor
from torch.optim import Optimizer

from hf_sphere.optim import SGDMRT, AdamG, AdamS, AdamSRT
from hf_sphere.optim.optimizers import optimizer_class, optimizer_names

GOLDEN_CASES = {"adam_s": AdamS, "adam_g": AdamG}
GOLDEN_CASES |= {f"adam_srt{case}": AdamSRT for case in ("", "_nowd", "_layer", "_dims01", "_off")}
GOLDEN_CASES |= {f"sgd_mrt{case}": SGDMRT for case in ("", "_dampening", "_layer", "_off")}
DECAYS = {
    "no decay": {},
    "L2": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "maximize": {"maximize": True},
    "maximize with L2": {"maximize": True, "weight_decay": 0.1},
    "maximize with decoupled decay": {"maximize": True, "weight_decay": 0.1, "decoupled_weight_decay": True},
}
LAYOUTS = {
    "channels last": lambda w: w.contiguous(memory_format=torch.channels_last),
    "transposed": lambda w: w.transpose(0, 1).contiguous().transpose(0, 1),
    "reversed": lambda w: w.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "with gaps": lambda w: torch.stack([w, w], dim=-1)[..., 0],
}
DIMS = [[0], [], [0, 1], [1]]
shapes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(2, 3), st.integers(1, 3))
seeds = st.integers(0, 2**31)


def rule_of(kind: type[Optimizer]) -> Any:
    """The update rule of an optimizer, if its file states it: a function with the name of the file."""
    return getattr(inspect.getmodule(kind), kind.__module__.rpartition(".")[2], None)


RULES = [name for name in optimizer_names() if rule_of(optimizer_class(name))]


def rows(weight: Tensor, dims: list[int]) -> Tensor:
    """The matrix of groups of a weight."""
    shape = (math.prod(weight.shape[dim] for dim in dims), -1)
    return weight.movedim(dims, [*range(len(dims))]).reshape(shape)


def by_the_rule(
    kind: type[Optimizer],
    x: Tensor,
    gradients: Tensor,
    dims: list[int],
    *,
    lr: float,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    **options: Any,
) -> Tensor:
    """Weights after each step of the rule, as matrices of groups, in the dtype of the arguments."""
    x = rows(x, dims)
    m, v, path = torch.zeros_like(x), torch.zeros_like(x[:, :1]), []
    if decoupled_weight_decay:
        options["shrink"] = 1 - lr * weight_decay
    for t, gradient in enumerate(gradients, start=1):
        g = rows(-gradient if maximize else gradient, dims)
        g = g if decoupled_weight_decay else g + weight_decay * x
        x, m, v = rule_of(kind)(x, g, m, v, t, lr, **options)
        path.append(x)
    return torch.stack(path)


def by_the_optimizer(kind: type[Optimizer], x: Tensor, gradients: Tensor, dims: list[int], **options: Any) -> Tensor:
    """Weights after each step of the optimizer, as matrices of groups."""
    return steps_of(kind([x.clone().requires_grad_()], channel_dims=dims, **options), gradients, dims)


def steps_of(optimizer: Optimizer, gradients: Tensor, dims: list[int]) -> Tensor:
    (parameter,), path = optimizer.param_groups[0]["params"], []
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
        path.append(rows(parameter.detach().clone(), dims))
    return torch.stack(path)


def weights_and_gradients(shape: tuple[int, ...], seed: int, steps: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return torch.randn(shape, **options), torch.randn(steps, *shape, **options)


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_every_step_matches_the_golden_step(golden, case):
    values, about = golden("optimizers"), golden("optimizers").cases[case]
    start = {name: values[f"param.{name}"] for name in ("conv", "linear", "bias")}
    start["conv"] = values.get(f"{case}.param.conv", start["conv"])
    parameters = {name: value.clone().requires_grad_() for name, value in start.items()}
    own = {"channel_dims": [0]} if case == "adam_g" else about["conv_group"]
    groups = [{"params": [parameters["conv"]], **own}, {"params": [parameters["linear"], parameters["bias"]]}]
    optimizer = GOLDEN_CASES[case](groups, **about["hyperparameters"])
    for step in range(6):
        for name, parameter in parameters.items():
            parameter.grad = values[f"grad{step}.{name}"]
        optimizer.step()
        for name, parameter in parameters.items():
            expected = values[f"{case}.step{step}.{name}"]
            assert (parameter - expected).abs().max() <= 1e-5 * expected.abs().max(), (step, name)


def test_the_published_optimizers_state_their_rules_and_all_golden_cases_are_tested(golden):
    assert set(golden("optimizers").cases) == set(GOLDEN_CASES)
    assert {"adam_s", "adam_srt", "adam_g", "sgd_mrt"} <= set(RULES)


OPTIONS = {
    **{decay: (RULES, st.just(options)) for decay, options in DECAYS.items()},
    "dampening and momentum": (
        ["sgd_mrt"],
        st.fixed_dictionaries({"dampening": st.floats(0, 1), "momentum": st.floats(0.01, 0.99)}),
    ),
    "betas and eps": (
        [name for name in RULES if name != "sgd_mrt"],
        st.fixed_dictionaries(
            {"betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.9999)), "eps": st.floats(1e-12, 1)}
        ),
    ),
}


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize(("name", "case"), [(name, case) for case, (names, _) in OPTIONS.items() for name in names])
def test_the_fast_step_follows_the_rule(name, case, dims):
    kind = optimizer_class(name)

    @given(shapes, seeds, OPTIONS[case][1])
    def check(shape, seed, options):
        x, gradients = weights_and_gradients(shape, seed)
        paths = [follow(kind, x, gradients, dims, lr=0.05, **options) for follow in (by_the_optimizer, by_the_rule)]
        torch.testing.assert_close(*paths, rtol=1e-8, atol=1e-10)

    check()


@pytest.mark.parametrize(("scaled", "power"), [(AdamS, 1), (AdamSRT, 1), (SGDMRT, 2)])
@pytest.mark.parametrize("scale", [1e-3, 7.0])
def test_directions_are_invariant_to_scale_with_an_adjusted_learning_rate(scaled, power, scale):
    x, gradients = weights_and_gradients((4, 3, 3, 2), seed=3, steps=6)
    eps = {} if scaled is SGDMRT else {"eps": 0.0}
    plain = by_the_optimizer(scaled, x, gradients, [0], lr=0.1, **eps)
    other = by_the_optimizer(scaled, scale * x, gradients / scale, [0], lr=0.1 * scale**power, **eps)
    torch.testing.assert_close(other, scale * plain, rtol=1e-9, atol=0)


@pytest.mark.parametrize("decay", ["no decay", "L2", "decoupled"])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("capturable", [True, False])
def test_the_learning_rate_can_be_a_tensor(kind, decay, shape, capturable):
    weights, others = make_weights(), make_weights()
    rate = torch.full(shape, 0.03)
    optimizer = kind(weights, lr=rate, capturable=capturable, channel_dims=[0], **DECAYS[decay])
    other = kind(others, lr=0.03, channel_dims=[0], **DECAYS[decay])
    for step in range(3):
        take_steps(optimizer, 1, start=step)
        take_steps(other, 1, start=step)
        rate.mul_(0.5)
        other.param_groups[0]["lr"] *= 0.5
    torch.testing.assert_close(weights, others, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"capturable": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("decay", ["no decay", "L2", "decoupled"])
def test_how_a_step_is_computed_does_not_change_it(kind, options, decay):
    weights, others = make_weights(), make_weights()
    take_steps(make_optimizer(kind, weights, channel_dims=[0], **options, **DECAYS[decay]), 5)
    take_steps(make_optimizer(kind, others, channel_dims=[0], **DECAYS[decay]), 5)
    torch.testing.assert_close(weights, others, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("portion", [1, 30, 100, 200])
def test_chunking_does_not_change_the_steps(kind, portion, monkeypatch):
    weights, others = make_weights(), make_weights()
    take_steps(make_optimizer(kind, others, channel_dims=[0]), 5)
    monkeypatch.setattr("hf_sphere.optim.fast_step.CPU_PORTION", portion)
    take_steps(make_optimizer(kind, weights, channel_dims=[0]), 5)
    torch.testing.assert_close(weights, others, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [None, [0], [], [1], [0, 1], [0, 2]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_do_not_depend_on_the_memory_format(kind, layout, dims, dtype):
    values = torch.randn(4, 3, 2, 5).to(dtype)
    contiguous, other = values.clone().requires_grad_(), LAYOUTS[layout](values).detach().requires_grad_()
    assert not other.is_contiguous()
    take_steps(make_optimizer(kind, [contiguous], channel_dims=dims), 3)
    take_steps(make_optimizer(kind, [other], channel_dims=dims), 3)
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(other, contiguous, rtol=bound, atol=bound, check_stride=False)
