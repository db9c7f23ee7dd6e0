import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import assume, given, strategies as st
from steps import make_model, take_steps
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hf_sphere.optim import (
    SGDMRT,
    AdamG,
    AdamS,
    AdamSRT,
    as_metrics,
    effective_step,
    parameter_groups,
    scale_invariant_groups,
    step_diagnostics,
)

QUANTITIES = {"effective_learning_rate", "effective_direction_norm", "step_angle", "weight_norm", "anisotropy"}
DIMS = {"0.weight": (0,), "3.weight": (0,)}


def angles(before: Tensor, after: Tensor) -> Tensor:
    """Angles between the rows of two matrices, from 0 to pi, without cancellation."""
    first, second = (nn.functional.normalize(matrix.double(), dim=1) for matrix in (before, after))
    return 2 * torch.atan2((first - second).norm(dim=1), (first + second).norm(dim=1))


def test_an_optimizer_wrapped_by_accelerate_has_the_same_diagnostics():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    optimizer = AdamG(scale_invariant_groups(model, torch.randn(2, 3, 4, 4)), lr=1e-2)
    model(torch.randn(8, 3, 4, 4)).square().mean().backward()
    optimizer.step()
    wrapped = Accelerator(cpu=True).prepare_optimizer(optimizer)
    assert wrapped is not optimizer
    assert step_diagnostics(wrapped) == step_diagnostics(optimizer)


# The step on the sphere, compared with its definition

steps = st.fixed_dictionaries(
    {
        "shape": st.tuples(st.integers(1, 5), st.integers(2, 40)),
        "whole": st.booleans(),
        "rate": st.floats(1e-5, 0.3),
        "size": st.floats(1e-3, 1e3),
        "seed": st.integers(0, 2**16),
    }
)


def drawn(step: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, float]:
    """Weights, momentum, denominator, learning rate."""
    generator = torch.Generator().manual_seed(step["seed"])
    rows, columns = step["shape"]
    weight, momentum = (torch.randn(rows, columns, generator=generator, dtype=torch.float64) for _ in range(2))
    denominator = 0.1 + torch.rand(rows, 1 if step["whole"] else columns, generator=generator, dtype=torch.float64)
    return step["size"] * weight, momentum, denominator, step["size"] * step["rate"]


@given(steps)
def test_the_direction_is_tangent_to_the_sphere_and_reproduces_the_step_with_the_effective_rate(step):
    weight, momentum, denominator, lr = drawn(step)
    after, found = weight - lr * momentum / denominator, effective_step(weight, momentum, denominator, lr)
    along = (found.direction * weight).sum(1) / weight.norm(dim=1)
    bound = 1e-12 * (found.direction.norm(dim=1) + (weight.norm(dim=1) * momentum.norm(dim=1)) / 0.1)
    assert (along.abs() <= bound).all()
    turned = angles(weight, after)
    assume(turned.max() < 0.49 * math.pi)
    torch.testing.assert_close(found.angle, turned, rtol=1e-9, atol=1e-12)
    there = nn.functional.normalize(weight, dim=1) - found.learning_rate.unsqueeze(1) * found.direction
    expected = nn.functional.normalize(after, dim=1)
    torch.testing.assert_close(nn.functional.normalize(there, dim=1), expected, rtol=0, atol=1e-9)


def test_the_anisotropy_is_the_coefficient_of_variation_and_zero_with_one_denominator_per_group():
    step = effective_step(torch.randn(2, 4), torch.randn(2, 4), torch.tensor([[1.0, 3.0] * 2, [2.0, 2.0] * 2]), 0.1)
    torch.testing.assert_close(step.anisotropy, torch.tensor([0.5, 0.0]))
    step = effective_step(torch.randn(4, 9), torch.randn(4, 9), 0.3 + torch.rand(4, 1), 0.1)
    torch.testing.assert_close(step.anisotropy, torch.zeros(4), rtol=0, atol=1e-6)


def test_a_reversing_step_turns_by_more_than_a_right_angle_and_a_zero_group_has_finite_diagnostics():
    step = effective_step(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 1.0]]), torch.ones(1, 1), 1.0)
    assert step.angle.item() == pytest.approx(0.75 * math.pi)  # the weights become (-1, -1)
    step = effective_step(torch.zeros(1, 3), torch.zeros(1, 3), torch.ones(1, 1), 0.1)
    assert all(torch.isfinite(value).all() for value in (step.angle, step.direction, step.weight_norm, step.anisotropy))


# Optimizers

