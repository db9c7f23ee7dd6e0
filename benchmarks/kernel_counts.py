"""Count the kernels that an accelerator would launch in a step: ours beside plain torch and pytorch-metric-learning.

python benchmarks/kernel_counts.py
python benchmarks/kernel_counts.py --eager

Needs no accelerator: `tests/devices/pretend.py` is a device that counts them. Compiled by inductor, a step has the
kernels that inductor generates for the CPU, without products of matrices.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.metrics as inductor
import torch.nn.functional as F
from common import report, row
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "devices"))
import pretend

from hf_sphere import losses
from hf_sphere.distributions import VonMisesFisher
from hf_sphere.geometry import frechet_mean
from hf_sphere.nn import build_head
from hf_sphere.nn.heads.base import HEADS
from hf_sphere.optim import SGDMRT, AdamG, AdamS, AdamSRT

BATCH, DIM, CLASSES = 16, 32, 10
BOUNDS = {
    "cosine": 50,
    "cosface": 65,
    "arcface": 80,
    "adaface": 120,
    "hyperbolic": 120,
    "prototype": 55,
    "spherized": 60,
    "vmf": 220,
}
LOSSES = ["ArcFaceLoss", "CosFaceLoss", "SubCenterArcFaceLoss", "ProxyAnchorLoss", "SupConLoss"]

Step = Callable[[], Any]


def count(step: Step) -> int:
    """Return the kernels of a step, after one that fills the caches of constants."""
    step()
    pretend.reset()
    step()
    return pretend.kernels()


def train(loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, labels: Tensor, module: nn.Module | None = None) -> None:
    """Compute a loss and its gradients, from none as after `zero_grad`."""
    for tensor in (x, *(module.parameters() if module else ())):
        tensor.grad = None
    loss(x, labels).backward()


def count_compiled(loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, labels: Tensor) -> int:
    """Return the kernels that inductor generates for a loss and its gradient."""
    torch._dynamo.reset()
    inductor.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        torch.compile(loss, fullgraph=True)(x, labels).backward()
    return inductor.generated_kernel_count


def batch(device: str) -> tuple[Tensor, Tensor]:
    """Return embeddings and labels."""
    torch.manual_seed(0)
    x, labels = torch.randn(BATCH, DIM), torch.randint(CLASSES, (BATCH,))
    return x.to(device).requires_grad_(), labels.to(device)


def plain_losses() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return losses written with torch alone."""
    weight = torch.randn(CLASSES, DIM, device=pretend.NAME, requires_grad=True)

    def softmax(x: Tensor, labels: Tensor) -> Tensor:
        weight.grad = None
        return F.cross_entropy(F.linear(x, weight), labels)

    def normalized(x: Tensor, labels: Tensor) -> Tensor:
        weight.grad = None
        return F.cross_entropy(16.0 * F.linear(F.normalize(x), F.normalize(weight)), labels)

    return {"torch: softmax": softmax, "torch: softmax of scaled cosines": normalized}


def head_for(name: str) -> nn.Module:
    """Return a head in training."""
    torch.manual_seed(0)
    head = build_head(name, DIM, CLASSES)
    head.initialize_from_data(torch.randn(64, DIM))
    return head.train()


def count_heads(compiled: bool) -> list[dict[str, Any]]:
    """Count the training steps, and predictions, of plain losses and of all heads."""
    x, labels = batch(pretend.NAME)
    rows = [row(name, count(lambda f=loss: train(f, x, labels))) for name, loss in plain_losses().items()]
    for name in HEADS:
        head = head_for(name).to(pretend.NAME)
        rows.append(
            row(name, count(lambda h=head: train(lambda x, y: h(x, y).loss, x, labels, h)), at_most=BOUNDS.get(name))
        )
        with torch.no_grad():
            predicting = count(lambda h=head: h.eval()(x))
        rows.append(row(f"{name}, prediction", predicting, at_most=150 if name == "vmf" else None))
        if compiled:
            loss = head_for(name)
            kernels = count_compiled(lambda x, y, h=loss: h(x, y).loss, *batch("cpu"))
            rows.append(row(f"{name}, compiled", kernels))
    return rows


