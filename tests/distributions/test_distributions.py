import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clustered import other_unit as unit
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributions import VonMises, kl_divergence, transform_to
from torch.func import vmap

from hf_sphere.distributions import HypersphericalUniform, PowerSpherical, VonMisesFisher, unit_vector
from hf_sphere.geometry.bessel import log_uniform_density, mean_resultant_length, mean_resultant_length_derivative

DRAWS = 50_000
HALVES = [torch.float16, torch.bfloat16]
KAPPAS = [0.0, 0.4, 3.0, 25.0]


def make(dim: int, kappa: float, shape: tuple[int, ...] = (), dtype=torch.float64) -> VonMisesFisher:
    return VonMisesFisher(unit(*shape, dim, dtype=dtype), torch.full(shape, kappa, dtype=dtype))


def quadrature(dim: int) -> tuple[Tensor, Tensor]:
    """Return quadrature points on the circle or sphere and their weights; exact for smooth functions."""
    turns = torch.arange(400, dtype=torch.float64) * (2 * math.pi / 400)
    circle = torch.stack([turns.cos(), turns.sin()], dim=-1)
    if dim == 2:
        return circle, torch.full((400,), 2 * math.pi / 400, dtype=torch.float64)
    heights, weights = map(torch.from_numpy, np.polynomial.legendre.leggauss(120))
    across = (1 - heights.square()).sqrt()[:, None, None] * circle
    points = torch.cat([across, heights[:, None, None].expand(120, 400, 1)], dim=-1)
    return points.flatten(0, 1), (weights[:, None] * (2 * math.pi / 400)).expand(120, 400).flatten()


def integral(dim: int, function) -> Tensor:
    points, areas = quadrature(dim)
    return (areas * function(points)).sum()


class TestDensity:
    @pytest.mark.parametrize("kappa", KAPPAS)
    def test_circle_matches_torch(self, kappa):
        center, angles = torch.tensor(0.7, dtype=torch.float64), torch.linspace(-3, 3, 50, dtype=torch.float64)
        mean, points = (torch.stack([a.cos(), a.sin()], dim=-1) for a in (center, angles))
        theirs = VonMises(center, torch.tensor(max(kappa, 1e-12), dtype=torch.float64))
        ours = VonMisesFisher(mean, kappa).log_prob(points)
        torch.testing.assert_close(ours, theirs.log_prob(angles), rtol=1e-6, atol=1e-6)

    def test_values_broadcast_over_samples_and_batch(self):
        distribution = make(4, 3.0, (2, 3))
        values = unit(7, 1, 3, 4)
        found = distribution.log_prob(values)
        assert found.shape == (7, 2, 3)
        for row, column in [(0, 2), (1, 0)]:
            alone = VonMisesFisher(distribution.loc[row, column], distribution.concentration[row, column])
            torch.testing.assert_close(found[:, row, column], alone.log_prob(values[:, 0, column]))

    def test_it_passes_gradcheck(self):
        concentration = torch.tensor([0.0, 2.0, 40.0], dtype=torch.float64, requires_grad=True)
        loc, value = unit(3, 5).requires_grad_(), unit(3, 5).requires_grad_()

        def density(*given: Tensor) -> Tensor:
            loc, concentration, value = given
            return VonMisesFisher(loc, concentration, validate_args=False).log_prob(value)

        assert torch.autograd.gradcheck(density, (loc, concentration, value))
        assert torch.autograd.gradgradcheck(density, (loc, concentration, value))


