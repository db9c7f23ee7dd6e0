"""Kernels that a training step launches, and that two steps launch the same."""

import pytest
import torch
from torch.nn.functional import normalize

from hf_sphere.geometry import frechet_mean
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
}


@pytest.mark.parametrize(("name", "most"), HEADS.items())
def test_a_training_step_of_a_head_has_few_kernels_and_always_the_same(name, most, pretend):
    head = build_head(name, 32, 10).to("pretend").train()
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


@pytest.mark.parametrize(("dtype", "spread", "most"), [(torch.float32, 1.0, 300), (torch.float64, 2.0, 750)])
def test_a_frechet_mean_has_few_kernels(dtype, spread, most, pretend):
    torch.manual_seed(0)
    points = normalize(torch.randn(50, 16, dtype=dtype) * spread + 1, dim=-1).to("pretend")
    pretend.reset()
    frechet_mean(points)
    assert pretend.kernels() <= most
