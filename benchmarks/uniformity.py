"""Measure how precise the gradients of the losses of uniformity are for their time.

python benchmarks/uniformity.py

Embeddings are Gaussian vectors, shifted or stretched along one axis, and the gradient is that of the shift or of the
logarithm of the stretch. Its relative variance is the variance over batches divided by the squared mean, so the product
with the time of a step is the time that a relative standard error of 1 takes, whatever the scale of a loss.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from common import report, row
from torch import Tensor, nn

from hf_sphere.losses import HeatKernelLoss, KoLeoLoss, SlicedUniformityLoss

LOSSES = {
    "HeatKernelLoss": HeatKernelLoss,
    "KoLeoLoss": KoLeoLoss,
    "SlicedUniformityLoss, 16 circles": lambda: SlicedUniformityLoss(16),
    "SlicedUniformityLoss, 64 circles": SlicedUniformityLoss,
    "SlicedUniformityLoss, 256 circles": lambda: SlicedUniformityLoss(256),
}
BATCH, DIMS, CHANGE = 256, (3, 16, 128), 0.3


def embeddings(noise: Tensor, kind: str, change: Tensor) -> Tensor:
    """Shift or stretch Gaussian vectors (B, d) along the first axis by as many standard deviations of the direction."""
    axis = torch.zeros_like(noise[:1])
    axis[0, 0] = noise.shape[1] ** 0.5
    return noise + change * axis if kind == "shift" else noise * (change * axis).exp()


def step_seconds(loss: nn.Module, x: Tensor) -> float:
    """Return the processor time of a step."""
    start = time.process_time()
    loss(x).backward()
    return time.process_time() - start


def gradients(loss: nn.Module, kind: str, dim: int, batches: int) -> list[float]:
    """Return the gradient by the change in independent batches."""
    torch.manual_seed(0)
    found = []
    for _ in range(batches):
        change = torch.tensor(CHANGE, requires_grad=True)
        loss(embeddings(torch.randn(BATCH, dim), kind, change)).backward()
        found.append(change.grad.item())
    return found


def main() -> None:
    """Measure all losses in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=200, help="batches of each setting")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for dim in DIMS:
        made = {name: make() for name, make in LOSSES.items()}
        x = torch.randn(BATCH, dim, requires_grad=True)
        for loss in made.values():
            loss(x).backward()  # computes its constants
        seconds = {name: statistics.median(step_seconds(loss, x) for _ in range(50)) for name, loss in made.items()}
        for name, loss in made.items():
            what = f"{name}, d = {dim}"
            rows.append(row(f"{what}: ms per step", 1000 * seconds[name]))
            for kind in ("shift", "stretch"):
                values = gradients(loss, kind, dim, options.batches)
                variance = statistics.variance(values) / statistics.mean(values) ** 2
                rows.append(row(f"{what}: relative variance, {kind}", variance))
                rows.append(row(f"{what}: relative variance times ms, {kind}", 1000 * variance * seconds[name]))
    report("uniformity", rows)


if __name__ == "__main__":
    main()
