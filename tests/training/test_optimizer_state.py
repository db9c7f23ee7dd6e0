"""Optimizer states that do not fit the parameters, which crash torch's fused kernels, are refused before any step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from hf_sphere.optim import AdamSRT
from hf_sphere.training import CheckpointError, RunState
from hf_sphere.training.checkpoints import load_checkpoint, save_checkpoint
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
def accelerator(request, make_model) -> Accelerator:
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


def momentum(state: dict[str, Any]) -> str:
    return "exp_avg" if "exp_avg" in state else "momentum_buffer"


def second_moment(state: dict[str, Any]) -> str:
    return "exp_avg_sq" if "exp_avg_sq" in state else "momentum_buffer"


def replace(key: Callable[[dict[str, Any]], str], change: Callable[[torch.Tensor], Any]) -> Edit:
    def edit(state: dict[str, Any]) -> None:
        state[key(state)] = change(state[key(state)])

    return edit


BAD_TENSORS = {
    "shorter": lambda tensor: tensor[:1].clone(),
    "longer": lambda tensor: torch.cat([tensor, tensor]),
    "flat": lambda tensor: tensor.flatten(),
    "scalar": lambda tensor: torch.tensor(0.0),
    "empty": lambda tensor: tensor[:0],
    "half": lambda tensor: tensor.half(),
    "double": lambda tensor: tensor.double(),
    "integer": lambda tensor: tensor.long(),
}


def test_a_tensor_that_does_not_fit_is_refused_with_its_parameter(load_edited, accelerator, tmp_path):
    first = next(iter(accelerator._optimizers[0].optimizer.state.values()))
    changes = [(key, change) for key in {momentum(first), second_moment(first)} for change in BAD_TENSORS.values()]
    if "step" in first:
        changes += [
            ("step", lambda _, value=value: value) for value in (torch.zeros(0), torch.zeros(5), torch.tensor(1), 1.0)
        ]
    for name, change in changes:
        with pytest.raises(CheckpointError, match=rf"{name} of hidden\.weight in the optimizer state is"):
            load_edited(replace(lambda state, name=name: name, change))
    with pytest.raises(CheckpointError, match=r"of hidden\.weight in the optimizer state is no tensor but 0\.5"):
        load_edited(replace(momentum, lambda tensor: 0.5))
    with pytest.raises(CheckpointError) as failure:
        load_edited(replace(momentum, lambda tensor: tensor[:3]))
    assert f"cannot resume from {tmp_path / 'checkpoint-1'}: " in str(failure.value)
    assert "torch.float32 of shape [3, 36], which does not fit the parameter: torch.float32 of shape [16, 36]" in str(
        failure.value
    )


def test_a_tensor_of_fewer_values_than_its_shape_is_copied(load_edited, accelerator):
    """An expanded tensor has the right shape, but kernels write beyond its memory."""
    load_edited(replace(momentum, lambda tensor: torch.zeros(1).expand(tensor.shape)))
    (optimizer,) = accelerator._optimizers
    parameter, state = next(iter(optimizer.optimizer.state.items()))
    assert state[momentum(state)].stride() == parameter.stride()


def test_an_unchanged_state_is_loaded(load_edited, accelerator):
    (optimizer,) = accelerator._optimizers
    before = [value.clone() for state in optimizer.optimizer.state.values() for value in state.values()]
    load_edited(lambda state: None)
    after = [value for state in optimizer.optimizer.state.values() for value in state.values()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert not optimizer.optimizer._optimizer_load_state_dict_pre_hooks
