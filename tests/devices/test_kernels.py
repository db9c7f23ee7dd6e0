"""Kernels that heads, means and distributions launch, and that two training steps launch the same."""

import pytest
import torch
from torch.nn.functional import normalize

from hf_sphere.distributions import VonMisesFisher
from hf_sphere.geometry import frechet_mean
from hf_sphere.geometry.bessel import means_from_natural_parameters, partition_and_ratio
from hf_sphere.nn import build_head

HEADS = {
    "softmax": 15,
    "cosine": 50,
    "cosface": 65,
    "arcface": 80,
    "subcenter_arcface": 110,
    "adaface": 120,
    "proxy_anchor": 75,
    "prototype": 55,
    "etf": 60,
    "angular": 75,
    "hyperbolic": 120,
    "spherized": 60,
    "vmf": 297,
}


@pytest.mark.parametrize(("name", "most"), HEADS.items())
def test_a_training_step_of_a_head_has_few_kernels_and_always_the_same(name, most, pretend):
    head = build_head(name, 32, 10)
    head.initialize_from_data(torch.randn(64, 32))
    head.to("pretend").train()
    labels, sequences = torch.arange(16) % 10, []
    labels[3] = -100
    for order in (labels, labels, labels.flip(0)):
        x, order = torch.randn(16, 32).to("pretend").requires_grad_(), order.to("pretend")
        head.zero_grad()
        with pretend.recorded_kernels() as kernels:
            head(x, order).loss.backward()
        sequences.append(kernels)
    assert len(sequences[1]) <= most
    assert sequences[1] == sequences[2]  # the first step of all also asks the device for float64
    if name == "vmf":
        head.eval()
        with torch.no_grad():
            for _ in range(2):
                pretend.reset()
                head(torch.randn(16, 32).to("pretend"))
        assert pretend.kernels() <= 150


@pytest.mark.parametrize(("dtype", "spread", "most"), [(torch.float32, 1.0, 300), (torch.float64, 2.0, 750)])
def test_a_frechet_mean_has_few_kernels(dtype, spread, most, pretend):
    torch.manual_seed(0)
    points = normalize(torch.randn(50, 16, dtype=dtype) * spread + 1, dim=-1).to("pretend")
    pretend.reset()
    frechet_mean(points)
    assert pretend.kernels() <= most


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
    loc = normalize(torch.randn(16, dim), dim=-1).to(device).requires_grad_()
    concentration = (50 * torch.rand(16) + 1).to(device).requires_grad_()

    def step() -> None:
        distribution = VonMisesFisher(loc, concentration, validate_args=False)
        points = distribution.rsample()
        (distribution.log_prob(points).sum() + distribution.entropy().sum()).backward()

    assert count(step) <= 350


@pytest.mark.parametrize("dim", [2, 16, 128])
def test_a_fit_takes_at_most_500_kernels(dim, device, count):
    points = normalize(torch.randn(50, dim) + 1, dim=-1).to(device)
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
