import math

import mpmath
import pytest
import torch
from clustered import other_unit as unit
from torch import Tensor
from torch.distributions import Categorical, Distribution, MixtureSameFamily, kl_divergence

from hf_sphere.distributions import HypersphericalUniform, PowerSpherical, VonMisesFisher

PLACES = [(2, 0.5), (3, 1e-3), (3, 2.0), (5, 40.0), (128, 40.0), (512, 1e4), (4096, 1e-3), (4096, 1e6)]


def make(dim: int, kappa: float, *shape: int) -> PowerSpherical:
    return PowerSpherical(unit(*shape, dim), torch.full(shape, kappa, dtype=torch.float64))


def exact(dim: int, kappa: float) -> tuple[float, float]:
    """Log-normalizer, and divergence from the uniform distribution, by 60-digit arithmetic."""
    with mpmath.workdps(60):
        beta, kappa = mpmath.mpf(dim - 1) / 2, mpmath.mpf(kappa)
        alpha = beta + kappa
        log_normalizer = (alpha + beta) * mpmath.log(2) + beta * mpmath.log(mpmath.pi)
        log_normalizer += mpmath.loggamma(alpha) - mpmath.loggamma(alpha + beta)
        area = mpmath.log(2) + mpmath.mpf(dim) / 2 * mpmath.log(mpmath.pi) - mpmath.loggamma(mpmath.mpf(dim) / 2)
        mean = mpmath.log(2) + mpmath.digamma(alpha) - mpmath.digamma(alpha + beta)
        return float(log_normalizer), float(kappa * mean - log_normalizer + area)


@pytest.mark.parametrize(("dim", "kappa"), PLACES)
class TestClosedForms:
    def test_log_prob_equals_that_of_the_paper(self, dim, kappa):
        distribution, x = make(dim, kappa), unit(5, dim)
        expected = kappa * (distribution.loc * x).sum(-1).log1p() - exact(dim, kappa)[0]
        torch.testing.assert_close(distribution.log_prob(x), expected, rtol=1e-10, atol=1e-8)

    def test_divergence_from_uniform_keeps_its_digits(self, dim, kappa):
        distribution = make(dim, kappa)
        divergence = kl_divergence(distribution, HypersphericalUniform(dim)).item()
        assert divergence == pytest.approx(exact(dim, kappa)[1], rel=1e-10)
        uniform = HypersphericalUniform(dim, dtype=torch.float64).entropy().item()
        assert distribution.entropy().item() == pytest.approx(uniform - divergence, rel=1e-12)

    def test_samples_have_the_moments(self, dim, kappa):
        if dim > 512:
            pytest.skip("many large samples")
        distribution = make(dim, kappa)
        x = distribution.sample((20_000,))
        torch.testing.assert_close(torch.linalg.vector_norm(x, dim=-1), torch.ones(20_000).double())
        w = x @ distribution.loc
        length = distribution.mean_resultant_length
        assert abs(w.mean() - length) < 4 * w.std() / 20_000**0.5
        variance = distribution._spread()[1]  # along the mean direction
        assert variance.item() == pytest.approx(w.var().item(), rel=0.1)
        assert distribution.variance.sum().item() == pytest.approx(1 - length.item() ** 2, rel=1e-9)


@pytest.mark.parametrize("kappa", [1e-6, 1e8, 1e12, 1e30])
def test_extreme_concentrations_keep_their_digits(kappa):
    distribution = make(3, kappa)
    divergence = kl_divergence(distribution, HypersphericalUniform(3)).item()
    assert divergence == pytest.approx(exact(3, kappa)[1], rel=1e-13, abs=0)
    with mpmath.workdps(60):
        kappa = mpmath.mpf(kappa)
        total = float(1 - (kappa / (kappa + 2)) ** 2)
    assert distribution.variance.sum().item() == pytest.approx(total, rel=1e-13, abs=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [VonMisesFisher, PowerSpherical])
def test_an_infinite_concentration_is_a_large_finite_one(kind, dtype):
    loc = torch.eye(200, dtype=dtype)[3]
    infinite = kind(loc, math.inf)
    if dtype != torch.float16:
        large = kind(loc, torch.finfo(dtype).max / 4)
        torch.testing.assert_close(infinite.log_prob(loc), large.log_prob(loc))
    values = [infinite.log_prob(loc), infinite.entropy(), infinite.mean_resultant_length, infinite.variance]
    values += [kl_divergence(infinite, HypersphericalUniform(200, dtype=dtype)), infinite.rsample((9,))]
    assert all(value.isfinite().all() for value in values)
    assert {value.dtype for value in values} == {dtype}
    torch.testing.assert_close(values[-1], loc.expand(9, -1))
    torch.testing.assert_close(infinite.mean, loc)


@pytest.mark.parametrize("kind", [VonMisesFisher, PowerSpherical])
def test_a_number_that_is_infinite_in_the_dtype_of_loc_is_an_error(kind):
    with pytest.raises(ValueError, match=r"100000.0 is infinite in torch.float16, the dtype of loc. Convert loc"):
        kind(torch.eye(3).half()[0], 1e5)
    assert kind(torch.eye(3).half()[0], torch.tensor(1e5)).concentration == 1e5


def test_the_mean_in_half_precision_does_not_overflow():
    distribution = PowerSpherical(torch.eye(2000).half()[0], 65504.0)
    assert distribution.mean_resultant_length.item() == pytest.approx(0.97, abs=0.001)


