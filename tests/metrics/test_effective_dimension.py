import pytest
import torch
from hypothesis import given, strategies as st

from hf_sphere.metrics import effective_dimension


def plain(points):
    """The definition: eigenvalues of the covariance."""
    eigenvalues = torch.linalg.eigvalsh(torch.atleast_2d(torch.cov(points.T)))
    return (eigenvalues.sum() ** 2 / eigenvalues.square().sum()).item()


@given(seed=st.integers(0, 10**6), count=st.integers(2, 30), dim=st.integers(1, 12))
def test_the_effective_dimension_is_the_participation_ratio_of_the_eigenvalues(seed, count, dim):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, dim, dtype=torch.float64, generator=generator) + 3.0
    assert effective_dimension(points) == pytest.approx(plain(points))


def test_isotropic_equal_and_points_on_a_line_or_of_known_variances_have_a_known_dimension():
    for dim in (1, 2, 7):
        assert effective_dimension(torch.cat([torch.eye(dim), -torch.eye(dim)])) == pytest.approx(dim)
    for count in (1, 5):
        assert effective_dimension(torch.full((count, 3), 0.1)) == 0.0
    line = torch.linspace(-1, 1, 20)[:, None] * torch.tensor([1.0, -2.0, 0.5]) + torch.tensor([5.0, 0.0, 1.0])
    assert effective_dimension(line) == pytest.approx(1.0)
    points = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 3**0.5], [0.0, -(3**0.5)]])
    assert effective_dimension(points) == pytest.approx((3 + 1) ** 2 / (3**2 + 1**2))


def test_scale_and_mean_have_no_effect():
    points = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for scale in (1e-300, 1e-150, 1e150, 1e300):
        assert effective_dimension(scale * points) == pytest.approx(effective_dimension(points))
    assert effective_dimension(points + 1e6) == pytest.approx(effective_dimension(points), rel=1e-6)
