import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.func import grad, vmap

from hf_sphere.geometry import angles_to_cartesian, cartesian_to_angles, spherize


def plain_spherize(x: Tensor, scaling: float, radius: float, delta: float) -> Tensor:
    """Evaluate the formula of the paper in float64, coordinate by coordinate."""
    x = x.double()
    n = x.shape[-1]
    low = min(math.asin(delta ** (1 / n)), 0.99 * math.pi / 2)
    theta = (math.pi / 2 - low) / (1 + torch.exp(-scaling * x)) + low
    coordinates, product = [], torch.ones_like(x[..., 0])
    for k in range(n):
        coordinates.append(radius * torch.cos(theta[..., k]) * product)
        product = product * torch.sin(theta[..., k])
    return torch.stack([*coordinates, radius * product], dim=-1)


@pytest.mark.parametrize("case", [f"case{i}" for i in range(8)])
@pytest.mark.parametrize(
    ("dtype", "of_points", "of_slopes"), [(torch.float32, 1e-5, 1e-4), (torch.float64, 1e-12, 1e-11)]
)
def test_points_and_gradients_match_golden_values(golden, case, dtype, of_points, of_slopes):
    values, about = golden("spherization"), golden("spherization").cases[case]
    x = values[f"{case}.x"].to(dtype).requires_grad_()
    scaling, radius = (torch.tensor(about[name], dtype=dtype, requires_grad=True) for name in ("scaling", "radius"))
    y = spherize(x, scaling, radius, about["delta"])
    torch.testing.assert_close(y.double(), values[f"{case}.exact_y"], rtol=0, atol=of_points * about["radius"])
    gradients = torch.autograd.grad(y, (x, scaling, radius), values[f"{case}.cotangent"].to(dtype))
    for name, gradient in zip(("x", "scaling", "radius"), gradients, strict=True):
        exact = values[f"{case}.exact_grad_{name}"].reshape(gradient.shape)
        assert (gradient.double() - exact).abs().max() <= of_slopes * exact.abs().max(), name


@given(
    n=st.integers(1, 80),
    scaling=st.floats(0.1, 10),
    radius=st.floats(0.01, 100),
    delta=st.floats(1e-12, 0.5),
    seed=st.integers(0, 2**31),
)
def test_spherize_matches_the_formula(n, scaling, radius, delta, seed):
    x = 3 * torch.randn(3, n, generator=torch.Generator().manual_seed(seed))
    expected = plain_spherize(x, scaling, radius, delta)
    torch.testing.assert_close(spherize(x, scaling, radius, delta).double(), expected, rtol=0, atol=2e-6 * radius)


@pytest.mark.parametrize("value", [-1e4, 1e4, None])
@pytest.mark.parametrize("n", [1, 30, 3000, 8192])
def test_norms_are_the_radius_and_saturated_values_have_finite_gradients_and_nonnegative_points(n, value):
    x = (4 * torch.randn(8, n) if value is None else torch.full((2, n), value)).requires_grad_()
    y = spherize(x, 5.0, 2.0, delta=1e-6)
    y.cumsum(-1).sum().backward()
    assert x.grad.isfinite().all()
    assert y.min() >= 0
    assert y[:, -1].min() >= 2.0 * 1e-6 * 0.999
    assert (y.double().norm(dim=-1) / 2.0 - 1).abs().max() < 5e-6


@pytest.mark.parametrize("n", [1, 6])
def test_spherize_passes_gradcheck_and_gradgradcheck(n):
    x = (2 * torch.randn(2, n, dtype=torch.float64)).requires_grad_()
    scalars = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (1.3, 2.0)]
    assert torch.autograd.gradcheck(spherize, (x, *scalars))
    assert torch.autograd.gradgradcheck(spherize, (x, *scalars))


def test_only_input_and_output_are_saved_for_backward():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        spherize(torch.randn(64, 100, requires_grad=True))
    assert sorted(kept) == [(), (), (64, 100), (64, 101)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype):
    x = torch.randn(4, 4096, dtype=dtype)
    y = spherize(x, 5.0, 5.0)
    assert y.dtype == dtype
    torch.testing.assert_close(y, spherize(x.float(), 5.0, 5.0).to(dtype), rtol=0, atol=0)


