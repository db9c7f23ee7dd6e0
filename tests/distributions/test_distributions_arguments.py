import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import kl_divergence, transform_to
from torch.func import vmap

from hf_sphere.distributions import HypersphericalUniform, PowerSpherical, VonMisesFisher, unit_vector

HALVES = [torch.float16, torch.bfloat16]


def unit(*shape: int, dtype=torch.float64) -> Tensor:
    return F.normalize(torch.randn(shape, dtype=dtype), dim=-1)


def make(dim: int, kappa: float, shape: tuple[int, ...] = ()) -> VonMisesFisher:
    return VonMisesFisher(unit(*shape, dim), torch.full(shape, kappa, dtype=torch.float64))


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
            "covariance": (half.covariance_matrix, full.covariance_matrix),
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

    @pytest.mark.parametrize("validate", [True, False])
    @pytest.mark.parametrize("kind", [HypersphericalUniform, VonMisesFisher, PowerSpherical])
    def test_an_axis_as_integers_has_the_density_of_the_same_numbers(self, kind, validate):
        axis, arguments = torch.tensor([0, 1, 0]), (3,) if kind is HypersphericalUniform else (unit(3).float(), 2.0)
        distribution = kind(*arguments, validate_args=validate)
        torch.testing.assert_close(distribution.log_prob(axis), distribution.log_prob(axis.float()))

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
