"""Check the von Mises-Fisher functions and samples, and compare the cost of the loss with that of a cosine head.

Writes `results/vmf.json`. The reference values are those of the tests.
"""

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import ratio, report, row, time_in_turn
from safetensors import safe_open

from hf_sphere.distributions import VonMisesFisher
from hf_sphere.geometry import log_vmf_normalizer, mean_resultant_length
from hf_sphere.geometry.bessel import mean_resultant_length_derivative
from hf_sphere.nn import build_head

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
PLACES = [(3, 1), (5, 2), (16, 12), (32, 20), (128, 40), (128, 60.5), (512, 12), (512, 100), (512, 701), (2048, 50)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def compare_normalizer() -> list[dict[str, Any]]:
    values = json.loads((GOLDEN / "von_mises_fisher.json").read_text())["values"]
    worst = {"32": 0.0, "64": 0.0, "log": 0.0, "slope": 0.0}
    before: dict[int, tuple[float, float]] = {}
    for value in values:
        dim, kappa = value["d"], torch.tensor(float(value["kappa"]), dtype=torch.float64)
        expected = value["mean_resultant_length"]
        for kind, dtype in (("32", torch.float32), ("64", torch.float64)):
            found = mean_resultant_length(kappa.to(dtype), dim).item()
            worst[kind] = max(worst[kind], abs(found - expected) / (expected or 1.0))
        found = log_vmf_normalizer(kappa, dim).item()
        if dim in before:
            step = (found - before[dim][0]) - (value["log_normalizer"] - before[dim][1])
            worst["log"] = max(worst["log"], abs(step))
        before[dim] = found, value["log_normalizer"]
        if 0 < kappa <= 1e4:
            h = 1e-4 * kappa
            ends = mean_resultant_length(torch.stack([kappa - h, kappa + h]), dim)
            difference = (ends[1] - ends[0]) / (2 * h)
            exact = mean_resultant_length_derivative(kappa, dim)
            worst["slope"] = max(worst["slope"], abs(difference / exact - 1).item())
    return [
        row("A_d, float32: largest relative error", worst["32"], at_most=1e-5),
        row("A_d, float64: largest relative error", worst["64"], at_most=1e-7),
        row("log C_d, float64: largest error of a difference, nats", worst["log"], at_most=1e-6),
        row("second derivative: largest relative deviation from finite differences", worst["slope"], at_most=1e-5),
    ]


def compare_samples(draws: int = 100_000) -> list[dict[str, Any]]:
    rows = []
    for dim, kappa in PLACES:
        concentration = torch.full((draws,), float(kappa), device=DEVICE, requires_grad=True)
        axis = F.one_hot(torch.tensor(0), dim).to(DEVICE, torch.float32)
        # In parts, because the coordinates of all samples do not fit into memory.
        cosines, slopes = [], []
        for part in concentration.split(5_000):
            part = part.detach().requires_grad_()
            cosine = VonMisesFisher(axis, part, validate_args=False).rsample()[:, 0]
            slopes.append(torch.autograd.grad(cosine.sum(), part)[0].double())
            cosines.append(cosine.detach().double())
        cosine, slope = torch.cat(cosines), torch.cat(slopes)
        exact = torch.tensor(float(kappa), dtype=torch.float64)
        length = mean_resultant_length(exact, dim)
        error = (cosine.mean() - length).abs() / (cosine.std() / draws**0.5)
        derivative = 1 - length**2 - (dim - 1) * length / exact
        where = f"d = {dim}, kappa = {kappa:g}"
        rows += [
            row(f"{where}: mean of w, standard errors off", error.item(), at_most=4.0),
            row(f"{where}: dE[w]/dkappa, relative error", abs(slope.mean() / derivative - 1).item(), at_most=0.01),
        ]
    return rows


def compare_loss() -> list[dict[str, Any]]:
    worst = 0.0
    with safe_open(GOLDEN / "vmf_softmax_loss.safetensors", "pt") as file:
        for case in json.loads(file.metadata()["cases"]):
            name = case["case"]
            parts = ("z", "class_weights", "samples", "labels")
            z, weights, samples, labels = (file.get_tensor(f"{name}.{part}") for part in parts)
            head = build_head("vmf", z.shape[1], len(weights), log_temperature=case["log_temperature"]).double()
            head.weight.data.copy_(weights)
            head.is_initialized.fill_(True)
            points = samples.flatten(0, 1)
            one, none = torch.ones(1, len(points)).double(), torch.zeros(1, *points.shape).double()
            head._draw = lambda *_, drawn=(points, one, none[..., 0], none): drawn
            z, labels = (values.repeat_interleave(samples.shape[1], 0) for values in (z, labels))
            worst = max(worst, abs(head(z, labels).loss.item() - case["loss"]))
    return [row("vMF softmax loss: largest error", worst, at_most=1e-6)]


def step_of(head: torch.nn.Module, batch: int) -> Callable[[], None]:
    embeddings = torch.randn(batch, head.embedding_dim, device=DEVICE, requires_grad=True)
    head.initialize_from_data(embeddings)
    labels = torch.randint(head.num_classes, (batch,), device=DEVICE)

    def step() -> None:
        head.zero_grad()
        embeddings.grad = None
        head(embeddings, labels).loss.backward()

    return step


def compare_cost() -> list[dict[str, Any]]:
    rows = []
    for batch, dim, classes, bound, rounds in ((256, 128, 100, 8.0, 61), (64, 512, 9620, 6.0, 15)):
        heads = {name: build_head(name, dim, classes).to(DEVICE) for name in ("cosine", "vmf")}
        seconds = time_in_turn({name: step_of(head, batch) for name, head in heads.items()}, rounds=rounds, warmup=5)
        where = f"batch {batch}, d {dim}, {classes} classes, forward and backward"
        rows += [
            row(f"{where}: cosine, ms", 1000 * sorted(seconds["cosine"])[rounds // 2]),
            row(f"{where}: vMF with 10 samples, ms", 1000 * sorted(seconds["vmf"])[rounds // 2]),
            row(f"{where}: vMF / cosine", ratio(seconds["vmf"], seconds["cosine"]), at_most=bound),
        ]
    return rows


def measure_memory() -> list[dict[str, Any]]:
    step = step_of(build_head("vmf", 512, 10_000).to(DEVICE), 128)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        used = (torch.cuda.max_memory_allocated() - before) / 2**20
    else:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        step()
        used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    return [row("batch 128, d 512, 10,000 classes: additional memory of a step, MiB", used, at_most=1024)]


def main() -> None:
    torch.manual_seed(0)
    # Memory first: memory freed by earlier parts would be reused and not counted.
    memory = measure_memory()
    report("vmf", compare_normalizer() + compare_samples() + compare_loss() + compare_cost() + memory)


if __name__ == "__main__":
    main()
