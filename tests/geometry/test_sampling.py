import math

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats
import torch
import torch.nn.functional as F
from clustered import other_unit as unit
from hypothesis import given, strategies as st

from hf_sphere.geometry import sampling
from hf_sphere.geometry.bessel import mean_resultant_length, mean_resultant_length_derivative
from hf_sphere.geometry.sampling import (
    fixed_noise,
    keyed_integers,
    keyed_normals,
    keyed_uniforms,
    points_around,
    points_from_noise,
    propose,
    sample_cosine,
)
from hf_sphere.utils.seeds import GAMMA

DRAWS = 50_000
DTYPES = [torch.float32, torch.float64]


def density_of_angle(angle, kappa: float, dim: int):
    """Unnormalized density of the angle between mean and point: that of w = cos(angle), but without poles."""
    return np.exp(kappa * (np.cos(angle) - 1)) * np.sin(angle) ** (dim - 2)


def probability_of_angle(angle: float, kappa: float, dim: int) -> float:
    options = {"args": (kappa, dim), "epsabs": 0, "epsrel": 1e-12, "limit": 200}
    below, above = (
        scipy.integrate.quad(density_of_angle, *ends, **options)[0] for ends in [(0, angle), (angle, math.pi)]
    )
    return below / (below + above)  # fmt: skip


def quantile(level: float, kappa: float, dim: int, guess: float) -> float:
    """Quantile of the angle, within a tenth of a guess."""
    ends = 0.9 * guess, min(1.1 * guess, math.pi)
    return scipy.optimize.brentq(lambda angle: probability_of_angle(angle, kappa, dim) - level, *ends, xtol=1e-14)


def drawn(dim: int, kappa: float, dtype=torch.float64, count: int = DRAWS) -> tuple[torch.Tensor, ...]:
    """Concentrations, cosines and sines."""
    concentration = torch.full((count,), kappa, dtype=dtype, requires_grad=True)
    return concentration, *sample_cosine(concentration, dim)


