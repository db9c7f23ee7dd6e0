"""Generic tests of distributions, after what torch promises of every one of `torch.distributions`.

torch's own `test_distributions.py` is in neither of its distributions, so that the tests are written here. Two of
torch's distributions of vectors take them too, which shows that the tests are right. Seeds, validation, shapes,
gradients, transforms, moments and divergences are those of `tests/distributions`.
"""

import copy
import io
from typing import Any

import pytest
import torch
from torch.distributions import Dirichlet, Distribution, Independent, MultivariateNormal

from hf_sphere.distributions import HypersphericalUniform, PowerSpherical, VonMisesFisher

NOT_APPLICABLE = {
    "test_mode_has_the_largest_density[uniform*]": "all points have the same density; as in torch, the mode is nan"
}

DOUBLE = torch.float64
AXIS = torch.tensor([0.6, 0.0, 0.8], dtype=DOUBLE)
AXES = torch.nn.functional.normalize(torch.arange(1.0, 13.0, dtype=DOUBLE).reshape(2, 2, 3).cos(), dim=-1)
RATES = torch.tensor([[0.0, 0.5], [3.0, 200.0]], dtype=DOUBLE)

PARAMETERS: dict[str, tuple[type[Distribution], dict[str, Any]]] = {
    "vmf": (VonMisesFisher, {"loc": AXIS, "concentration": torch.tensor(2.5, dtype=DOUBLE)}),
    "vmf, batch": (VonMisesFisher, {"loc": AXES, "concentration": RATES}),
    "vmf, 8 axes": (
        VonMisesFisher,
        {"loc": torch.eye(8, dtype=DOUBLE)[0], "concentration": torch.tensor(9.0, dtype=DOUBLE)},
    ),
    "power": (PowerSpherical, {"loc": AXIS, "concentration": torch.tensor(2.5, dtype=DOUBLE)}),
    "power, batch": (PowerSpherical, {"loc": AXES, "concentration": RATES}),
    "uniform": (HypersphericalUniform, {"dim": 3, "dtype": DOUBLE}),
    "uniform, batch": (HypersphericalUniform, {"dim": 4, "batch_shape": (2, 2), "dtype": DOUBLE}),
    "torch's normal": (MultivariateNormal, {"loc": AXES, "covariance_matrix": torch.eye(3, dtype=DOUBLE) * 2}),
    "torch's dirichlet": (Dirichlet, {"concentration": AXES.abs() + 1}),
}
every_distribution = pytest.mark.parametrize("name", PARAMETERS)


def build(name: str, **options: Any) -> Any:
    kind, parameters = PARAMETERS[name]
    return kind(**parameters, **options)


def assert_same(ours: Distribution, other: Distribution) -> None:
    points = ours.sample((3,))
    assert (ours.batch_shape, ours.event_shape) == (other.batch_shape, other.event_shape)
    assert torch.equal(ours.log_prob(points), other.log_prob(points))


@every_distribution
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)], ids=str)
def test_expanded_distribution_is_the_same_in_every_entry(name: str, shape: tuple[int, ...]) -> None:
    distribution = build(name)
    expanded = distribution.expand(shape + distribution.batch_shape)
    assert type(expanded) is type(distribution)
    assert expanded.batch_shape == shape + distribution.batch_shape
    points = distribution.sample()
    expected = distribution.log_prob(points).expand(expanded.batch_shape)
    torch.testing.assert_close(expanded.log_prob(points), expected)
    for statistic in ("mean", "variance"):
        expected = getattr(distribution, statistic)
        torch.testing.assert_close(getattr(expanded, statistic), expected.expand(shape + expected.shape))
    assert expanded.sample().shape == expanded.batch_shape + expanded.event_shape
    assert expanded.expand(expanded.batch_shape).batch_shape == expanded.batch_shape


@every_distribution
def test_expansion_of_a_subclass_is_a_subclass(name: str) -> None:
    kind, parameters = PARAMETERS[name]
    subclass = type("Subclass", (kind,), {})
    assert type(subclass(**parameters).expand((2, 2, 2))) is subclass


@every_distribution
def test_copies_and_pickles_are_the_same(name: str) -> None:
    distribution = build(name)
    file = io.BytesIO()
    torch.save(distribution, file)
    file.seek(0)
    for other in (copy.deepcopy(distribution), torch.load(file, weights_only=False)):
        assert_same(distribution, other)


@every_distribution
def test_independent_sums_the_densities(name: str) -> None:
    distribution = build(name)
    axes = len(distribution.batch_shape)
    points = distribution.sample((3,))
    expected = distribution.log_prob(points).reshape(3, -1).sum(-1)
    torch.testing.assert_close(Independent(distribution, axes).log_prob(points), expected)


@every_distribution
def test_mode_has_the_largest_density(name: str) -> None:
    distribution = build(name)
    mode = distribution.mode
    assert distribution.support.check(mode).all()
    assert (distribution.log_prob(mode) >= distribution.log_prob(distribution.sample((500,))) - 1e-9).all()
