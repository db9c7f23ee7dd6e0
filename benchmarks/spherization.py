"""Speed, memory and accuracy of `spherize`.

python benchmarks/spherization.py
"""

import math
import subprocess
import sys

import torch
from common import ratio, report, row, time_in_turn
from torch import Tensor, nn

from hf_sphere.geometry import spherize

ROWS, FEATURES = 1024, 3072
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def dense_spherize(x: Tensor, triangle: Tensor, scaling: float = 1.0, radius: float = 1.0) -> Tensor:
    """Spherize with sums of log-sines computed by an (n+1) x (n+1) triangular matrix."""
    low = math.asin(1e-6 ** (1 / x.shape[-1]))
    angles = (math.pi / 2 - low) * torch.sigmoid(scaling * x) + low
    log_sines = torch.log(torch.sin(angles))
    padded = torch.cat([torch.zeros_like(log_sines[:, :1]), log_sines], dim=-1)
    cosines = torch.cat([torch.cos(angles), torch.ones_like(log_sines[:, :1])], dim=-1)
    return radius * cosines * torch.exp(padded @ triangle)


def measure_speed() -> list[dict]:
    """Time forward and backward passes of the three implementations, interleaved."""
    x = torch.randn(ROWS, FEATURES, device=DEVICE, requires_grad=True)
    wide, narrow = torch.randn(ROWS, FEATURES + 1, device=DEVICE), torch.randn(ROWS, FEATURES, device=DEVICE)
    triangle = torch.ones(FEATURES + 1, FEATURES + 1, device=DEVICE).triu()
    linear = nn.Linear(FEATURES, FEATURES, device=DEVICE)

    def backward(output: Tensor, gradient: Tensor) -> None:
        x.grad = None
        linear.zero_grad()
        output.backward(gradient)

    compiled = torch.compile(spherize)
    on_gpu = {} if DEVICE == "cpu" else {"compiled": lambda: backward(compiled(x), wide)}
    seconds = time_in_turn(
        {
            **on_gpu,
            "spherize": lambda: backward(spherize(x), wide),
            "dense": lambda: backward(dense_spherize(x, triangle), wide),
            "linear": lambda: backward(linear(x), narrow),
            # reads x and the gradient of the output, and writes the output and the gradient of x
            "copies": lambda: (x.detach().clone(), wide.clone()),
        }
    )
    at_most = 0.25 if DEVICE == "cpu" else None
    return [
        row("dense triangular form / spherize, time", ratio(seconds["dense"], seconds["spherize"]), at_least=12),
        row("spherize / Linear(3072, 3072), time", ratio(seconds["spherize"], seconds["linear"]), at_most=at_most),
        row("spherize forward + backward, ms", 1e3 * min(seconds["spherize"])),
        row(
            "spherize forward + backward / reading and writing its tensors once",
            ratio(seconds["spherize"], seconds["copies"]),
            at_most=4,
        ),
        *(
            row(
                f"{name} spherize forward + backward / reading and writing its tensors once",
                ratio(seconds[name], seconds["copies"]),
                at_most=4,
            )
            for name in on_gpu
        ),
    ]


def measure_bandwidth() -> list[dict]:
    """Compare the compiled map on a GPU to a copy, which reads and writes as many numbers; both exceed the cache."""
    if DEVICE == "cpu":
        return []
    x, compiled = torch.randn(16 * ROWS, FEATURES, device=DEVICE), torch.compile(spherize)
    seconds = time_in_turn({"copy": x.clone, "compiled": lambda: compiled(x)}, rounds=21, warmup=5)
    return [row("compiled map, share of copy bandwidth", ratio(seconds["copy"], seconds["compiled"]), at_least=0.7)]


def measure_memory() -> list[dict]:
    """Measure the peak memory beyond the input and the incoming gradient, in units of the input size."""
    if DEVICE == "cuda":
        x, gradient = _inputs()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        spherize(x).backward(gradient)
        peak = torch.cuda.max_memory_allocated() - before
    else:  # in a separate process, from the allocations recorded by the profiler of torch
        peak = int(subprocess.run([sys.executable, __file__, "--peak"], capture_output=True, check=True).stdout)
    return [row("peak extra memory, inputs", peak / (4 * ROWS * FEATURES), at_most=4)]


def cpu_peak() -> int:
    """Return the peak of live allocations during the forward and backward pass, recorded by the profiler."""
    x, gradient = _inputs()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        spherize(x).backward(gradient)
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def _inputs() -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, FEATURES, device=DEVICE, requires_grad=True)
    gradient = torch.randn(ROWS, FEATURES + 1, device=DEVICE)
    return x, gradient


def measure_accuracy() -> list[dict]:
    """Measure the largest relative error of the norm at n = 8192."""
    norms = spherize(3 * torch.randn(64, 8192, device=DEVICE), 5.0, 5.0).double().norm(dim=-1)
    return [row("largest relative error of the norm, n = 8192, fp32", (norms / 5 - 1).abs().max().item(), at_most=1e-6)]


if __name__ == "__main__":
    if "--peak" in sys.argv:
        print(cpu_peak())
    else:
        report("spherization", [*measure_speed(), *measure_bandwidth(), *measure_memory(), *measure_accuracy()])
