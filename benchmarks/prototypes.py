"""Separation and run time of placements, compared with the published program.

Writes `results/prototypes.json`. `--quick` skips cases that take longer than a few seconds.
"""

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import report, row
from torch import Tensor

from hf_sphere.geometry import separation, separation_bound
from hf_sphere.prototypes import place_prototypes

# K, d, maximum of the largest cosine, maximum of the seconds, options
GOALS: list[tuple[int, int, float, float, dict[str, Any]]] = [
    (1000, 999, -1 / 999 + 1e-6, 0.2, {}),
    (1000, 500, 1e-6, 0.2, {}),
    (10, 3, 0.40440, 1.0, {}),
    (100, 10, 0.340, 1.0, {}),
    (100, 10, 0.3325, 60.0, {"restarts": 80, "max_iterations": 100}),
    (100, 25, 1 / 11 + 1e-6, 1.0, {}),
    (200, 25, 1 / 6 + 1e-6, 1.0, {}),
    (200, 50, 0.0765, 20.0, {}),
    (200, 50, 0.0765, 20.0, {"method": "lbfgs"}),
    (1000, 64, 1 / 8 + 1e-6, 2.0, {}),
    (100, 8, 0.440, 20.0, {"restarts": 20}),
]


def paper_scheme(count: int, dim: int, epochs: int) -> Tensor:
    """Run the published program of the paper: a new SGD optimizer at each step, on the full cosine matrix."""
    torch.manual_seed(0)
    points = F.normalize(torch.randn(count, dim), dim=1)
    for _ in range(epochs):
        points = points.detach().requires_grad_()
        optimizer = torch.optim.SGD([points], lr=0.1, momentum=0.9)
        product = points @ points.T + 1
        product = product - 2.0 * torch.diag(torch.diag(product))
        product.max(dim=1)[0].mean().backward()
        optimizer.step()
        points = F.normalize(points.detach(), dim=1)
    return points


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return function(), time.perf_counter() - start


def compare(quick: bool) -> list[dict[str, Any]]:
    rows, done = [], set()
    for count, dim, cosine, seconds, options in GOALS:
        if quick and seconds > 2:
            continue
        named = f"K = {count}, d = {dim}" + "".join(f", {key} {value}" for key, value in options.items())
        placement, took = timed(lambda k=count, d=dim, o=options: place_prototypes(k, d, progress=False, **o))
        rows += [
            row(f"{named}: largest cosine", placement.separation, at_most=cosine),
            row(f"{named}: seconds", took, at_most=seconds),
        ]
        if (count, dim) in done:
            continue
        done.add((count, dim))
        rows.append(row(f"K = {count}, d = {dim}: lower bound", separation_bound(count, dim)))
        # The default of the program, 10,000 epochs, takes minutes for 1,000 points.
        epochs = 10_000 if count <= 200 and not quick else 300
        points, took = timed(lambda k=count, d=dim, n=epochs: paper_scheme(k, d, n))
        rows += [
            row(f"K = {count}, d = {dim}: published program, {epochs:,} epochs", separation(points).item()),
            row(f"K = {count}, d = {dim}: published program, seconds", took),
        ]
    return rows


def compare_methods() -> list[dict[str, Any]]:
    rows = []
    for method in ("sgd_as_published", "sgd", "lbfgs"):
        placement = place_prototypes(100, 10, method=method, progress=False)
        rows += [
            row(f"K = 100, d = 10, method {method}: largest cosine", placement.separation),
            row(f"K = 100, d = 10, method {method}: seconds", placement.seconds),
        ]
    return rows


def many() -> list[dict[str, Any]]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    placement, took = timed(lambda: place_prototypes(100_000, 24, progress=False))
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return [
        row("K = 100,000, d = 24: largest cosine", placement.separation, at_most=0.5 + 1e-6),
        row("K = 100,000, d = 24: seconds", took),
        row("K = 100,000, d = 24: additional memory, MiB (a K x K matrix takes 76,294)", memory),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="skip cases that take longer than a few seconds")
    quick = parser.parse_args().quick
    place_prototypes(7, 3, progress=False)  # imports scipy
    rows = compare(quick)
    if not quick:
        rows += compare_methods() + many()
    report("prototypes", rows)


if __name__ == "__main__":
    main()