def count_losses() -> list[dict[str, Any]]:
    """Count the steps of losses that pytorch-metric-learning has as well."""
    try:
        from pytorch_metric_learning import losses as theirs
    except ImportError as error:
        raise SystemExit("this benchmark requires `pip install pytorch-metric-learning`") from error
    x, labels = batch(pretend.NAME)
    rows = []
    for name in LOSSES:
        sizes = () if name == "SupConLoss" else (DIM, CLASSES)
        named = dict(zip(("embedding_size", "num_classes"), sizes, strict=False))
        for whose, loss in (
            ("ours", getattr(losses, name)(*sizes)),
            ("pytorch-metric-learning", getattr(theirs, name)(**named)),
        ):
            loss = loss.to(pretend.NAME)
            pretend.reset()
            kernels = count(lambda f=loss: train(f, x, labels, f))
            rows.append(row(f"{name}, {whose}", kernels))
            rows.append(row(f"{name}, {whose}: times the host waits", len(pretend.synchronizations())))
    return rows


def count_distributions() -> list[dict[str, Any]]:
    """Count samples, density, entropy and their gradients, and two estimators."""
    rows = []
    for dim in (2, 3, 16, 32, 128):
        mean = F.normalize(torch.randn(BATCH, dim), dim=-1).to(pretend.NAME).requires_grad_()
        concentration = (50 * torch.rand(BATCH) + 1).to(pretend.NAME).requires_grad_()

        def step(mean: Tensor = mean, concentration: Tensor = concentration) -> None:
            distribution = VonMisesFisher(mean, concentration, validate_args=False)
            mean.grad = concentration.grad = None
            density = distribution.log_prob(distribution.rsample())
            (density.sum() + distribution.entropy().sum()).backward()

        rows.append(row(f"VonMisesFisher: sample, density, entropy, gradient, d = {dim}", count(step), at_most=350))
    points, spread = (F.normalize(torch.randn(50, DIM) + shift, dim=-1).to(pretend.NAME) for shift in (1, 0))
    rows.append(row("VonMisesFisher.fit of 50 points", count(lambda: VonMisesFisher.fit(points)), at_most=500))
    rows.append(row("frechet_mean of 50 points", count(lambda: frechet_mean(points)), at_most=400))
    rows.append(row("frechet_mean of 50 uniform points", count(lambda: frechet_mean(spread)), at_most=400))
    return rows


def count_optimizers() -> list[dict[str, Any]]:
    """Count steps for the 161 tensors of ResNet-50, relative to torch's foreach AdamW with the same three groups."""
    from torchvision.models import resnet50

    network = resnet50().to(pretend.NAME)
    for parameter in network.parameters():
        parameter.grad = torch.randn_like(parameter)

    def groups(**invariant: Any) -> list[dict[str, Any]]:
        kernels, matrices, vectors = ([p for p in network.parameters() if p.ndim == ndim] for ndim in (4, 2, 1))
        return [{"params": kernels, **invariant}, {"params": matrices}, {"params": vectors, "weight_decay": 0.0}]

    torch_adam = count(torch.optim.AdamW(groups(), weight_decay=1e-4, foreach=True).step)
    rows = [row("ResNet-50: foreach AdamW of torch", torch_adam)]
    for optimizer in (AdamS, AdamSRT, AdamG, SGDMRT):
        step = optimizer(groups(channel_dims=[0]), weight_decay=1e-4, foreach=True).step
        rows.append(row(f"ResNet-50: {optimizer.__name__}", count(step), at_most=3 * torch_adam))
    return rows


def main() -> None:
    """Count and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eager", action="store_true", help="leave out the compiled steps, which take minutes")
    args = parser.parse_args()
    rows = [*count_heads(not args.eager), *count_losses(), *count_distributions(), *count_optimizers()]
    report("kernel_counts", rows, shape=[BATCH, DIM, CLASSES])


if __name__ == "__main__":
    main()