def test_blockwise_computation_gives_the_same_result():
    x = torch.randn(500, 400)  # more elements than one block on the CPU
    torch.testing.assert_close(spherize(x), torch.cat([spherize(row[None]) for row in x]), rtol=1e-6, atol=1e-8)


def test_vmap_of_grad_and_over_scalings_matches_a_loop():
    x = torch.randn(4, 6)

    def value(row: Tensor) -> Tensor:
        return (spherize(row, 2.0) * torch.arange(7)).square().sum()

    torch.testing.assert_close(vmap(grad(value))(x), torch.stack([grad(value)(row) for row in x]))
    x, scalings = torch.randn(3, 6), torch.tensor([0.5, 1.0, 2.0])
    batched = vmap(spherize, in_dims=(None, 0))(x, scalings)
    torch.testing.assert_close(batched, torch.stack([spherize(x, s) for s in scalings]))


def test_bad_input_is_refused():
    for delta in (0.0, 1.0, -1e-6, 2.0, math.nan):
        with pytest.raises(ValueError, match="delta must lie between 0 and 1"):
            spherize(torch.randn(2, 3), delta=delta)
    for radius in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="radius must be positive"):
            spherize(torch.randn(2, 3), radius=radius)
    with pytest.raises(TypeError, match=r"floating-point dtype; got torch.int64.*\.float\(\)"):
        spherize(torch.ones(2, 3, dtype=torch.int64))
    for shape in ((), (2, 0)):
        with pytest.raises(ValueError, match=r"x must have the shape \(\.\.\., n\) with n >= 1; got \("):
            spherize(torch.ones(shape))


@given(n=st.integers(1, 40), radius=st.floats(1e-3, 1e3), seed=st.integers(0, 2**31))
def test_points_and_angles_round_trip(n, radius, seed):
    points = torch.randn(3, n + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    points = radius * points / points.norm(dim=-1, keepdim=True)
    back = angles_to_cartesian(cartesian_to_angles(points), radius)
    torch.testing.assert_close(back, points, rtol=1e-9, atol=1e-9 * radius)


def test_circle_angle_matches_atan2():
    angle = torch.linspace(-3.1, 3.1, 50, dtype=torch.float64)[:, None]
    points = torch.cat([angle.cos(), angle.sin()], dim=-1)
    torch.testing.assert_close(cartesian_to_angles(points), angle)
    torch.testing.assert_close(angles_to_cartesian(angle), points)


@pytest.mark.parametrize("function", [angles_to_cartesian, cartesian_to_angles])
@pytest.mark.parametrize("n", [2, 5])
def test_conversions_pass_gradcheck_and_gradgradcheck(function, n):
    x = torch.randn(3, n, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


def test_undetermined_angles_have_zero_gradient():
    points = torch.tensor([[1.0, 0.0, 0.0]], requires_grad=True)
    cartesian_to_angles(points).sum().backward()
    torch.testing.assert_close(points.grad, torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("function", "backend"),
    [(spherize, "inductor"), (angles_to_cartesian, "aot_eager"), (cartesian_to_angles, "aot_eager")],
)
def test_fullgraph_compile_preserves_results_and_gradients(function, backend):
    x = torch.randn(4, 6)
    eager, compiled = x.clone().requires_grad_(), x.clone().requires_grad_()
    weights = torch.arange(1.0, 8.0)[: function(x).shape[-1]]
    (function(eager) * weights).sum().backward()
    (torch.compile(function, fullgraph=True, backend=backend)(compiled) * weights).sum().backward()
    torch.testing.assert_close(compiled.grad, eager.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [3, 60, 4096])
def test_differentiable_gradient_matches_the_in_place_one(n):
    x, incoming = torch.randn(200, n, requires_grad=True), torch.randn(200, n + 1)
    scaling = torch.tensor(2.0, requires_grad=True)
    y = spherize(x, scaling)
    in_place = torch.autograd.grad(y, (x, scaling), incoming, retain_graph=True)
    strided = x.detach().T.contiguous().T.requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(spherize(strided, scaling), strided, incoming)[0], in_place[0])
    differentiable = torch.autograd.grad(y, (x, scaling), incoming, create_graph=True)
    torch.testing.assert_close(in_place, differentiable, rtol=1e-4, atol=1e-5)
