"""Kernels that heads, means and distributions launch, and that two training steps launch the same."""

from collections.abc import Callable
from functools import partial
from typing import Any

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
    "vmf": 276,
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
        assert pretend.kernels() <= 130


def sample(dim: int, device: str) -> Callable[[], None]:
    """Samples, density, entropy and gradient."""
    loc = normalize(torch.randn(16, dim), dim=-1).to(device).requires_grad_()
    concentration = (50 * torch.rand(16) + 1).to(device).requires_grad_()

    def step() -> None:
        distribution = VonMisesFisher(loc, concentration, validate_args=False)
        points = distribution.rsample()
        (distribution.log_prob(points).sum() + distribution.entropy().sum()).backward()

    return step


def mean(dtype: torch.dtype, spread: float, device: str) -> Callable[[], Any]:
    return partial(frechet_mean, normalize(torch.randn(50, 16, dtype=dtype) * spread + 1, dim=-1).to(device))


def fit(dim: int, device: str) -> Callable[[], Any]:
    return partial(VonMisesFisher.fit, normalize(torch.randn(50, dim) + 1, dim=-1).to(device))


def ratio(dim: int, device: str) -> Callable[[], Any]:
    return partial(partition_and_ratio, torch.rand(160, 10).to(device), dim)


def gradient(dim: int, device: str) -> Callable[[], Any]:
    vectors = torch.randn(16, dim).to(device).requires_grad_()
    return lambda: means_from_natural_parameters(vectors)[0].sum().backward()


@pytest.mark.parametrize(
    ("prepare", "most"),
    [
        (partial(mean, torch.float32, 1.0), 300),
        (partial(mean, torch.float64, 2.0), 750),
        *((partial(sample, dim), 350) for dim in (2, 3, 4, 5, 16, 128)),
        *((partial(fit, dim), 500) for dim in (2, 16, 128)),
        *((partial(ratio, dim), bound) for dim, bound in ((2, 32), (32, 26), (512, 24))),
        *((partial(gradient, dim), bound) for dim, bound in ((2, 54), (32, 46), (512, 44))),
    ],
    ids=lambda value: f"{value.func.__name__}-{value.args[0]}" if isinstance(value, partial) else None,
)
def test_means_and_distributions_have_few_kernels(prepare, most, pretend):
    call = prepare("pretend")
    call()  # copies constants
    pretend.reset()
    call()
    assert pretend.kernels() <= most


@pytest.mark.parametrize("dim", [2, 3, 4, 5, 32, 512])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 4e-15)])
def test_polynomials_evaluated_in_groups_match_the_cpu(dim, dtype, bound, device):
    square = torch.logspace(-6, 8, 200, dtype=dtype)
    for found, expected in zip(
        partition_and_ratio(square.to(device), dim), partition_and_ratio(square, dim), strict=True
    ):
        torch.testing.assert_close(found.cpu(), expected, rtol=bound, atol=0)