class TestMoments:
    @pytest.mark.parametrize("kappa", [*KAPPAS, 300.0])
    @pytest.mark.parametrize("dim", [2, 3])
    def test_they_match_the_integrals(self, dim, kappa):
        distribution = make(dim, kappa)
        points, areas = quadrature(dim)
        weights = areas * distribution.log_prob(points).exp()
        mean = weights @ points
        covariance = (weights[:, None] * points).T @ points - mean[:, None] * mean
        entropy = -(weights * distribution.log_prob(points)).sum()
        assert weights.sum().item() == pytest.approx(1, rel=1e-12)
        assert distribution.log_prob(points).max() <= distribution.log_prob(distribution.mode) + 1e-9
        for found, expected in [
            (distribution.mean, mean),
            (distribution.variance, covariance.diagonal()),
            (distribution.entropy(), entropy),
        ]:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize(("dim", "kappa"), [(4, 0.0), (4, 5.0), (16, 12.0), (16, 400.0)])
    def test_they_match_samples(self, dim, kappa):
        distribution = make(dim, kappa)
        points = distribution.sample((DRAWS,))
        away = points - distribution.mean
        terms = distribution.log_prob(points)
        for draws, expected in [
            (away, torch.zeros(dim, dtype=torch.float64)),
            (away.square(), distribution.variance),
            (-terms, distribution.entropy()),
        ]:
            bound = 5.5 * draws.std(dim=0) / DRAWS**0.5 + 1e-12
            assert ((draws.mean(dim=0) - expected).abs() < bound).all()

    @pytest.mark.parametrize("dim", [2, 5, 512])
    @pytest.mark.parametrize("kappa", [0.0, 3.0, 1e4])
    def test_variances_add_up_to_one_minus_the_squared_length(self, dim, kappa):
        distribution = make(dim, kappa, (3,))
        total = 1 - distribution.mean_resultant_length.square()
        torch.testing.assert_close(distribution.variance.sum(-1), total, rtol=1e-10, atol=1e-16)
        torch.testing.assert_close(distribution.stddev.square(), distribution.variance)

    @pytest.mark.parametrize("name", ["mean", "variance", "mean_resultant_length"])
    def test_they_pass_gradcheck(self, name):
        loc = unit(3, 4).requires_grad_()
        concentration = torch.tensor([0.5, 3.0, 40.0], dtype=torch.float64, requires_grad=True)

        def moment(*given: Tensor) -> Tensor:
            return getattr(VonMisesFisher(*given, validate_args=False), name)

        inputs = (loc, concentration) if moment(loc, concentration).ndim > 1 else (loc.detach(), concentration)
        assert torch.autograd.gradcheck(moment, inputs)


