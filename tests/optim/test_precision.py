import copy
import math

import pytest
import torch
from steps import make_optimizer, take_steps
from torch import Tensor
from torch.optim import Optimizer

from hf_sphere.optim import SGDMRT, AdamG
from hf_sphere.optim.layout import round_stochastically

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MODES = [*((mode, BFLOAT16) for mode in ("nearest", "stochastic", "master")), ("nearest", FLOAT16), ("master", FLOAT16)]

every_dims = pytest.mark.parametrize("dims", [None, [0], []], ids=str)
every_mode = pytest.mark.parametrize(("mode", "dtype"), MODES, ids=str)


def signs(seed: int) -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)).sign()


def run(
    kind: type[Optimizer], dtype: torch.dtype, dims: list[int] | None, *, mode: str = "nearest", relative: float = 5e-4
) -> tuple[Tensor, Tensor, Optimizer]:
    """Take twenty steps of about the same relative size for every weight; return the weights before and after."""
    norm_one = 1 / (32 if dims == [] else 8)
    weight = (norm_one * signs(0)).to(dtype).requires_grad_()
    before = weight.detach().clone()
    rate = relative * (1.0 if kind is AdamG and dims is not None else norm_one) * (0.1 if kind is SGDMRT else 1.0)
    optimizer = kind([weight], lr=rate, channel_dims=dims, low_precision=mode)
    weight.grad = signs(1).to(dtype)
    for _ in range(20):
        optimizer.step()
    return before, weight.detach(), optimizer


@every_dims
@pytest.mark.parametrize(("dtype", "relative"), [(BFLOAT16, 5e-4), (FLOAT16, 5e-5)])
def test_rounding_to_nearest_loses_small_steps(kind, dims, dtype, relative):
    before, after, _ = run(kind, dtype, dims, relative=relative)
    assert torch.equal(after, before)


@every_dims
def test_stochastic_rounding_keeps_small_steps_on_average(kind, dims):
    before, after, _ = run(kind, FLOAT32, dims)
    other_before, other, optimizer = run(kind, BFLOAT16, dims, mode="stochastic")
    exact, rounded = after - before, other.float() - other_before.float()
    assert (exact / before).abs().max() > 5e-3
    assert ((exact * rounded).sum() / exact.square().sum()).item() == pytest.approx(1.0, abs=0.1)
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {FLOAT32}


@every_dims
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_a_master_copy_matches_the_float32_run(kind, dims, dtype):
    _, after, _ = run(kind, FLOAT32, dims)
    _, other, optimizer = run(kind, dtype, dims, mode="master")
    (state,) = optimizer.state.values()
    assert torch.equal(state["master"], after)
    assert {value.dtype for value in state.values()} == {FLOAT32}
    assert torch.equal(other, after.to(dtype))


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
@every_mode
def test_a_saved_state_resumes_bit_for_bit(kind, dims, mode, dtype):
    weight = torch.randn(5, 7).to(dtype).requires_grad_()
    optimizer = make_optimizer(kind, [weight], channel_dims=dims, low_precision=mode)
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


@every_dims
def test_stochastic_rounding_neither_depends_on_the_global_seed_nor_changes_it(kind, dims):
    first = run(kind, BFLOAT16, dims, mode="stochastic")[1]
    torch.manual_seed(123)
    before = torch.get_rng_state()
    assert torch.equal(run(kind, BFLOAT16, dims, mode="stochastic")[1], first)
    assert torch.equal(torch.get_rng_state(), before)


@every_dims
def test_weights_of_one_optimizer_are_rounded_independently(kind, dims):
    weights = [signs(0).bfloat16().requires_grad_() for _ in range(2)]
    optimizer = kind(weights, lr=1e-3, channel_dims=dims, low_precision="stochastic")
    for weight in weights:
        weight.grad = signs(1).bfloat16()
    optimizer.step()
    assert not torch.equal(*weights)


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
