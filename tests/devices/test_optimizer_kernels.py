"""What a step of an optimizer would launch on a GPU."""

import pytest
import timm
import torch
from torch.optim import AdamW

from hf_sphere.optim import SGDMRT, AdamG, AdamS, AdamSRT

OPTIMIZERS = [AdamS, AdamSRT, AdamG, SGDMRT]


def groups_of_resnet50(radial, device):
    """Its 161 tensors: kernels, the output layer, and norms and biases without weight decay."""
    shapes = [weight.shape for weight in timm.create_model("resnet50").parameters()]
    weights = [torch.randn(shape).to(device).requires_grad_() for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn(weight.shape).to(device)
    kernels, matrices, vectors = ([w for w in weights if w.ndim == ndim] for ndim in (4, 2, 1))
    own = {"channel_dims": [0]} if radial else {}
    return [{"params": kernels, **own}, {"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def kernels_per_step(pretend, optimizer):
    optimizer.step()
    pretend.reset()
    optimizer.step()
    return pretend.kernels()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_on_resnet50_has_at_most_three_times_the_kernels_of_foreach_adamw(kind, pretend):
    adamw = AdamW(groups_of_resnet50(False, pretend.NAME), weight_decay=1e-4, foreach=True)
    ours = kind(groups_of_resnet50(True, pretend.NAME), weight_decay=1e-4, foreach=True)
    assert kernels_per_step(pretend, ours) <= 3 * kernels_per_step(pretend, adamw)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_capturable_steps_launch_the_same_kernels_and_read_nothing(kind, pretend):
    weights = [torch.randn(shape).to(pretend.NAME).requires_grad_() for shape in [(6, 3, 3, 3), (5, 7), (8,)]]
    for weight in weights:
        weight.grad = torch.randn(weight.shape).to(pretend.NAME)
    groups = [{"params": weights[:2], "channel_dims": [0]}, {"params": weights[2:]}]
    optimizer = kind(groups, lr=torch.tensor(0.1).to(pretend.NAME), weight_decay=0.1, capturable=True)
    optimizer.step()  # creates the state
    sequences = []
    with pretend.capturable():
        for _ in range(2):
            with pretend.recorded_kernels() as kernels:
                optimizer.step()
            sequences.append([kernel.name for kernel in kernels])
    assert sequences[0] == sequences[1]