class TestSampling:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("kappa", [0.0, 3.0, 1e4, 1e8])
    @pytest.mark.parametrize("dim", [2, 3, 128])
    def test_samples_have_unit_norm_and_lie_in_the_support(self, dim, kappa, dtype):
        distribution = make(dim, kappa, dtype=dtype)
        points = distribution.rsample((20_000,))
        assert points.dtype == dtype
        assert (points.double().norm(dim=-1) - 1).abs().max() < 16 * torch.finfo(dtype).eps
        assert distribution.log_prob(points).isfinite().all()

    def test_mean_gradient_of_a_loss_matches_the_gradient_of_its_mean(self):
        # E |x - a|^2 = 2 - 2 A mu.a
        raw, kappa = unit(6).requires_grad_(), torch.tensor(4.0, dtype=torch.float64, requires_grad=True)
        target = unit(6)
        mean = F.normalize(raw, dim=0)
        points = VonMisesFisher(mean, kappa, validate_args=False).rsample((DRAWS,))
        found = torch.autograd.grad((points - target).square().sum(-1).mean(), (raw, kappa), retain_graph=True)
        expected = torch.autograd.grad(2 - 2 * mean_resultant_length(kappa, 6) * (mean @ target), (raw, kappa))
        # Derivatives of one sample are below 3: five standard errors
        torch.testing.assert_close(found, expected, rtol=0, atol=5 * 3 / DRAWS**0.5)

    @pytest.mark.parametrize("shape", [(), (7,), (2, 0), (2, 3)])
    def test_sample_axes_precede_batch_axes(self, shape):
        assert make(4, 3.0, (5, 1)).rsample(shape).shape == (*shape, 5, 1, 4)

    def test_generator_and_global_seed_make_samples_reproducible(self):
        before = torch.get_rng_state()
        for distribution in (VonMisesFisher(torch.eye(5)[0], 3.0), HypersphericalUniform(5)):
            draws = [distribution.rsample((9,), torch.Generator().manual_seed(seed)) for seed in (7, 7, 8)]
            assert torch.equal(draws[0], draws[1])
            assert not torch.equal(draws[0], draws[2])
            assert torch.equal(torch.get_rng_state(), before)
        for distribution in (make(5, 3.0), HypersphericalUniform(5)):
            draws = []
            for seed in (3, 3, 4):
                torch.manual_seed(seed)
                draws.append(distribution.sample((9,)))
            assert torch.equal(draws[0], draws[1])
            assert not torch.equal(draws[0], draws[2])

    def test_all_calls_compile_once_for_all_batch_sizes_and_draw_from_the_same_distribution(self):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")

        @torch.compile(fullgraph=True, backend=counter)
        def total(loc: Tensor, concentration: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
            distribution = VonMisesFisher(loc, concentration, validate_args=False)
            return distribution.rsample(), distribution.log_prob(points) + distribution.entropy()

        for ends in (torch.linspace(0.0, 99.0, 7), torch.full((20_000,), 4.0)):
            loc, points = unit(5).expand(len(ends), 5).clone(), unit(len(ends), 5)
            concentration = ends.double().requires_grad_()
            for each in (loc, concentration, points):
                torch._dynamo.mark_dynamic(each, 0)
            draws, values = total(loc, concentration, points)
            cosines = (draws * loc).sum(-1)
            (slopes,) = torch.autograd.grad(values.sum() + cosines.sum(), concentration)
            distribution = VonMisesFisher(loc, concentration)
            expected = distribution.log_prob(points) + distribution.entropy()
            torch.testing.assert_close(values, expected)
            slopes = slopes - torch.autograd.grad(expected.sum(), concentration)[0]
            assert slopes.isfinite().all()
        assert counter.frame_count == 1
        for found, exact in (
            (cosines.detach(), mean_resultant_length(concentration, 5)),
            (slopes, mean_resultant_length_derivative(concentration, 5)),
        ):
            assert (found.mean() - exact[0]).abs() < 4 * found.std() / 20_000**0.5


class TestHugeConcentrations:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("dim", [2, 3, 64, 4096])
    def test_values_and_gradients_are_finite_up_to_the_largest_float(self, dim, dtype):
        axes = torch.eye(dim, dtype=dtype)[[0, 0, 0, 0]] * torch.tensor([[1], [1], [1], [-1]])
        spread = [1e10, torch.finfo(dtype).max ** 0.6, torch.finfo(dtype).max, torch.finfo(dtype).max]
        kappa = torch.tensor(spread, dtype=dtype, requires_grad=True)
        loc = axes.requires_grad_()
        p, q = VonMisesFisher(loc, kappa), VonMisesFisher(loc.flip(0), kappa.flip(0))
        uniform = HypersphericalUniform(dim, dtype=dtype)
        results = [p.log_prob(unit(4, dim, dtype=dtype)), p.log_prob(-loc.detach()), p.entropy(), p.mean, p.variance]
        results += [kl_divergence(*pair) for pair in ((p, q), (p, uniform))]
        for result in [*results, p.rsample()]:
            assert result.isfinite().all()
            for gradient in torch.autograd.grad(result.mean(), (loc, kappa), retain_graph=True, allow_unused=True):
                assert gradient is None or gradient.isfinite().all()

    def test_entropy_and_divergence_match_the_normal_distribution(self):
        for dim, kappa in [(2, 1e12), (3, 1e20), (64, 1e30)]:
            normal = 0.5 * (dim - 1) * math.log(2 * math.pi * math.e / kappa)
            assert make(dim, kappa).entropy().item() == pytest.approx(normal, rel=1e-9)
        loc = unit(3)
        p, q = VonMisesFisher(loc, 1e20), VonMisesFisher(loc, 4e20)
        assert kl_divergence(p, q).item() == pytest.approx(3 - math.log(4), rel=1e-12)


class TestDivergence:
    @pytest.mark.parametrize("kappas", [(0.0, 3.0), (3.0, 0.0), (3.0, 25.0), (25.0, 0.4), (8.0, 8.0)])
    @pytest.mark.parametrize("dim", [2, 3])
    def test_it_matches_the_integral(self, dim, kappas):
        p, q = (make(dim, kappa) for kappa in kappas)
        uniform = HypersphericalUniform(dim)
        for first, second in [(p, q), (p, uniform)]:
            expected = integral(dim, lambda x, p=first, q=second: p.log_prob(x).exp() * (p.log_prob(x) - q.log_prob(x)))
            assert kl_divergence(first, second).item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)

    @pytest.mark.parametrize("dim", [5, 64])
    def test_it_matches_the_sample_mean(self, dim):
        near = F.normalize(unit(dim) + torch.tensor(0.1), dim=0)
        p, q = VonMisesFisher(near, 9.0), VonMisesFisher(unit(dim), 20.0)
        uniform = HypersphericalUniform(dim, dtype=torch.float64)
        for first, second in [(p, q), (p, uniform)]:
            points = first.sample((DRAWS,))
            terms = first.log_prob(points) - second.log_prob(points)
            assert (terms.mean() - kl_divergence(first, second)).abs() < 4.5 * terms.std() / DRAWS**0.5

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("dim", [2, 16, 2048])
    def test_divergence_to_itself_is_zero(self, dim, dtype):
        p = VonMisesFisher(unit(4, dim, dtype=dtype), torch.tensor([0.0, 1.0, 60.0, 1e5], dtype=dtype))
        uniform = HypersphericalUniform(dim, dtype=dtype)
        assert not kl_divergence(p, p).any()
        assert not kl_divergence(p, uniform)[0].any()

    def test_batches_broadcast(self):
        p, q = make(4, 3.0, (5, 1)), make(4, 9.0, (3,))
        uniform = HypersphericalUniform(4, (5, 1), dtype=torch.float64)
        assert kl_divergence(p, q).shape == (5, 3)
        assert kl_divergence(q, uniform).shape == (5, 3)
        power = PowerSpherical(unit(5, 1, 4), torch.full((5, 1), 3.0))
        assert kl_divergence(power, HypersphericalUniform(4, (3,))).shape == (5, 3)

    @pytest.mark.parametrize("dim", [3, 128, 512, 4096])
    def test_float32_is_accurate_despite_large_areas(self, dim):
        found, expected = [], []
        for values, dtype in [(found, torch.float32), (expected, torch.float64)]:
            mean = torch.eye(dim, dtype=dtype)[0]
            p, q = VonMisesFisher(mean, 10.0), VonMisesFisher(mean, 12.0)
            uniform = HypersphericalUniform(dim, dtype=dtype)
            values += [kl_divergence(*pair).double() for pair in [(p, q), (p, uniform)]]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)

    def test_it_passes_gradcheck(self):
        locs = unit(2, 3, 4).requires_grad_()
        concentrations = torch.tensor([[0.0, 3.0, 40.0], [2.0, 3.0, 9.0]], dtype=torch.float64, requires_grad=True)

        def divergence(locs: Tensor, concentrations: Tensor) -> Tensor:
            p, q = (VonMisesFisher(locs[i], concentrations[i], validate_args=False) for i in range(2))
            return kl_divergence(p, q) + kl_divergence(p, HypersphericalUniform(4))

        # Normalized, so that the inner product is the cosine.
        assert torch.autograd.gradcheck(lambda x, k: divergence(F.normalize(x, dim=-1), k), (locs, concentrations))

    def test_different_dimensions_are_an_error(self):
        vmf, uniform = make(3, 1.0), HypersphericalUniform(5)
        for first, second in [(vmf, make(5, 1.0)), (vmf, uniform), (PowerSpherical(unit(3), 1.0), uniform)]:
            with pytest.raises((ValueError, RuntimeError), match=r"equal dimensions; the .* 3 and 5|must match the"):
                kl_divergence(first, second)


