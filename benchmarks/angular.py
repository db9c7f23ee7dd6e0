"""Run time of the angular operators, compared with plain layers and with patch norms by a convolution with ones.

python benchmarks/angular.py
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import ratio, report, row, time_in_turn
from torch import Tensor, nn

from hf_sphere.geometry import OPERATORS
from hf_sphere.nn import AngularConv2d, AngularLinear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMAGES = 256 if DEVICE == "cuda" else 8
STAGES = {"128 channels, 32 px": (128, 32), "192 channels, 16 px": (192, 16), "256 channels, 8 px": (256, 8)}
"""The convolutions of CNN9."""


def both_ways(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    """Return a function that runs a forward and a backward pass."""
    x = x.detach().clone().requires_grad_()
    gradient = torch.randn_like(function(x))

    def run() -> None:
        x.grad = None
        function(x).backward(gradient)

    return run


def measure_lengths() -> list[dict]:
    """Time the norms of all patches, compared with a convolution of ones with the same number of filters."""
    rows = []
    for what, (channels, side) in STAGES.items():
        x = torch.relu(torch.randn(IMAGES, channels, side, side, device=DEVICE))
        layer = AngularConv2d(channels, channels, 3, padding=1).to(DEVICE)
        ones = torch.ones_like(layer.weight)

        def by_ones(x: Tensor, ones: Tensor = ones) -> Tensor:
            return (F.conv2d(x.square(), ones, padding=1) + 1e-4).sqrt()

        torch.testing.assert_close(layer._patch_norms(x).float(), by_ones(x)[:, :1], rtol=1e-3, atol=1e-2)
        seconds = time_in_turn({"ours": both_ways(layer._patch_norms, x), "ones": both_ways(by_ones, x)}, rounds=5)
        quotient = ratio(seconds["ones"], seconds["ours"])
        rows.append(row(f"lengths: convolution with ones / ours, {what}", quotient, at_least=5))
    return rows


def measure_layers() -> list[dict]:
    """Time all operators, compared with the first linear layer of CNN9 and a convolution of its second stage."""
    channels, side = STAGES["192 channels, 16 px"]
    pairs = {
        "Linear(4096, 256)": (
            nn.Linear(4096, 256, bias=False),
            lambda operator: AngularLinear(4096, 256, operator),
            torch.randn(128, 4096, device=DEVICE),
        ),
        "Conv2d(192, 192, 3)": (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            lambda operator: AngularConv2d(channels, channels, 3, operator, padding=1),
            torch.randn(IMAGES, channels, side, side, device=DEVICE),
        ),
    }
    rows = []
    for what, (plain, build, x) in pairs.items():
        layers = {"plain": plain, **{operator: build(operator) for operator in OPERATORS}}
        seconds = time_in_turn({name: both_ways(layer.to(DEVICE), x) for name, layer in layers.items()}, rounds=5)
        rows += [row(f"{name} / {what}, time", ratio(seconds[name], seconds["plain"])) for name in OPERATORS]
    return rows


if __name__ == "__main__":
    report("angular", [*measure_lengths(), *measure_layers()])
