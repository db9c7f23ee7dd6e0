import pytest
import torch
import torch.nn.functional as F

from hf_sphere.distributions import VonMisesFisher
from hf_sphere.geometry.bessel import means_from_natural_parameters, partition_and_ratio


@pytest.fixture
def count(pretend):
    """Count the kernels of a function, after a first call that copies constants."""

    def call(function) -> int:
        function()
        pretend.reset()
        function()
        return pretend.kernels()

    return call


@pytest.mark.parametrize("dim", [2, 3, 4, 5, 16, 128])
def test_samples_density_entropy_and_gradient_take_at_most_350_kernels(dim, device, count):
    loc = F.normalize(torch.randn(16, dim), dim=-1).to(device).requires_grad_()
    concentration = (50 * torch.rand(16) + 1).to(device).requires_grad_()

    def step() -> None:
        distribution = VonMisesFisher(loc, concentration, validate_args=False)
        points = distribution.rsample()
        (distribution.log_prob(points).sum() + distribution.entropy().sum()).backward()

    assert count(step) <= 350


@pytest.mark.parametrize("dim", [2, 16, 128])
def test_a_fit_takes_at_most_500_kernels(dim, device, count):
    points = F.normalize(torch.randn(50, dim) + 1, dim=-1).to(device)
    assert count(lambda: VonMisesFisher.fit(points)) <= 500


@pytest.mark.parametrize(("dim", "bound"), [(2, 32), (32, 26), (512, 24)])
def test_log_partition_and_ratio_take_few_kernels(dim, bound, device, count):
    square = torch.rand(160, 10).to(device)
    assert count(lambda: partition_and_ratio(square, dim)) <= bound


@pytest.mark.parametrize(("dim", "bound"), [(2, 54), (32, 46), (512, 44)])
def test_means_and_their_gradient_take_few_kernels(dim, bound, device, count):
    vectors = torch.randn(16, dim).to(device).requires_grad_()
    assert count(lambda: means_from_natural_parameters(vectors)[0].sum().backward()) <= bound


@pytest.mark.parametrize("dim", [2, 3, 4, 5, 32, 512])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 4e-15)])
def test_polynomials_evaluated_in_groups_match_the_cpu(dim, dtype, bound, device):
    square = torch.logspace(-6, 8, 200, dtype=dtype)
    for found, expected in zip(
        partition_and_ratio(square.to(device), dim), partition_and_ratio(square, dim), strict=True
    ):
        torch.testing.assert_close(found.cpu(), expected, rtol=bound, atol=0)