class TestUniform:
    @pytest.mark.parametrize("dim", [2, 3, 64])
    def test_mean_variance_and_entropy_match_samples(self, dim):
        distribution = HypersphericalUniform(dim, dtype=torch.float64)
        points = distribution.sample((DRAWS,))
        assert (points.norm(dim=-1) - 1).abs().max() < 1e-14
        assert (points.mean(dim=0).abs() < 5 * (1 / dim / DRAWS) ** 0.5).all()
        squares = points.square()
        assert ((squares.mean(dim=0) - distribution.variance).abs() < 5 * squares.std(dim=0) / DRAWS**0.5).all()
        assert not distribution.mean.any()
        assert distribution.entropy().item() == pytest.approx(-log_uniform_density(dim), rel=1e-15)

    @pytest.mark.parametrize("kind", [VonMisesFisher, PowerSpherical])
    @pytest.mark.parametrize("dim", [2, 3, 128, 4096])
    def test_a_zero_concentration_is_uniform_also_at_the_antipode(self, dim, kind):
        zero, uniform = kind(unit(2, dim), torch.zeros(2).double()), HypersphericalUniform(dim, (2,))
        points = torch.stack([unit(2, dim), zero.loc, -zero.loc])
        torch.testing.assert_close(zero.log_prob(points), uniform.log_prob(points), rtol=1e-14, atol=0)
        torch.testing.assert_close(zero.variance.float(), uniform.variance)

    def test_shapes_follow_the_batch(self):
        distribution = HypersphericalUniform(3, (2,))
        wide = distribution.expand((4, 2))
        for each, batch in [(distribution, (2,)), (wide, (4, 2))]:
            assert isinstance(each, HypersphericalUniform)
            assert each.rsample((5,)).shape == (5, *batch, 3)
            assert each.mean.shape == each.variance.shape == (*batch, 3)
            assert each.entropy().shape == each.log_prob(unit(3)).shape == batch
            assert each.log_prob(unit(5, *batch, 3)).shape == (5, *batch)