def gap_of(cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Return 1 - w at full precision."""
    return torch.where(cosine > 0, sine.square() / (1 + cosine), 1 - cosine).detach()


@pytest.mark.parametrize("kappa", [0.0, 0.7, 30.0, 1e4])
@pytest.mark.parametrize("dim", [2, 3, 5, 64])
def test_angles_follow_the_exact_distribution(dim, kappa):
    _, cosine, sine = drawn(dim, kappa, torch.float32)
    end = min(math.pi, 15 / max(kappa, 1e-9) ** 0.5) if dim < 64 else math.pi
    grid = np.linspace(0, end, 100_001)
    probability = scipy.integrate.cumulative_simpson(density_of_angle(grid, kappa, dim), x=grid, initial=0)
    angles = torch.atan2(sine.double(), cosine.double()).detach().numpy()
    assert scipy.stats.kstest(angles, lambda a: np.interp(a, grid, probability / probability[-1])).pvalue > 1e-4


@pytest.mark.parametrize(
    ("dim", "kappa"), [(2, 3.0), (2, 100.0), (3, 1.0), (5, 2.0), (16, 12.0), (32, 20.0), (128, 60.5), (512, 100.0)]
)
def test_mean_derivative_matches_the_derivative_of_the_mean(dim, kappa):
    # In few dimensions the derivative varies more than its mean: with this many samples, 1 % is four standard errors.
    concentration, cosine, _ = drawn(dim, kappa, torch.float32, 400_000 if dim < 16 else DRAWS)
    (slope,) = torch.autograd.grad(cosine.sum(), concentration)
    wide = torch.tensor(kappa, dtype=torch.float64)
    length = mean_resultant_length(wide, dim)
    expected = 1 - length**2 - (dim - 1) * length / wide
    assert slope.double().mean().item() == pytest.approx(expected.item(), rel=0.01)


@pytest.mark.parametrize("kappa", [0.5, 10.0, 200.0])
@pytest.mark.parametrize("dim", [2, 3, 5, 64])
def test_sample_derivative_matches_the_quantile_derivative(dim, kappa):
    concentration, cosine, sine = drawn(dim, kappa, count=4)
    (slopes,) = torch.autograd.grad(cosine.sum(), concentration)
    step = 1e-3 * kappa
    for angle, slope in zip(torch.atan2(sine, cosine).tolist(), slopes.tolist(), strict=True):
        level = probability_of_angle(angle, kappa, dim)
        quantiles = [quantile(level, near, dim, angle) for near in (kappa - step, kappa + step)]
        expected = (math.cos(quantiles[1]) - math.cos(quantiles[0])) / (2 * step)
        assert slope == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 3, 4, 16, 512])
def test_derivative_at_zero_concentration_is_squared_sine_over_dim_minus_one(dim, dtype):
    concentration, cosine, sine = drawn(dim, 0.0, dtype, 1000)
    (slopes,) = torch.autograd.grad(cosine.sum(), concentration)
    bound = 1e-4 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(slopes, sine.detach().square() / (dim - 1), rtol=bound, atol=bound / dim)


@pytest.mark.parametrize("dim", [2, 3, 5, 128, 2048])
@pytest.mark.parametrize("kappa", [0.0, 1.0, 30.0, 1e4, 1e8])
def test_float32_derivatives_match_float64(dim, kappa):
    concentration, cosine, sine = drawn(dim, kappa, torch.float32, 5000)
    arguments = concentration.detach(), gap_of(cosine, sine), sine.detach()

    def rate(concentration, gap, sine):
        return sampling._angle_rate(concentration, dim, gap, 1 - gap, sine)

    found, expected = rate(*arguments).double(), rate(*(part.double() for part in arguments))
    assert (found - expected).abs().max() < 1e-4 * expected.mean()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 3, 5, 8192])
def test_samples_and_derivatives_are_always_finite(dim, dtype):
    spread = [0, 1e-40, 1e-30, 1e-3, 1, 1e4, 1e8, 1e15, 1e25, torch.finfo(dtype).max]
    concentrations = torch.tensor(spread, dtype=dtype).repeat(200).requires_grad_()
    cosine, sine = sample_cosine(concentrations, dim)
    (slope,) = torch.autograd.grad((cosine + sine).sum(), concentrations)
    assert cosine.abs().max() <= 1
    assert sine.min() >= 0
    torch.testing.assert_close(cosine.square() + sine.square(), torch.ones_like(cosine))
    assert slope.isfinite().all()


@pytest.mark.parametrize(("dtype", "kappa"), [(torch.float32, 1e30), (torch.float64, 1e200)])
def test_spread_of_samples_at_huge_concentrations_matches_the_normal_distribution(dtype, kappa):
    _, sine = sample_cosine(torch.full((20_000,), kappa, dtype=dtype), 3)
    # kappa sine^2 / 2 is exponential with unit mean.
    assert (sine.double() * (0.5 * kappa) ** 0.5).square().mean().item() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("kappa", [math.nan, math.inf])
def test_rejection_sampling_terminates_without_acceptances(kappa, monkeypatch):
    rounds, first_accepted = [], sampling._first_accepted

    def counted(*arguments):
        rounds.append(arguments)
        assert len(rounds) < 100, "proposes forever"
        return first_accepted(*arguments)

    monkeypatch.setattr(sampling, "_first_accepted", counted)
    cosine, _ = sample_cosine(torch.tensor([1.0, kappa]), 3)
    assert cosine[0].isfinite()
    assert cosine[1].isnan() or (cosine[1] == 1 and kappa == math.inf)


@pytest.mark.parametrize("dim", [2, 3, 16, 512])
@pytest.mark.parametrize("kappa", [0.0, 2.0, 1e4])
def test_float32_proposals_close_to_the_mean_are_accurate(dim, kappa):
    places = torch.tensor([1e-6, 1e-5, 1e-4, 1e-2, 0.3])
    uniforms = torch.cartesian_prod(places, places, torch.tensor([0.5])).T
    concentration = torch.tensor(kappa)
    found, _ = propose(concentration, dim, uniforms)
    expected, _ = propose(concentration.double(), dim, uniforms.double())
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("dim", [2, 3, 16, 512])
def test_almost_two_thirds_of_proposals_are_accepted(dim):
    concentration = torch.tensor([0.0, 1.0, 10.0, 1e3, 1e8])
    accepted = propose(concentration, dim, torch.rand(3, DRAWS, 5))[1].float().mean(dim=0)
    assert accepted[0] == 1
    assert accepted.min() > 0.648  # 0.658 in the limit of two dimensions: 4.7 standard errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [3, 5, 16, 32, 128, 512, 2048])
def test_mean_cosines_match_the_mean_resultant_lengths(dim, dtype):
    concentrations = torch.tensor([0.0, 1.0, 12.0, 60.5, 701.0], dtype=dtype).repeat(20_000, 1)
    lengths = mean_resultant_length(concentrations[0].double(), dim)
    errors = (mean_resultant_length_derivative(concentrations[0].double(), dim) / 20_000).sqrt()
    cosines, _ = sample_cosine(concentrations, dim)
    assert (cosines.shape, cosines.dtype) == (concentrations.shape, dtype)
    assert ((cosines.double().mean(dim=0) - lengths).abs() < 4.5 * errors).all()


def test_keyed_samples_depend_neither_on_the_batch_nor_on_the_number_of_proposals(monkeypatch):
    concentration, keys = torch.rand(500, dtype=torch.float64) * 9, torch.arange(500)
    whole = sample_cosine(concentration, 5, keys=keys)
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "PROPOSALS_PER_ROUND", sampling.PROPOSALS_WITHOUT_ROUNDS)
        assert all(map(torch.equal, sample_cosine(concentration, 5, keys=keys), whole))
    for some in ([3], [499, 0, 7], range(200, 300)):
        parts = sample_cosine(concentration[some], 5, keys=keys[some])
        torch.testing.assert_close(parts, tuple(part[some] for part in whole))


@pytest.mark.parametrize("loss", [torch.sum, lambda cosine: cosine.square().sum()], ids=["straight", "curved"])
@pytest.mark.parametrize("differentiate", [lambda y, x: y.backward(), torch.autograd.grad], ids=["backward", "grad"])
def test_second_derivative_raises_instead_of_being_zero(differentiate, loss):
    concentration = torch.full((5,), 3.0, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(sample_cosine(concentration, 5)[0]), concentration, create_graph=True)
    with pytest.raises(RuntimeError, match=r"twice|second (order|derivative)"):
        differentiate((slope + concentration).sum(), concentration)


def by_sampling(loc, concentration):
    return points_around(loc, *sample_cosine(concentration, loc.shape[-1]))


def noise_like(shape, loc):
    return fixed_noise(tuple(shape), loc.shape[-1], 0, loc.dtype, loc.device)


def by_noise(loc, concentration):
    return points_from_noise(loc, concentration, noise_like(concentration.shape, loc))


@pytest.mark.parametrize("draw", [by_sampling, by_noise])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kappa", [0.0, 3.0, 1e4, 1e8])
@pytest.mark.parametrize("dim", [2, 3, 128])
def test_points_have_unit_norm(draw, dim, kappa, dtype):
    points = draw(unit(20_000, dim, dtype=dtype), torch.full((20_000,), kappa, dtype=dtype))
    assert points.dtype == dtype
    assert (points.double().norm(dim=-1) - 1).abs().max() < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("draw", [by_sampling, by_noise])
@pytest.mark.parametrize("kappa", [0.0, 5.0, 1e3])
def test_points_match_the_mean_and_covariance_of_the_distribution(draw, kappa):
    mean, concentration = (
        F.normalize(torch.tensor([1.0, -2.0, 0.5, 1.5], dtype=torch.float64), dim=0),
        torch.tensor(kappa),
    )
    length, along = (f(concentration.double(), 4) for f in (mean_resultant_length, mean_resultant_length_derivative))
    across = (1 - length**2 - along) / 3
    covariance = across * torch.eye(4) + (along - across) * mean[:, None] * mean
    away = draw(mean.expand(DRAWS, 4), concentration.double().expand(DRAWS)) - length * mean
    products = away[:, :, None] * away[:, None, :]
    assert (away.mean(dim=0).abs() < 5 * away.std(dim=0) / DRAWS**0.5).all()
    assert ((products.mean(dim=0) - covariance).abs() < 5 * products.std(dim=0) / DRAWS**0.5).all()


@pytest.mark.parametrize("draw", [by_sampling, by_noise])
def test_mean_derivative_by_direction_is_the_length_times_the_tangential_part(draw):
    direction, weights = unit(1, 5).requires_grad_(), torch.randn(5, dtype=torch.float64)
    each = F.normalize(direction, dim=-1).expand(DRAWS, 5)
    each.retain_grad()
    (draw(each, torch.full((DRAWS,), 4.0, dtype=torch.float64)) @ weights).sum().backward()
    mean = direction.detach()[0]
    derivatives = each.grad - (each.grad @ mean)[:, None] * mean
    length = mean_resultant_length(torch.tensor(4.0, dtype=torch.float64), 5)
    expected = length * (weights - (weights @ mean) * mean)
    assert ((derivatives.mean(dim=0) - expected).abs() < 5 * derivatives.std(dim=0) / DRAWS**0.5).all()
    torch.testing.assert_close(direction.grad[0] / DRAWS, derivatives.mean(dim=0))


def test_points_from_noise_pass_gradcheck():
    loc, concentration = unit(3, 4).requires_grad_(), torch.tensor([0.5, 4.0, 90.0], dtype=torch.float64)
    noise = noise_like((3,), loc)
    for numbers in (noise, noise._replace(normals=-noise.normals)):
        # The gradient is tangential, as mean directions lie on the sphere.
        assert torch.autograd.gradcheck(
            lambda x, n=numbers: points_from_noise(torch.nn.functional.normalize(x, dim=-1), concentration, n), loc
        )


def test_noise_broadcasts_over_distributions():
    loc, concentration = unit(3, 4, dtype=torch.float32), torch.tensor([0.0, 3.0, 400.0])
    noise = noise_like((20_000, 1), loc)
    points = points_from_noise(loc, concentration, noise)
    assert points.shape == (20_000, 3, 4)
    for index in range(3):
        alone = points_from_noise(
            loc[index], concentration[index], type(noise)(noise.uniforms[..., 0], noise.normals[:, 0])
        )
        torch.testing.assert_close(points[:, index], alone)
    noise = noise_like((3,), loc)
    found = torch.func.vmap(points_from_noise, in_dims=(0, 0, type(noise)(2, 0)))(loc, concentration, noise)
    torch.testing.assert_close(found, points_from_noise(loc, concentration, noise))


MODULUS = 2**64
PUBLISHED = [
    6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
]  # fmt: skip
"""First numbers of the SplitMix64 generator with state 1234567, as many implementations print them."""


def reference(key: int, place: int) -> int:
    """SplitMix64 in unbounded integers."""
    bits = (key + place) * GAMMA % MODULUS
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % MODULUS
    return bits ^ (bits >> 31)


def signed(number: int) -> int:
    return (number + MODULUS // 2) % MODULUS - MODULUS // 2


def test_numbers_are_those_of_splitmix64():
    key = signed(1234567 * pow(GAMMA, -1, MODULUS))
    found = keyed_integers(torch.tensor(key), torch.arange(1, 6)).tolist()
    assert [number % MODULUS for number in found] == PUBLISHED


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_arithmetic_wraps_around(key, place):
    assert keyed_integers(torch.tensor(key), torch.tensor(place)).item() == signed(reference(key, place))


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniforms_are_the_leading_bits(dtype):
    keys, bits = torch.tensor([-5, 0, 7]), {torch.float32: 24, torch.float64: 53}[dtype]
    leading = [(signed(reference(key, 3)) // 2 ** (64 - bits) + 2 ** (bits - 1)) / 2**bits for key in keys.tolist()]
    assert keyed_uniforms(keys, torch.tensor(3), dtype).tolist() == leading


@pytest.mark.parametrize("dtype", DTYPES)
def test_normals_are_normal(dtype):
    numbers = keyed_normals(keyed_integers(1, torch.arange(300)), 65, dtype)
    assert (numbers.shape, numbers.dtype) == ((300, 65), dtype)
    assert scipy.stats.kstest(numbers.flatten().double().numpy(), "norm").pvalue > 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_inductor_gives_the_same_numbers(dtype):
    def draw(keys):
        streams = keyed_integers(keys, torch.arange(7)[:, None])
        return keyed_uniforms(streams, torch.arange(5)[:, None, None], dtype), keyed_normals(streams, 9, dtype)

    keys = torch.randint(-(2**63), 2**63 - 1, (12,))
    (uniforms, normals), expected = torch.compile(draw, fullgraph=True)(keys), draw(keys)
    assert torch.equal(uniforms, expected[0])
    torch.testing.assert_close(normals, expected[1])
