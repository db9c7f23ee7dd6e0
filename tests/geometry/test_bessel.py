import functools
import json
import math

import mpmath
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from hf_sphere.geometry import (
    bessel,
    concentration_from_mean_resultant_length,
    log_vmf_normalizer,
    mean_resultant_length,
)
from hf_sphere.geometry.bessel import (
    log_uniform_density,
    log_vmf_peak,
    log_vmf_peak_and_complement,
    mean_resultant_length_complement,
    mean_resultant_length_derivative,
    means_from_natural_parameters,
    partition_and_ratio,
)

DIMS = [2, 3, 5, 32, 128]
MANY_DIMS = [2, 3, 4, 5, 7, 8, 16, 31, 64, 128, 512, 2048, 8192]
DTYPES = [torch.float32, torch.float64]
DIFFERENTIABLE = [
    log_vmf_normalizer,
    mean_resultant_length,
    mean_resultant_length_derivative,
    concentration_from_mean_resultant_length,
    log_vmf_peak,
]
FUNCTIONS = [*DIFFERENTIABLE, mean_resultant_length_complement]

WIDE = torch.cat([torch.zeros(1, dtype=torch.float64), torch.logspace(-30, 8, 153, dtype=torch.float64)])
"""Concentrations that must not cause overflow, underflow or division by zero."""

SPREAD = [1e-6, 0.01, 1.0, 3.0, 10.0, 30.0, 100.0, 1e3, 2718.0, 1e4, 31415.0, 1e5, 1e6]
"""Concentrations with exact reference values."""


def arguments(function, dtype=torch.float64) -> Tensor:
    """Return a few valid arguments of the function."""
    if function is concentration_from_mean_resultant_length:
        return torch.tensor([0.01, 0.3, 0.7, 0.95, 0.999], dtype=dtype)
    return torch.tensor([0.0, 0.3, 2.0, 11.0, 200.0], dtype=dtype)


@functools.cache
def exact(dim: int, kappa: float) -> dict[str, float]:
    """Evaluate the definitions with enough digits to survive cancellation."""
    with mpmath.workdps(60):
        k, nu = mpmath.mpf(kappa), mpmath.mpf(dim) / 2 - 1
        below, above = (mpmath.besseli(order, k, maxterms=10**6) for order in (nu, nu + 1))
        length = above / below
        area = mpmath.mpf(dim) / 2 * mpmath.log(2 * mpmath.pi)
        return {
            "length": float(length),
            "complement": float(1 - length),
            "slope": float(1 - length**2 - (dim - 1) * length / k),
            "normalizer": float(nu * mpmath.log(k) - area - mpmath.log(below)),
            "peak": float(k + nu * mpmath.log(k / 2) - mpmath.loggamma(nu + 1) - mpmath.log(below)),
            "partition": float(mpmath.log(below) + mpmath.loggamma(nu + 1) - nu * mpmath.log(k / 2)),
        }


def exact_values(name: str, dim: int, concentrations: Tensor) -> Tensor:
    return torch.tensor([exact(dim, kappa)[name] for kappa in concentrations.tolist()], dtype=torch.float64)


@pytest.fixture(scope="module")
def golden_rows(root):
    """Concentrations, normalizers and lengths per dimension."""
    rows = json.loads((root / "tests" / "golden" / "von_mises_fisher.json").read_text())["values"]
    columns = ("kappa", "log_normalizer", "mean_resultant_length")
    dims = sorted({row["d"] for row in rows})
    return {
        dim: torch.tensor([[row[c] for c in columns] for row in rows if row["d"] == dim], dtype=torch.float64).unbind(1)
        for dim in dims
    }


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 2e-15)])
def test_normalizer_and_mean_resultant_length_match_golden_values(golden_rows, dtype, bound):
    assert len(golden_rows) == 17
    for dim, (concentrations, normalizers, lengths) in golden_rows.items():
        found = mean_resultant_length(concentrations.to(dtype), dim).double()
        torch.testing.assert_close(found, lengths, rtol=bound, atol=0, msg=lambda text, dim=dim: f"d = {dim}: {text}")
        error = log_vmf_normalizer(concentrations.to(dtype), dim).double() - normalizers
        assert (error.abs() <= bound * concentrations.clamp_min(dim)).all(), dim