@pytest.mark.parametrize("shape", [(5,), (1,), (2, 5)])
@pytest.mark.parametrize("kind", [VonMisesFisher, PowerSpherical])
def test_a_concentration_with_the_last_axis_of_loc_is_an_error(kind, shape):
    loc = torch.nn.functional.normalize(torch.randn(*shape, 4), dim=-1)
    with pytest.raises(ValueError, match=r"concentration must have the batch shape .*\.squeeze\(-1\)"):
        kind(loc, torch.ones(*shape, 1))
    assert kind(loc[..., None, :], torch.ones(3)).batch_shape == (*shape, 3)  # all pairs, on purpose


def test_packed_bits_are_an_error():
    with pytest.raises(TypeError, match="can be coordinates or packed bits"):
        VonMisesFisher.fit(torch.ones(3, 3, dtype=torch.uint8))


class TestExpand:
    def test_expand_repeats_parameters(self):
        distribution = make(4, 3.0, (3, 1))
        wide = distribution.expand((2, 3, 5))
        assert isinstance(wide, VonMisesFisher)
        assert (wide.batch_shape, wide.event_shape) == ((2, 3, 5), (4,))
        assert wide.rsample((6,)).shape == (6, 2, 3, 5, 4)
        value = unit(4)
        expected = distribution.log_prob(value).expand(2, 3, 5)
        torch.testing.assert_close(wide.log_prob(value), expected)
        for name in ("mean", "variance", "mode"):
            torch.testing.assert_close(getattr(wide, name), getattr(distribution, name).expand(2, 3, 5, 4))
        torch.testing.assert_close(wide.entropy(), distribution.entropy().expand(2, 3, 5))
        for validate in (True, False):
            for each in (VonMisesFisher(value, 3.0, validate), HypersphericalUniform(4, validate_args=validate)):
                assert each.expand((2,))._validate_args is validate

    def test_expanded_copies_are_sampled_independently_and_other_shapes_an_error(self):
        points = make(4, 3.0).expand((2,)).rsample()
        assert not torch.equal(points[0], points[1])
        with pytest.raises(RuntimeError, match="expand"):
            make(4, 3.0, (3,)).expand((2,))


