import math

import mpmath
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, strategies as st

from hf_sphere.hyperplanes.projections import mass_band, projection_cdf, sign_test

POINTS = np.linspace(-1, 1, 41)


def test_two_dimensions_follow_the_arcsine_law_and_three_the_uniform_law():
    np.testing.assert_allclose(projection_cdf(POINTS, 2), 0.5 + np.arcsin(POINTS) / math.pi, atol=1e-14)
    np.testing.assert_allclose(projection_cdf(POINTS, 3), (1 + POINTS) / 2, atol=1e-15)


@pytest.mark.parametrize("dim", [9, 576, 25_088, 10**7])
def test_the_cdf_matches_the_integrated_density(dim):
    """The density of the cosine is proportional to (1 - p^2)^((N-3)/2); integrated with 40 digits."""
    with mpmath.workdps(40):
        power = mpmath.mpf(dim - 3) / 2
        norm = mpmath.beta(mpmath.mpf(1) / 2, mpmath.mpf(dim - 1) / 2)
        for scaled in (-5, -1, -0.01, 0, 0.3, 2):
            p = scaled / math.sqrt(dim + 20)
            # quad over a finite interval in units of the standard deviation, starting at the mode, zero
            inside = mpmath.quad(lambda x: (1 - x**2) ** power, mpmath.linspace(0, p, 6)) / norm
            expected = float(mpmath.mpf(1) / 2 + inside)
            assert projection_cdf(np.array(p), dim) == pytest.approx(expected, rel=1e-8, abs=1e-13)


@pytest.mark.parametrize("dim", [2, 3, 4, 9])
def test_uniform_weights_nearly_follow_the_distribution(dim):
    weights = np.random.default_rng(dim).uniform(-1, 1, (200_000, dim))
    projections = weights.sum(1) / (np.linalg.norm(weights, axis=1) * math.sqrt(dim))
    distance = scipy.stats.kstest(projection_cdf(projections, dim), "uniform").statistic
    assert distance < 0.06 / dim + 0.003  # 0.003 is sampling error: the KS statistic at level 0.05 or so


@given(st.lists(st.sampled_from([-1.0, 0.0, 2.0]), max_size=60))
def test_the_sign_test_is_a_binomial_test_of_nonzero_values(values):
    negative, positive = values.count(-1.0), values.count(2.0)
    if negative + positive == 0:
        assert sign_test(np.array(values)) is None
    else:
        expected = scipy.stats.binomtest(negative, negative + positive).pvalue
        assert sign_test(np.array(values)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("count", [1, 6, 20, 64, 501])
def test_the_mass_band_is_the_narrowest_with_95_percent_coverage(count):
    low, high = mass_band(count)
    inside = [math.comb(count, k) * 0.5**count for k in range(count + 1) if low <= k / count <= high]
    narrower = [math.comb(count, k) * 0.5**count for k in range(count + 1) if low < k / count < high]
    assert sum(inside) >= 0.95
    assert sum(narrower) < 0.95
    assert low + high == pytest.approx(1)
    assert mass_band(0) == (None, None)
