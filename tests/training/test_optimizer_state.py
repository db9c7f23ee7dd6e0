"""Optimizer states that do not fit the parameters, which crash torch's fused kernels, are refused before any step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from small_runs import make_model

from hf_sphere.optim import AdamSRT
from hf_sphere.training import CheckpointError, RunState
from hf_sphere.training.checkpoints import load_checkpoint, save_checkpoint
from hf_sphere.training.optimization import check_state
from hf_sphere.utils.files import write_manifest

Edit = Callable[[dict[str, Any]], None]
Check = Callable[[Edit], None]


def make_optimizer(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "adam_srt":  # the rows of the hidden weight are groups, with one second moment each
        groups = [{"params": [("hidden.weight", model.hidden.weight)], "channel_dims": [0]}]
        groups += [{"params": [("out.weight", model.out.weight)], "channel_dims": None}]
        return AdamSRT(groups, fused=True)
    kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    options = {"momentum": 0.9} if kind == "sgd" else {}
    return kinds[kind](model.named_parameters(), lr=0.1, fused=True, **options)


@pytest.fixture(params=["adam", "sgd", "adam_srt"])
def accelerator(request) -> Accelerator:
    """An accelerator with a model and an optimizer that has taken a step."""
    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, make_optimizer(request.param, model))
    images, labels = torch.rand(4, 1, 6, 6), torch.tensor([0, 1, 2, 0])
    model(pixel_values=images, labels=labels).loss.backward()
    optimizer.step()
    return accelerator


@pytest.fixture
def load_edited(accelerator, tmp_path) -> Check:
    """Load a checkpoint after an edit of the state of its first parameter; the manifest fits the edited file."""

    def load(edit: Edit) -> None:
        checkpoint = save_checkpoint(accelerator, tmp_path, RunState(step=1), keep=1)
        saved = torch.load(checkpoint / "optimizer.bin", weights_only=True)
        edit(saved["state"][0])
        torch.save(saved, checkpoint / "optimizer.bin")
        write_manifest(checkpoint)
        load_checkpoint(accelerator, checkpoint)

    return load


def replace(change: Callable[[torch.Tensor], Any]) -> Edit:
    """Change the second moment, or else the momentum."""

    def edit(state: dict[str, Any]) -> None:
        key = "exp_avg_sq" if "exp_avg_sq" in state else "momentum_buffer"
        state[key] = change(state[key])

    return edit


BAD_TENSORS = {
    "shorter": lambda tensor: tensor[:1].clone(),
    "longer": lambda tensor: torch.cat([tensor, tensor]),
    "flat": lambda tensor: tensor.flatten().repeat(2),
    "scalar": lambda tensor: torch.tensor(0.0),
    "half": lambda tensor: tensor.half(),
    "integer": lambda tensor: tensor.long(),
}


def test_a_tensor_that_does_not_fit_is_refused(load_edited, tmp_path):
    for change in BAD_TENSORS.values():
        with pytest.raises(CheckpointError, match=r"checkpoint-1: \w+ in the optimizer state is .* expected"):
            load_edited(replace(change))


def test_a_state_of_another_memory_layout_is_used_by_position():
    parameter = torch.nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=1.0, fused=True)
    optimizer.register_load_state_dict_pre_hook(check_state)
    momentum = torch.arange(24.0).view(2, 3, 2, 2)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"momentum_buffer": momentum}}})
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), -momentum)


def test_an_unchanged_state_is_loaded(load_edited, accelerator):
    (optimizer,) = accelerator._optimizers
    before = [value.clone() for state in optimizer.optimizer.state.values() for value in state.values()]
    load_edited(lambda state: None)
    after = [value for state in optimizer.optimizer.state.values() for value in state.values()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert not optimizer.optimizer._optimizer_load_state_dict_pre_hooks
