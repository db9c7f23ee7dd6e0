"""Compare losses with pytorch-metric-learning, values, gradients and speed, and measure the memory of SupCon.

python benchmarks/losses.py

Known differences, in which pytorch-metric-learning departs from the definitions: its ArcFace differentiates `acos`,
whose derivative is infinite at a cosine of 1 or -1; its SupCon is 0 if all examples have the same label; its
losses compute in the dtype of the embeddings, also in half precision, and convert their class vectors to it.
"""

import argparse
import resource
from collections.abc import Callable
from typing import Any

import torch
from common import ratio, report, row, time_in_turn
from torch import Tensor, nn

from hf_sphere import losses

DIM, CLASSES, BATCH, MANY = 128, 1000, 512, 300_000
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARGIN = torch.tensor(28.6).deg2rad().item()
"""The margin of pytorch-metric-learning's ArcFace, in radians."""
OPTIONS = {
    "ArcFaceLoss": {"scale": 64.0, "margin": MARGIN},
    "CosFaceLoss": {},
    "SubCenterArcFaceLoss": {"margin": MARGIN},
    "ProxyAnchorLoss": {},
}


def pairs() -> dict[str, tuple[nn.Module, nn.Module]]:
    """Return each loss of pytorch-metric-learning with ours, which has the same class vectors."""
    try:
        from pytorch_metric_learning import losses as metric_losses
    except ImportError as error:
        raise SystemExit("this benchmark requires `pip install pytorch-metric-learning`") from error
    found = {"SupConLoss": (metric_losses.SupConLoss(), losses.SupConLoss())}
    for name, options in OPTIONS.items():
        theirs = getattr(metric_losses, name)(num_classes=CLASSES, embedding_size=DIM)
        ours = getattr(losses, name)(DIM, CLASSES, **options)
        weight = theirs.proxies.detach() if name == "ProxyAnchorLoss" else theirs.W.detach().T
        ours.head.weight.data = weight.reshape(ours.head.weight.shape).clone()
        found[name] = (theirs.to(DEVICE), ours.to(DEVICE))
    return found


def run(loss: nn.Module, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of a loss and the gradient of the embeddings."""
    x = x.clone().requires_grad_()
    value = loss(x, labels)
    value.backward()
    return value.detach(), x.grad


def added_memory(step: Callable[[], Any]) -> float:
    """Return what a step adds to the peak memory of the process, or of the GPU beyond its inputs, in GB."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**30
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20


def compare(rounds: int) -> list[dict[str, Any]]:
    """Compare values, gradients and speed on the same inputs, in turn."""
    torch.manual_seed(0)
    x, labels, rows = torch.randn(BATCH, DIM).to(DEVICE), torch.randint(CLASSES, (BATCH,)).to(DEVICE), []
    for name, (theirs, ours) in pairs().items():
        (their_value, their_gradient), (value, gradient) = run(theirs, x, labels), run(ours, x, labels)
        rows.append(row(f"{name}: relative difference of the values", abs(value / their_value - 1).item(), 1e-5))
        difference = (gradient - their_gradient).norm() / their_gradient.norm()
        rows.append(row(f"{name}: relative difference of the gradients", difference.item(), 1e-4))

        def step(loss: nn.Module) -> Callable[[], Any]:
            return lambda: run(loss, x, labels)

        seconds = time_in_turn({"theirs": step(theirs), "ours": step(ours)}, rounds=rounds)
        rows.append(
            row(f"{name}: theirs / ours, forward and backward", ratio(seconds["theirs"], seconds["ours"]), None, 1)
        )
    return rows


def check_supcon() -> list[dict[str, Any]]:
    """Compare the loss with the dense form in float64 at 8,192 examples."""
    torch.manual_seed(0)
    loss, rows = losses.SupConLoss(), []
    x, labels = torch.randn(8192, DIM).to(DEVICE), torch.arange(8192, device=DEVICE) % 1000
    value, gradient = run(loss, x, labels)
    exact, of_exact = run(dense_supcon, x.double(), labels)
    rows.append(row("SupCon at 8,192: relative error of the value", abs(value / exact - 1).item(), 1e-5))
    error = (gradient - of_exact).norm() / of_exact.norm()
    rows.append(row("SupCon at 8,192: relative error of the gradient", error.item(), 1e-5))
    return rows


def dense_supcon(x: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    """Compute the loss by its definition."""
    points = nn.functional.normalize(x, dim=-1)
    logits = (points @ points.T / temperature).fill_diagonal_(-torch.inf)
    positives = (labels[:, None] == labels).fill_diagonal_(False)
    mean = torch.where(positives, logits, 0.0).sum(1) / positives.sum(1)
    return (logits.logsumexp(1) - mean).mean()


def compare_blocks(batch: int) -> list[dict[str, Any]]:
    """Measure memory and time of ArcFace with 300,000 classes, in blocks by default, and with all logits."""
    torch.manual_seed(0)
    x, labels, used, steps = torch.randn(batch, DIM).to(DEVICE), torch.randint(MANY, (batch,)).to(DEVICE), {}, {}
    for kind, options in (("default", {}), ("logits", {"blockwise": False})):
        loss = losses.ArcFaceLoss(DIM, MANY, **options).to(DEVICE)
        steps[kind] = lambda loss=loss: run(loss, x, labels)
        used[kind] = added_memory(steps[kind])
    seconds = time_in_turn(steps, rounds=3, warmup=1)
    what = f"ArcFace, {MANY:,} classes, batch {batch}: "
    return [
        row(f"{what}additional memory by default, GB", used["default"], 0.5),
        row(f"{what}time by default / with logits", ratio(seconds["default"], seconds["logits"]), 1.0),
    ]


def main() -> None:
    """Measure the memory first: a peak of the comparison would hide it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=65_536, help="batch size of the memory measurement")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of the comparison")
    options = parser.parse_args()
    torch.manual_seed(0)
    x, labels = torch.randn(options.batch, DIM).to(DEVICE), torch.arange(options.batch, device=DEVICE) % 1000
    run(losses.SupConLoss(), x[:1000], labels[:1000])  # memory of the libraries
    used = added_memory(lambda: run(losses.SupConLoss(), x, labels))
    rows = [row(f"SupCon at {options.batch:,} x {DIM}: additional memory, GB", used, 1.0)]
    rows += compare_blocks(256)
    report("losses", rows + check_supcon() + compare(options.rounds))


if __name__ == "__main__":
    main()