class TestPrecision:
    @pytest.mark.parametrize("dtype", HALVES)
    def test_half_precision_is_computed_in_float32_and_rounded_once(self, dtype):
        loc = unit(4, 16).to(dtype)
        concentration = torch.tensor([0.0, 3.0, 40.0, 500.0], dtype=dtype)
        half, full = (
            VonMisesFisher(loc.to(t), concentration.to(t), validate_args=False) for t in (dtype, torch.float32)
        )
        uniform = HypersphericalUniform(16, dtype=torch.float32)
        value = half.sample()
        pairs = {
            "log_prob": (half.log_prob(value), full.log_prob(value.float())),
            "entropy": (half.entropy(), full.entropy()),
            "variance": (half.variance, full.variance),
            "divergence": (kl_divergence(half, half.expand((4, 4))), kl_divergence(full, full.expand((4, 4)))),
            "to uniform": (kl_divergence(half, HypersphericalUniform(16, dtype=dtype)), kl_divergence(full, uniform)),
        }  # fmt: skip
        found = {name: value for name, (value, _) in pairs.items()}
        expected = {name: value.to(dtype) for name, (_, value) in pairs.items()}
        torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert uniform.log_prob(value).dtype == torch.float32  # the wider one

    @pytest.mark.parametrize("dtype", HALVES)
    @pytest.mark.parametrize("kappa", [0.0, 40.0, 3e4])
    def test_half_precision_samples_are_rounded_float32_samples(self, kappa, dtype):
        loc = unit(16).to(dtype)
        half, full = (
            VonMisesFisher(loc.to(t), torch.tensor(kappa, dtype=dtype).to(t), validate_args=False)
            for t in (dtype, torch.float32)
        )
        drawn = [d.rsample((50,), torch.Generator().manual_seed(0)) for d in (half, full)]
        assert torch.equal(drawn[0], drawn[1].to(dtype))
        assert half.support.check(drawn[0]).all()

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
    def test_uniform_samples_and_moments_have_the_given_dtype(self, dtype):
        distribution = HypersphericalUniform(3, dtype=dtype)
        points = distribution.rsample((50,))
        for values in (points, distribution.mean, distribution.variance, distribution.entropy()):
            assert values.dtype == dtype
        assert distribution.support.check(points).all()
        assert HypersphericalUniform(3).sample().dtype == torch.get_default_dtype()

    def test_autocast_does_not_lower_the_precision(self):
        loc, concentration = (
            unit(4, 16, dtype=torch.float32).requires_grad_(),
            torch.full((4,), 30.0, requires_grad=True),
        )
        value, results = unit(4, 16, dtype=torch.float32), []
        for enabled in (True, False):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                distribution = VonMisesFisher(loc, concentration, validate_args=False)
                points = distribution.rsample((3,), torch.Generator().manual_seed(0))
                values = [points, distribution.log_prob(value), distribution.entropy(), distribution.variance]
                values += [kl_divergence(distribution, HypersphericalUniform(16))]
            results.append([*values, *torch.autograd.grad(sum(v.sum() for v in values), (loc, concentration))])
        assert all(map(torch.equal, *results))

    def test_vmap_over_distributions_matches_a_batch(self):
        loc, value = unit(3, 5), unit(3, 5)
        concentration = torch.tensor([0.0, 2.0, 40.0], dtype=torch.float64)

        def density(loc: Tensor, concentration: Tensor, value: Tensor) -> Tensor:
            return VonMisesFisher(loc, concentration, validate_args=False).log_prob(value)

        torch.testing.assert_close(vmap(density)(loc, concentration, value), density(loc, concentration, value))


