"""What a step of an optimizer would launch on a GPU."""

import pytest
import timm
import torch
from torch.optim import AdamW

from hf_sphere.optim import SGDMRT, AdamG, AdamS, AdamSRT

OPTIMIZERS = [AdamS, AdamSRT, AdamG, SGDMRT]


def groups_of_resnet50(invariant, device):
    """Its 161 tensors: kernels, the output layer, and norms and biases without weight decay."""
    shapes = [weight.shape for weight in timm.create_model("resnet50").parameters()]
    weights = [torch.randn(shape).to(device).requires_grad_() for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn(weight.shape).to(device)
    kernels, matrices, vectors = ([w for w in weights if w.ndim == ndim] for ndim in (4, 2, 1))
    own = {"channel_dims": [0]} if invariant else {}
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


def step_on(device, kind, weights, gradients, **options):
    """Return weights and states after three steps on a device."""
    weights = [weight.clone().to(device).requires_grad_() for weight in weights]
    optimizer = kind([{"params": weights, "channel_dims": [0]}], lr=0.05, **options)
    for factor in (1.0, -0.5, 2.0):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = (factor * gradient).to(device, weight.dtype)
        optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().cpu() for tensor in (*weights, *states)]


CASES = {
    "defaults": {},
    "L2 and maximize": {"weight_decay": 0.1, "maximize": True},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "tensor by tensor": {"foreach": False},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("portion", [60, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_on_a_device_equal_those_on_the_cpu(kind, dtype, portion, case, pretend, monkeypatch):
    monkeypatch.setattr("hf_sphere.optim.fast_step.DEVICE_PORTION", portion)
    torch.manual_seed(0)
    shapes = [(6, 3, 3), (5, 7), (4, 1, 2), (1, 9), (3, 40)]
    weights, gradients = ([torch.randn(shape).to(dtype) for shape in shapes] for _ in range(2))
    weights[1][2] = 0.0  # a group without a direction
    on_device, on_cpu = (step_on(device, kind, weights, gradients, **CASES[case]) for device in (pretend.NAME, "cpu"))
    bound = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(on_device, on_cpu, rtol=bound, atol=bound)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_changes_the_same_weights_as_on_the_cpu(kind, value, pretend):
    torch.manual_seed(0)
    weights, gradients = ([torch.randn(shape) for shape in [(6, 3, 3), (5, 7)]] for _ in range(2))
    gradients[0][2, 1, 1] = value
    on_device, on_cpu = (step_on(device, kind, weights, gradients) for device in (pretend.NAME, "cpu"))
    assert [tensor.isfinite().tolist() for tensor in on_device] == [tensor.isfinite().tolist() for tensor in on_cpu]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_temporary_tensors_on_a_device_have_at_most_the_size_of_a_portion(kind, pretend, monkeypatch):
    monkeypatch.setattr("hf_sphere.optim.fast_step.DEVICE_PORTION", 100)
    weights = [torch.randn(30, 9)] + [torch.randn(8, 9) for _ in range(9)]
    with pretend.recorded_kernels() as kernels:
        step_on(pretend.NAME, kind, weights, weights, weight_decay=0.1)
    sizes = [torch.Size(shape).numel() for kernel in kernels if "optim" in kernel.line for shape in kernel.shapes]
    ours = [size for size in sizes if size not in (270, 72)]  # the sizes of the weights
    assert max(ours) <= 100
