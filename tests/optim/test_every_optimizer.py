"""What holds for all optimizers of the library: closures, hooks, gradient scalers and resumed runs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import TOKENS, net, train
from torch import Tensor, nn

from hf_sphere.optim import build_optimizer
from hf_sphere.optim.optimizers import optimizer_class, optimizer_names
from hf_sphere.optim.sphere_optimizer import SphereOptimizer

NAMES = optimizer_names()
COMPILED = [name for name in NAMES if issubclass(optimizer_class(name), SphereOptimizer)]
DECAYS = [(name, options) for name in NAMES for options in ({}, {"weight_decay": 0.1, "foreach": True})]
DECAYS += [(name, {"weight_decay": 0.1, "decoupled_weight_decay": True}) for name in COMPILED]


@pytest.mark.parametrize("name", NAMES)
def test_a_closure_is_called_once_with_gradients_and_its_loss_returned(name):
    model, calls = net(), []
    optimizer, before = build_optimizer(model, name, TOKENS, lr=0.01), copy.deepcopy(model.state_dict())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(TOKENS).square().mean()
        loss.backward()
        calls.append(loss)
        return loss

    with torch.no_grad():
        assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    assert not torch.equal(model.conv.weight, before["conv.weight"])


@pytest.mark.parametrize("name", NAMES)
def test_hooks_are_called_once_per_step_with_all_weights(name):
    model, seen = net(), []
    first = [weight.detach().clone() for weight in model.parameters()]
    for other in (optimizer_class(name), torch.optim.AdamW):  # torch adds hooks to the step of a class once
        other(net().parameters())
    optimizer = build_optimizer(model, name, TOKENS)
    optimizer.register_step_pre_hook(lambda *_: seen.append(all(map(torch.equal, model.parameters(), first))))
    optimizer.register_step_post_hook(lambda *_: seen.append(len(optimizer.param_groups)))
    train(model, optimizer, 1)
    assert seen == [True, len(optimizer.param_groups)]


@pytest.mark.parametrize("options", [{}, {"foreach": False, "fused": False}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_scaled_gradients_with_clipping_and_accumulation_give_the_same_weights(name, options):
    trained = []
    for scaled in (False, True):
        model = net()
        optimizer = build_optimizer(model, name, TOKENS, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scaled)
        for _ in range(5):
            optimizer.zero_grad()
            for part in TOKENS[:4].chunk(2):
                scaler.scale(model(part).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        trained.append(model.state_dict())
    torch.testing.assert_close(trained[0], trained[1], rtol=0, atol=0)


OVERFLOWING = [(name, options) for name in NAMES for options in ({"fused": True}, {"fused": False})]
OVERFLOWING += [(name, {"compile": True}) for name in COMPILED]


@pytest.mark.parametrize(("name", "options"), OVERFLOWING)
def test_a_step_with_overflowing_gradients_is_skipped(name, options):
    model = net()
    optimizer, before = build_optimizer(model, name, TOKENS, **options), copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model.eval()(TOKENS).square().mean()).backward()
    model.conv.weight.grad.fill_(torch.inf)
    scaler.step(optimizer)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert name not in COMPILED or not optimizer.state


@pytest.mark.parametrize(("name", "options"), DECAYS)
def test_a_run_resumed_from_a_file_equals_the_uninterrupted_one(name, options, tmp_path: Path):
    whole, model, resumed = net(), net(), net(1)
    train(whole, build_optimizer(whole, name, TOKENS, **options), 6)
    optimizer = build_optimizer(model, name, TOKENS, **options)
    train(model, optimizer, 3)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state")
    optimizer: Any = build_optimizer(resumed, name, TOKENS)
    weights, state = torch.load(tmp_path / "state", weights_only=True)
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train(resumed, optimizer, 3)
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