class TestValidation:
    def test_parameters_and_values_off_their_domain_are_rejected_if_they_are_checked(self):
        axis = torch.eye(3)[0]
        for kappa in (-1.0, math.nan):
            with pytest.raises(ValueError, match="parameter concentration"):
                VonMisesFisher(axis, torch.tensor([1.0, kappa]), validate_args=True)
            VonMisesFisher(axis, torch.tensor([1.0, kappa]), validate_args=False)
        for loc in ([1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [math.nan, 0.0, 0.0], [1.001, 0.0, 0.0]):
            with pytest.raises(ValueError, match="parameter loc"):
                VonMisesFisher(torch.tensor(loc), 1.0, validate_args=True)
            VonMisesFisher(torch.tensor(loc), 1.0, validate_args=False)
        for value in (torch.tensor([0.9, 0.0, 0.0]), torch.tensor([math.nan, 0.0, 1.0])):
            for kind, arguments in ((VonMisesFisher, (axis, 1.0)), (HypersphericalUniform, (3,))):
                with pytest.raises(ValueError, match="within the support"):
                    kind(*arguments, validate_args=True).log_prob(value)
                kind(*arguments, validate_args=False).log_prob(value)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
    def test_unit_vectors_of_any_precision_are_accepted(self, dtype):
        distribution = VonMisesFisher(unit(50, 300).to(dtype), 10.0, validate_args=True)
        assert distribution.log_prob(distribution.sample()).isfinite().all()

    @pytest.mark.parametrize(
        ("build", "error", "message"),
        [
            (
                lambda: VonMisesFisher(torch.eye(3)[0], 1.0, True).log_prob(torch.eye(4)[0]),
                ValueError,
                "right-most size",
            ),
            (lambda: VonMisesFisher(torch.tensor(1.0), 1.0), ValueError, r"d of at least 2; got \(\)"),
            (lambda: VonMisesFisher(torch.ones(4, 1), 1.0), ValueError, r"d of at least 2; got \(4, 1\)"),
            (lambda: VonMisesFisher(unit(2, 3), torch.ones(5)), RuntimeError, "broadcast"),
            (lambda: VonMisesFisher(torch.tensor([1, 0, 0]), 0.5), TypeError, "float"),
            (lambda: HypersphericalUniform(3, dtype=torch.int64), TypeError, "float"),
            (lambda: HypersphericalUniform(1), ValueError, "dim must be an integer of at least 2; got 1"),
            (lambda: HypersphericalUniform(2.5), ValueError, "dim must be an integer of at least 2; got 2.5"),
        ],
    )
    def test_bad_input_is_refused(self, build, error, message):
        with pytest.raises(error, match=message):
            build()


class TestTransform:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
    def test_unconstrained_values_become_valid_mean_directions(self, dtype):
        transform = transform_to(VonMisesFisher.arg_constraints["loc"])
        raw = (1e-20 * torch.randn(5, 4)).to(dtype if dtype != torch.float16 else torch.float32)
        loc = transform(raw)
        VonMisesFisher(loc, 3.0, validate_args=True)
        torch.testing.assert_close(transform(transform.inv(loc)), loc)
        assert transform == transform_to(HypersphericalUniform.support)

    def test_it_passes_gradcheck(self):
        assert torch.autograd.gradcheck(transform_to(unit_vector), torch.randn(3, 4).double().requires_grad_())
