import copy
import math

import pytest
import torch
from steps import make_optimizer, take_steps

from hf_sphere.optim.layout import round_stochastically

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

every_dims = pytest.mark.parametrize("dims", [None, [0], []], ids=str)


@pytest.mark.parametrize("dims", [[0], []], ids=str)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_scale_invariant_weights_are_computed_in_float32_and_rounded_once(kind, dims, dtype):
    low = torch.randn(5, 7).to(dtype).requires_grad_()
    whole = low.detach().float().requires_grad_()
    low.grad = torch.randn(5, 7).to(dtype)
    whole.grad = low.grad.float()
    for weight in (low, whole):
        make_optimizer(kind, [weight], channel_dims=dims, weight_decay=0.1).step()
    assert torch.equal(low, whole.to(dtype))


@every_dims
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_a_saved_state_resumes_bit_for_bit(kind, dims, dtype):
    weight = torch.randn(5, 7).to(dtype).requires_grad_()
    optimizer = make_optimizer(kind, [weight], channel_dims=dims)
    take_steps(optimizer, 3)
    other = weight.detach().clone().requires_grad_()
    resumed = make_optimizer(kind, [other], channel_dims=dims)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take_steps(optimizer, 3, start=3)
    take_steps(resumed, 3, start=3)
    assert torch.equal(other, weight)
    for key, value in optimizer.state[weight].items():
        assert resumed.state[other][key].dtype == value.dtype
        assert torch.equal(resumed.state[other][key], value)


@pytest.mark.parametrize(
    ("saved", "loaded", "whole"),
    [
        (FLOAT64, FLOAT32, FLOAT32),
        (FLOAT32, FLOAT64, FLOAT64),
        (FLOAT32, BFLOAT16, FLOAT32),
        (BFLOAT16, BFLOAT16, FLOAT32),
        (BFLOAT16, FLOAT32, FLOAT32),
    ],
)
def test_a_state_loads_into_a_model_of_another_dtype(kind, saved, loaded, whole):
    weight, other = (torch.ones(5, 7, dtype=dtype, requires_grad=True) for dtype in (saved, loaded))
    optimizer, resumed = (make_optimizer(kind, [own], channel_dims=[0]) for own in (weight, other))
    take_steps(optimizer, 2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for key, value in optimizer.state[weight].items():
        dtype = {"exp_avg_sq": whole, "step": FLOAT32}.get(key, loaded)
        assert resumed.state[other][key].dtype == dtype, key
        assert torch.equal(resumed.state[other][key], value.to(dtype)), key


@every_dims
def test_a_group_can_contain_several_dtypes(kind, dims):
    low, single, double = weights = [
        torch.ones(5, 7, dtype=t, requires_grad=True) for t in (BFLOAT16, FLOAT32, FLOAT64)
    ]
    optimizer = make_optimizer(kind, weights, channel_dims=dims)
    gradient = torch.randn(5, 7).bfloat16()
    for _ in range(3):
        for weight in weights:
            weight.grad = gradient.to(weight.dtype)
        optimizer.step()
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(low.double(), double, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("value", [1.001, -3.3, 0.1, -1e-30, 7e30])
def test_stochastic_rounding_is_unbiased(value):
    count = 200_000
    exact = torch.full((count,), value)
    rounded = round_stochastically(exact, torch.Generator().manual_seed(0)).double()
    spacing = 2.0 ** (math.floor(math.log2(abs(value))) - 7)
    error = (rounded.mean() - exact[0].double()) / spacing
    assert rounded.unique().numel() == 2
    assert abs(error) < 4 * 0.5 / count**0.5


def test_rounding_in_any_memory_format_returns_one_of_the_two_neighbors_and_representable_numbers_unchanged():
    for values in (torch.randn(10_000), torch.randn(30, 20).t()):
        rounded = round_stochastically(values, torch.Generator().manual_seed(0)).float()
        spacing = 2.0 ** (values.abs().log2().floor() - 7)
        assert rounded.shape == values.shape
        assert ((rounded - values).abs() < spacing).all()
    values = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-120, 3.0e38]).bfloat16()
    assert torch.equal(round_stochastically(values.float().repeat(100)), values.repeat(100))


def test_infinity_and_nan_are_unchanged():
    not_numbers = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor([torch.inf, -torch.inf, torch.nan]), not_numbers]).repeat(1000)
    torch.testing.assert_close(round_stochastically(values), values.bfloat16(), equal_nan=True, rtol=0, atol=0)