def test_normalizer_differences_match_golden_values_to_a_nanonat(golden_rows):
    for dim, (concentrations, normalizers, _) in golden_rows.items():
        found = log_vmf_normalizer(concentrations, dim)
        differences = found[:, None] - found, normalizers[:, None] - normalizers
        torch.testing.assert_close(*differences, rtol=0, atol=1e-9, msg=lambda text, dim=dim: f"d = {dim}: {text}")


@pytest.mark.parametrize("dim", [2, 3, 4, 5, 6, 7, 8, 11, 16, 25, 26, 33, 48, 49, 128, 1000, 2048, 10_000, 100_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_at_most_five_units_in_the_last_place_also_where_definitions_cancel(dim, dtype):
    ratios = torch.logspace(-4, 3, 24, dtype=torch.float64) if dim < 1000 else torch.tensor([1e-4, 1e-2, 0.1, 1e3])
    spread = torch.tensor(SPREAD if dim < 3000 else [], dtype=torch.float64)
    concentrations = torch.cat([dim * ratios, spread]).to(dtype)
    found = {
        "length": mean_resultant_length(concentrations, dim),
        "complement": mean_resultant_length_complement(concentrations, dim),
        "slope": mean_resultant_length_derivative(concentrations, dim),
        "peak": log_vmf_peak(concentrations, dim),
        "partition": bessel._functions(concentrations, dim, "partition")[0],
    }
    for name, values in found.items():
        expected = exact_values(name, dim, concentrations)
        text = f"{name}: {{}}".format
        torch.testing.assert_close(values.double(), expected, rtol=5 * torch.finfo(dtype).eps, atol=0, msg=text)


@pytest.mark.parametrize("dim", [2, 3, 64, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_concentrations_match_their_limits(dim, dtype):
    largest = torch.finfo(dtype).max
    kappa = torch.tensor([largest**0.5, largest**0.75, largest], dtype=dtype)
    limits = {
        log_vmf_normalizer: -kappa,
        mean_resultant_length: torch.ones_like(kappa),
        mean_resultant_length_derivative: 0.5 * (dim - 1) / kappa / kappa,
        mean_resultant_length_complement: 0.5 * (dim - 1) / kappa,
        # I(kappa) ~ exp(kappa) / sqrt(2 pi kappa)
        log_vmf_peak: 0.5 * (dim - 1) * kappa.log()
        + 0.5 * (math.log(2 * math.pi) - (dim - 2) * math.log(2))
        - math.lgamma(dim / 2),
    }
    tiny = torch.finfo(dtype).tiny
    for function, expected in limits.items():
        torch.testing.assert_close(function(kappa, dim), expected, rtol=1e-5, atol=8 * tiny)


@pytest.mark.parametrize("dim", MANY_DIMS)
def test_zero_concentration_gives_the_uniform_distribution(dim):
    zero = torch.zeros((), dtype=torch.float64)
    assert log_vmf_normalizer(zero, dim).item() == log_uniform_density(dim)
    assert mean_resultant_length(zero, dim).item() == 0
    assert mean_resultant_length_complement(zero, dim).item() == 1
    assert mean_resultant_length_derivative(zero, dim).item() == pytest.approx(1 / dim, rel=1e-14)
    area = {2: 2 * math.pi, 3: 4 * math.pi, 4: 2 * math.pi**2, 5: 8 / 3 * math.pi**2}.get(dim)
    assert area is None or log_uniform_density(dim) == pytest.approx(-math.log(area), rel=1e-15)


@pytest.mark.parametrize("dim", MANY_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_length_increases_from_0_to_1_and_derivative_and_complement_stay_in_range(dim, dtype):
    lengths, eps = mean_resultant_length(WIDE.to(dtype), dim), torch.finfo(dtype).eps
    assert lengths[0] == 0 < lengths[1]
    assert lengths.max() <= 1
    assert lengths.diff().min() >= -16 * eps
    slope = mean_resultant_length_derivative(WIDE.to(dtype), dim)
    complement = mean_resultant_length_complement(WIDE.to(dtype), dim)
    assert min(slope.min(), complement.min()) > 0
    assert slope.max() * dim <= 1 + 8 * eps
    assert complement.max() <= 1


@pytest.mark.parametrize("dim", MANY_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_three_derivatives_are_always_finite(dim, dtype):
    largest = torch.finfo(dtype).max
    huge = torch.logspace(8, math.log10(largest) - 1e-9, 100, dtype=torch.float64)
    concentrations = torch.cat([WIDE, huge, torch.tensor([largest], dtype=torch.float64)]).to(dtype).requires_grad_()
    value = log_vmf_normalizer(concentrations, dim)
    for order in range(4):
        assert value.isfinite().all(), order
        if order < 3:
            (value,) = torch.autograd.grad(value.sum(), concentrations, create_graph=True)


@pytest.mark.parametrize("dim", [2, 3, 16, 512])
def test_partition_and_ratio_of_the_squared_concentration_match(dim):
    concentrations = torch.tensor([1e-3, 0.5, 4.0, 60.0, 3e3], dtype=torch.float64)
    log_partition, ratio = partition_and_ratio(concentrations.square(), dim)
    expected = log_uniform_density(dim) - log_vmf_normalizer(concentrations, dim)
    torch.testing.assert_close(log_partition, expected, rtol=1e-12, atol=1e-12 * dim)
    torch.testing.assert_close(ratio * concentrations, mean_resultant_length(concentrations, dim), rtol=1e-13, atol=0)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("function", DIFFERENTIABLE)
def test_derivatives_pass_gradcheck_and_gradgradcheck(function, dim):
    values = arguments(function).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: function(x, dim), values)
    assert torch.autograd.gradgradcheck(lambda x: function(x, dim), values)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", DIMS)
def test_derivatives_of_normalizer_and_length_are_exactly_these_functions(dim, dtype):
    concentrations = torch.tensor([0.0, 1e-3, 0.7, 13.0, 500.0, 3e4], dtype=dtype, requires_grad=True)
    for function, slope in ((log_vmf_normalizer, -1), (mean_resultant_length, 1)):
        (found,) = torch.autograd.grad(function(concentrations, dim).sum(), concentrations)
        of = mean_resultant_length if slope < 0 else mean_resultant_length_derivative
        assert torch.equal(found, slope * of(concentrations.detach(), dim))


@pytest.mark.parametrize("dim", DIMS)
def test_peak_and_complement_together_equal_each_alone_with_two_derivatives(dim):
    values = arguments(log_vmf_peak).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: log_vmf_peak_and_complement(x, dim), values)
    together = log_vmf_peak_and_complement(values, dim)
    assert torch.equal(
        torch.stack(together), torch.stack([f(values, dim) for f in (log_vmf_peak, mean_resultant_length_complement)])
    )


@pytest.mark.parametrize("dim", MANY_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_inverse_recovers_the_length(dim, dtype):
    eps = torch.finfo(dtype).eps
    ulps = torch.arange(1, 40, dtype=torch.float64) * eps / 2
    gaps = torch.cat([ulps, torch.logspace(math.log10(20 * eps), -0.01, 300, dtype=torch.float64)])
    lengths = torch.cat([(1 - gaps).to(dtype), torch.logspace(-30, -2, 57, dtype=dtype)])
    concentrations = concentration_from_mean_resultant_length(lengths, dim)
    again = mean_resultant_length(concentrations, dim)
    torch.testing.assert_close(again, lengths, rtol=16 * eps, atol=0)


@pytest.mark.parametrize("dim", DIMS)
def test_inverse_recovers_the_concentration_and_has_the_dimension_as_slope_at_0(dim):
    concentrations = torch.tensor([1e-6, 0.01, 1.0, 3.0, 10.0, 30.0], dtype=torch.float64)
    lengths = exact_values("length", dim, concentrations)
    found = concentration_from_mean_resultant_length(lengths, dim)
    torch.testing.assert_close(found, concentrations, rtol=1e-12, atol=0)
    length = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(concentration_from_mean_resultant_length(length, dim), length)
    assert slope.item() == pytest.approx(dim, rel=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_lengths_0_and_1_have_zero_and_infinite_concentration_and_others_none(dim, dtype):
    found = concentration_from_mean_resultant_length(torch.tensor([0.0, 1.0], dtype=dtype), dim)
    assert found.tolist() == [0, math.inf]
    lengths = torch.tensor([-1.5, -0.1, 1.1, 30.0, math.inf, math.nan], dtype=dtype)
    assert torch.vmap(lambda x: concentration_from_mean_resultant_length(x, dim))(lengths).isnan().all()
    with pytest.raises(ValueError, match=r"lengths must be in \[0, 1\]; got .* to "):
        concentration_from_mean_resultant_length(lengths[1:2], dim)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_half_precision_is_computed_in_float32_and_rounded_once(function, dtype):
    values = arguments(function, dtype)
    assert torch.equal(function(values, 16), function(values.float(), 16).to(dtype))
    for shape in [(), (0,), (3, 1, 2)]:
        found = function(torch.full(shape, 0.5, dtype=dtype), 7)
        assert (found.shape, found.dtype) == (shape, dtype)


@pytest.mark.parametrize("dim", [2, 3, 64])
@pytest.mark.parametrize("function", DIFFERENTIABLE)
def test_vmap_values_and_two_derivatives_match_a_loop(function, dim):
    def value(x: Tensor) -> Tensor:
        return function(x, dim)

    values = arguments(function)
    for derivative in (value, grad(value), grad(grad(value))):
        expected = torch.stack([derivative(x) for x in values])
        torch.testing.assert_close(vmap(derivative)(values), expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    ("function", "backend"), [*((function, "eager") for function in FUNCTIONS), (log_vmf_normalizer, "aot_eager")]
)
def test_fullgraph_compile_preserves_value_and_gradient(function, backend):
    # Small dimensions need many steps, repeated in the inverse: the compiled program is long.
    dim = 64 if function is concentration_from_mean_resultant_length else 5
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x, dim), fullgraph=True, backend=backend)
    values = arguments(function, torch.float32).requires_grad_()
    found, expected = compiled(values), function(values, dim)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    if expected.requires_grad:
        gradients = [torch.autograd.grad(y.sum(), values) for y in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: log_vmf_peak_and_complement(x, 3),
        lambda x: means_from_natural_parameters(x[None]),
        lambda x: means_from_natural_parameters(x[None], 2 * x[None]),
    ],
    ids=["peak and complement", "means of a batch", "means of two batches"],
)
def test_fullgraph_compile_of_several_values_needs_no_gradient(function):
    torch._dynamo.reset()
    values = arguments(log_vmf_normalizer)
    torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="eager")(values), function(values))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_input_is_refused(function):
    for values, message in (
        (0.5, r"got float. Convert it with torch.as_tensor\(\)"),
        (torch.ones(2) + 1j, "floating-"),
    ):
        with pytest.raises(TypeError, match=message):
            function(values, 3)
    for dim in (1, 2.5):
        with pytest.raises(ValueError, match=f"dim must be an integer of at least 2; got {dim}"):
            function(torch.full((2,), 0.5), dim)


def test_the_concentration_of_almost_equal_points_is_right_in_many_dimensions():
    lengths = 1 - torch.finfo(torch.float32).eps * torch.tensor([0.5, 1.0, 8.0])
    found, exact = (concentration_from_mean_resultant_length(x, 4096) for x in (lengths, lengths.double()))
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0.0)
