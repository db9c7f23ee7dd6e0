import pytest
import torch
from steps import make_optimizer, take_steps
from torch import Tensor, nn
from torch.optim import SGD, Adam

from hf_sphere.optim import SGDMRT
from hf_sphere.optim.optimizers import optimizer_class, optimizer_names

NAN, INF = float("nan"), float("inf")

BAD = [
    ({"low_precision": "up"}, "low_precision must be one of nearest, stochastic, master; got 'up'"),
    ({"channel_dims": [2]}, r"channel_dims must be axes of .*, of shape \[3, 4\], such as \[0\]; got \[2\]"),
    ({"channel_dims": [-1]}, r"got \[-1\]"),
    ({"channel_dims": [1, 0, 1]}, r"got \[1, 0, 1\]"),
    ({"channel_dims": [0.0]}, r"got \[0\.0\]"),
    ({"differentiable": True}, "does not support differentiable; omit it"),
    ({"lr": -0.1}, r"lr must be a number in \[0, inf\); got -0.1"),
    ({"weight_decay": NAN}, "weight_decay must be a number"),
    ({"betas": (2.0, 0.9)}, r"betas must be a number in \[0, 1\); got 2.0"),
    ({"lr": 0.5, "weight_decay": 2.0, "decoupled_weight_decay": True}, "would remove the weights in one step"),
]


def weight(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device, requires_grad=dtype.is_floating_point)


def of_torch(kind: type) -> type:
    return SGD if kind is SGDMRT else Adam


@pytest.mark.parametrize(("options", "message"), BAD, ids=str)
def test_bad_options_are_refused_by_constructor_and_group(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind([weight(3, 4)], **options)
    optimizer = kind([weight(3, 4)])
    before = repr(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [late := weight(3, 4)], **options})
    assert repr(optimizer.state_dict()) == before
    optimizer.add_param_group({"params": [late]})  # is in no group yet


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda kind: kind([torch.ones(3, 4, dtype=torch.int64)]),
            "parameter 0 is torch.int64; .* requires real float",
        ),
        (
            lambda kind: kind([weight(3, 4, dtype=torch.float16)], low_precision="stochastic"),
            "parameter 0 is float16; stochastic rounding is for bfloat16: use low_precision='master'",
        ),
        (
            lambda kind: kind([weight(3, 4)]).load_state_dict(kind([weight(3, 4), weight(2, 2)]).state_dict()),
            "parameter group",
        ),
        (
            lambda kind: kind([weight(2, 2)], channel_dims=[0]).load_state_dict(kind([weight(2, 2)]).state_dict()),
            r"channel_dims of parameter group 0 is None in the state and \[0\]",
        ),
    ],
)
def test_tensors_and_states_that_do_not_fit_are_refused(kind, call, message):
    with pytest.raises(ValueError, match=message):
        call(kind)


@pytest.mark.parametrize("dims", [[0], [1], [0, 1]], ids=str)
def test_a_weight_flattened_after_construction_is_rejected(kind, dims):
    flat = weight(3, 4, 2)
    optimizer = make_optimizer(kind, [flat], channel_dims=dims)
    flat.data = flat.data.flatten()
    flat.grad = torch.ones(24)
    with pytest.raises(RuntimeError, match=r"channel_dims .* a parameter that is now 1-dimensional: it was flattened"):
        optimizer.step()


@pytest.mark.parametrize("dims", [None, [0]], ids=str)
def test_a_fused_step_on_an_unsupported_device_is_an_error_as_in_torch(kind, dims):
    parameter = weight(3, 4, device="meta")
    for optimizer in (of_torch(kind)([parameter], fused=True), kind([parameter], fused=True, channel_dims=dims)):
        parameter.grad = torch.zeros_like(parameter)
        with pytest.raises(RuntimeError, match=r"`fused=True` requires all the params to be .* and meta"):
            optimizer.step()


@pytest.mark.parametrize("zeros", [([0], (1,)), ([1], (slice(None), 2)), ([], (...,))], ids=str)
@pytest.mark.parametrize("decay", [{}, {"weight_decay": 0.1}, {"maximize": True}], ids=str)
def test_zero_groups_do_not_move(kind, zeros, decay):
    (dims, place), start = zeros, torch.randn(4, 3, 2)
    start[place] = 0.0
    mine = start.clone().requires_grad_()
    take_steps(make_optimizer(kind, [mine], channel_dims=dims, **decay), 5)
    assert mine.isfinite().all()
    assert torch.equal(mine == 0, start == 0)


def test_a_zero_group_does_not_affect_other_groups(kind):
    start, gradients = torch.randn(4, 3, 2), torch.randn(5, 4, 3, 2)
    start[1] = 0
    together, alone = start.clone().requires_grad_(), start[[0, 2, 3]].requires_grad_()
    optimizer, other = (make_optimizer(kind, [own], channel_dims=[0]) for own in (together, alone))
    for gradient in gradients:
        together.grad, alone.grad = gradient, gradient[[0, 2, 3]]
        optimizer.step()
        other.step()
    torch.testing.assert_close(together[[0, 2, 3]], alone, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"low_precision": "master"}], ids=str)
def test_a_non_finite_gradient_reaches_its_weight_as_in_torch_and_only_its_group(kind, value, options):
    start, gradients, rows = torch.randn(4, 3), torch.randn(3, 4, 3), [0, 1, 3]
    mine, torchs, clean = (start.clone().requires_grad_() for _ in range(3))
    optimizers = [make_optimizer(kind, [own], channel_dims=[0], **options) for own in (mine, clean)]
    optimizers.append(of_torch(kind)([torchs], lr=0.1))
    for gradient in gradients:
        mine.grad, torchs.grad, clean.grad = gradient.clone(), gradient.clone(), gradient
        mine.grad[2, 1] = torchs.grad[2, 1] = value
        for optimizer in optimizers:
            optimizer.step()
        assert not torchs[2, 1].isfinite()
        assert not mine[2, 1].isfinite()
    torch.testing.assert_close(mine[rows], clean[rows], rtol=0, atol=0)


@pytest.mark.parametrize("name", optimizer_names())
def test_a_group_without_names_is_refused_by_an_optimizer_with_names(name):
    layer = nn.Linear(3, 4)
    optimizer = optimizer_class(name)([("old", weight(3, 4))])
    with pytest.raises(ValueError, match="names"):
        optimizer.add_param_group({"params": layer.parameters()})
    matrix = (
        {"channel_dims": [0]} if optimizer.group_key == "channel_dims" else {optimizer.group_key: True, "muon": True}
    )
    optimizer.add_param_group({"params": [("weight", layer.weight)], **matrix})
    optimizer.add_param_group({"params": [("bias", layer.bias)]})
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    layer(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


@pytest.mark.parametrize("name", optimizer_names())
def test_missing_groups_are_logged_by_every_optimizer(name, caplog):
    optimizer = optimizer_class(name)([weight(3, 4)], lr=1e-3)
    assert f"{type(optimizer).__name__} was given parameters without its groups, so every step is an" in caplog.text