KINDS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "AdamS": (AdamS, {"lr": 1e-2}),
    "AdamSRT": (AdamSRT, {"lr": 1e-2}),
    "AdamG": (AdamG, {"lr": 1e-2}),
    "SGDMRT": (SGDMRT, {"lr": 1e-1}),
    "Adam": (Adam, {"lr": 1e-2}),
    "AdamW": (AdamW, {"lr": 1e-2, "weight_decay": 0.0}),
    "SGD": (SGD, {"lr": 1e-1, "momentum": 0.9}),
}
OURS = [name for name, (kind, _) in KINDS.items() if kind.__module__.startswith("hf_sphere")]


def stepped(name: str, model: nn.Module, count: int = 3, **more: Any) -> Optimizer:
    kind, options = KINDS[name]
    optimizer = kind(parameter_groups(model, DIMS if name in OURS else None), **options | more)
    take_steps(optimizer, count)
    return optimizer


def scale_for_a_zero_gradient(optimizer: Optimizer, step: int) -> float:
    """Learning-rate factor that makes a zero-gradient step equal to the step determined by the current state."""
    group = optimizer.param_groups[0]
    if "betas" not in group:
        return 1 / group["momentum"]
    beta1, beta2 = group["betas"]
    first = beta1 * (1 - beta1**step) / (1 - beta1 ** (step + 1))
    second = beta2 * (1 - beta2**step) / (1 - beta2 ** (step + 1))
    return second**0.5 / first


@pytest.mark.parametrize("name", KINDS)
def test_the_angle_matches_the_rotation_by_the_optimizer(name):
    model = make_model(dtype=torch.float64)
    optimizer = stepped(name, model)
    measured = step_diagnostics(optimizer, DIMS)
    before = {name: dict(model.named_parameters())[name].detach().flatten(1).clone() for name in DIMS}
    for group in optimizer.param_groups:
        group["lr"] *= scale_for_a_zero_gradient(optimizer, 3)
        for parameter in group["params"]:
            parameter.grad.zero_()
    optimizer.step()
    for name, old in before.items():
        turned = angles(old, dict(model.named_parameters())[name].detach().flatten(1)).mean().item()
        assert measured[name]["step_angle"] == pytest.approx(turned, rel=1e-6)


@pytest.mark.parametrize("name", ["SGD", "SGDMRT"])
def test_without_momentum_the_angle_is_that_of_a_repeated_step(name):
    model = make_model(dtype=torch.float64)
    optimizer = stepped(name, model, momentum=0.0)
    measured = step_diagnostics(optimizer, DIMS)
    before = model[0].weight.detach().flatten(1).clone()
    optimizer.step()
    turned = angles(before, model[0].weight.detach().flatten(1)).mean().item()
    assert measured["0.weight"]["step_angle"] == pytest.approx(turned, rel=1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_diagnostics_are_means_over_the_groups_of_each_weight_and_have_no_side_effects(name):
    model = make_model()
    optimizer = stepped(name, model)
    groups = str(optimizer.param_groups)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    measured = step_diagnostics(optimizer, DIMS)
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()["state"]), before, rtol=0, atol=0)
    assert str(optimizer.param_groups) == groups
    assert measured.keys() == DIMS.keys()
    assert all(values.keys() == QUANTITIES for values in measured.values())
    for weight, values in measured.items():
        norms = dict(model.named_parameters())[weight].flatten(1).norm(dim=1)
        assert values["weight_norm"] == pytest.approx(norms.mean().item())
    # Only second moments of elements differ within a group.
    assert (measured["3.weight"]["anisotropy"] > 0.01) == (name in ("Adam", "AdamW"))
    if name in OURS:
        assert step_diagnostics(optimizer) == measured


def test_without_a_step_or_named_weights_there_are_no_diagnostics():
    assert step_diagnostics(stepped("AdamSRT", make_model(), count=0)) == {}
    assert step_diagnostics(stepped("Adam", make_model())) == {}


# Logging


def test_metrics_are_named_by_quantity_and_layer():
    measured = {"a.weight": {"step_angle": 1.0, "weight_norm": 2.0}, "b.c": {"step_angle": 3.0, "weight_norm": 6.0}}
    expected = {"step_angle": 2.0, "step_angle/a": 1.0, "step_angle/b.c": 3.0}
    expected |= {"weight_norm": 4.0, "weight_norm/a": 2.0, "weight_norm/b.c": 6.0}
    assert as_metrics(measured) == {f"scale_invariant/{name}": value for name, value in expected.items()}
    assert as_metrics({}) == {}