@pytest.mark.parametrize(
    "compute",
    [
        lambda p: p.entropy(),
        lambda p: kl_divergence(p, HypersphericalUniform(3)),
    ],
)
def test_entropy_and_divergences_compile_without_graph_breaks(compute):
    def of_parameters(loc: Tensor, concentration: Tensor) -> Tensor:
        return compute(PowerSpherical(loc, concentration, validate_args=False))

    parameters = unit(4, 3), torch.tensor([0.0, 0.3, 5.0, 400.0], dtype=torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(of_parameters, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*parameters), of_parameters(*parameters))


class TestGradients:
    @pytest.mark.parametrize(("dim", "kappa"), [(3, 2.0), (5, 2.0), (128, 40.0)])
    def test_of_samples_are_those_of_the_mean(self, dim, kappa):
        concentration = torch.full((50_000,), kappa, dtype=torch.float64, requires_grad=True)
        loc = unit(dim)
        w = PowerSpherical(loc, concentration).rsample() @ loc
        (slope,) = torch.autograd.grad(w.sum(), concentration)
        expected = (dim - 1) / (kappa + dim - 1) ** 2
        assert abs(slope.mean() - expected) < 4 * slope.std() / 50_000**0.5 + 1e-3 * expected

    @pytest.mark.parametrize("kappa", [0.1, 5.0])
    def test_of_densities_and_divergences_are_correct(self, kappa):
        concentration = torch.full((3,), kappa, dtype=torch.float64, requires_grad=True)
        loc, x, uniform = unit(3, 5).requires_grad_(), unit(3, 5), HypersphericalUniform(5)
        assert torch.autograd.gradcheck(
            lambda m, k: PowerSpherical(m, k, validate_args=False).log_prob(x), (loc, concentration)
        )
        assert torch.autograd.gradcheck(lambda k: kl_divergence(PowerSpherical(x, k), uniform), concentration)


def test_float32_samples_at_high_concentration_are_unit_vectors():
    x = PowerSpherical(torch.tensor([1.0, 0.0, 0.0]), torch.tensor(1e8)).sample((1000,))
    assert (torch.linalg.vector_norm(x, dim=-1) - 1).abs().max() < 1e-6
    assert 0 < x[:, 1].std() < 1e-3


@pytest.mark.parametrize("kind", [PowerSpherical, VonMisesFisher])
def test_torch_mixtures_work(kind):
    loc, kappa = unit(3, 5), torch.tensor([1.0, 10.0, 100.0]).double()
    mixture = MixtureSameFamily(Categorical(torch.tensor([0.2, 0.3, 0.5]).double()), kind(loc, kappa))
    x = mixture.sample((7,))
    expected = (kind(loc, kappa).log_prob(x[:, None]) + torch.tensor([0.2, 0.3, 0.5]).log()).logsumexp(-1)
    torch.testing.assert_close(mixture.log_prob(x), expected)
    assert (mixture.mean.shape, mixture.variance.shape) == ((5,), (5,))


class TestFit:
    def test_recovers_the_parameters_with_the_largest_likelihood_also_in_half_precision(self):
        truth = VonMisesFisher(unit(3, 16), torch.tensor([5.0, 50.0, 1e5]).double())
        x = truth.sample((20_000,))
        fitted, rounded = VonMisesFisher.fit(x.movedim(0, 1)), VonMisesFisher.fit((3 * x).half().movedim(0, 1))
        assert (fitted.concentration / truth.concentration - 1).abs().max() < 0.03
        assert (fitted.loc * truth.loc).sum(-1).min() > 0.999
        torch.testing.assert_close(rounded.concentration[:2].double(), fitted.concentration[:2], rtol=1e-3, atol=0)
        for factor in (0.99, 1.01):
            other = VonMisesFisher(fitted.loc, factor * fitted.concentration)
            assert (other.log_prob(x).sum(0) < fitted.log_prob(x).sum(0)).all()

    def test_identical_points_give_a_finite_concentration(self):
        x = unit(1, 6).expand(3, 6)
        with pytest.warns(UserWarning, match="1 of 1 sets are equal; their concentration is unbounded"):
            fitted = VonMisesFisher.fit(x)
        assert fitted.concentration.isfinite()
        assert fitted.log_prob(x).isfinite().all()

    @pytest.mark.parametrize("validate", [True, False])
    def test_balanced_points_are_uniform_without_affecting_the_batch(self, validate):
        axes = torch.eye(3).double()
        batch = torch.stack([torch.cat([axes, -axes]), torch.cat([axes, axes + 0.1])]).requires_grad_()
        try:
            Distribution.set_default_validate_args(validate)
            fitted = VonMisesFisher.fit(batch)
        finally:
            Distribution.set_default_validate_args(True)
        assert fitted.concentration[0] == 0
        assert VonMisesFisher.support.check(fitted.loc).all()
        torch.testing.assert_close(fitted.concentration[1], VonMisesFisher.fit(batch[1]).concentration)
        (gradient,) = torch.autograd.grad(fitted.concentration.sum() + fitted.loc.sum(), batch)
        assert gradient.isfinite().all()

    @pytest.mark.parametrize("points", [torch.empty(0, 3), torch.zeros(2, 3), torch.tensor([[math.nan, 1.0]])])
    def test_invalid_input_is_an_error(self, points):
        with pytest.raises(ValueError, match="n >= 1 and finite norms above 0"):
            VonMisesFisher.fit(points)
