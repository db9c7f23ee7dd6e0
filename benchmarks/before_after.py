"""Time steps, losses, search and spherization of this tree and of an older commit in turn, and compare the results.

git worktree add ../before COMMIT
python benchmarks/before_after.py ../before

Each tree has a process of its own; the processes run the same case one after the other, so that changes of the
machine's speed affect both. "Now" twice is the noise: two processes of this tree. Timings need a machine without other
work. Writes `results/before_after.json`.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import RESULTS, ratio, report, row
from torch import Tensor, nn

NOISE = 1.05
"""Largest ratio of times that counts as equal; ratios of two processes of one tree come near it."""

Case = Callable[[], Any]


def draw(*shape: int) -> Tensor:
    """Return random numbers that are the same in each process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def optimizer_case(name: str, **options: Any) -> Case:
    """Return steps of an optimizer on ResNet-18."""
    from hf_sphere.models.backbones import create_backbone
    from hf_sphere.optim import build_optimizer

    torch.manual_seed(0)
    net = create_backbone("resnet18_cifar", num_channels=3, image_size=32)
    net = nn.Sequential(net, nn.Linear(net.num_features, 10))
    optimizer = build_optimizer(net, name, draw(4, 3, 32, 32), weight_decay=1e-4, **options)
    for parameter in net.parameters():
        parameter.grad = 1e-3 * draw(*parameter.shape)

    def step() -> Tensor:
        for _ in range(1 if name.startswith("muon") else 5):
            optimizer.step()
        return torch.stack([parameter.detach().norm() for parameter in net.parameters()])

    return step


def loss_case(name: str, labels: Tensor, *sizes: int) -> Case:
    """Return passes forward and backward of a loss."""
    from hf_sphere import losses

    torch.manual_seed(0)
    loss = getattr(losses, name)(*sizes)

    def step() -> Tensor:
        x = draw(512, 128).requires_grad_()
        for _ in range(10):
            value = loss(x, labels)
            value.backward()
        return torch.stack([value.detach(), x.grad.norm()])

    return step


def head_case(name: str) -> Case:
    """Return passes forward and backward of a head."""
    from hf_sphere.nn import build_head

    torch.manual_seed(0)
    head, labels = build_head(name, 128, 100), torch.arange(512) % 100

    def step() -> Tensor:
        torch.manual_seed(0)
        x = draw(512, 128).requires_grad_()
        for _ in range(3):
            head(x, labels).loss.backward()
        return x.grad.norm()

    return step


def spherize_case() -> Case:
    """Return passes forward and backward of the spherization map."""
    from hf_sphere.geometry import spherize

    x, gradient = draw(1024, 3072).requires_grad_(), draw(1024, 3073)

    def step() -> Tensor:
        x.grad = None
        output = spherize(x)
        output.backward(gradient)
        return torch.stack([output.detach().norm(), x.grad.norm()])

    return step


def layer_case() -> Case:
    """Return passes forward and backward of a spherized layer."""
    from hf_sphere.nn import SphericalLinear

    torch.manual_seed(0)
    layer, x = SphericalLinear(512, 512), draw(2048, 512).requires_grad_()

    def step() -> Tensor:
        x.grad = None
        output = layer(x)
        output.square().sum().backward()
        return torch.stack([output.detach().norm(), x.grad.norm()])

    return step


def clusters(count: int, groups: int) -> Tensor:
    """Return points of groups (`count` in turn) with some spread."""
    return F.normalize(F.normalize(draw(groups, 64))[torch.arange(count) % groups] + 0.1 * draw(count, 64))


def search_case(level: float | None) -> Case:
    """Return a search in a space of groups, at a level or without one."""
    from hf_sphere.search import EmbeddingSpace

    points = clusters(20_000, 2000)
    groups = (torch.arange(20_000) % 2000).tolist()
    space = EmbeddingSpace.fit(points, groups=groups, score="cosine", rule="sharp")
    queries = F.normalize(points[:1000] + 0.02 * draw(1000, 64))

    def step() -> Tensor:
        matches = space.search(queries, k=10, **({} if level is None else {"false_accept": level}))
        return torch.tensor([float(row) for query in matches.rows for row in query], dtype=torch.float64).sum()

    return step


def fit_case() -> Case:
    """Return fits of a space whose rows calibrate."""
    from hf_sphere.search import EmbeddingSpace

    points, groups = clusters(20_000, 2000), (torch.arange(20_000) % 2000).tolist()
    fit = functools.partial(EmbeddingSpace.fit, points, groups=groups, score="cosine", rule="sharp")
    return lambda: torch.tensor(float(len(fit())))


def neighbor_case(kind: str) -> Case:
    """Return a search of nearest neighbors."""
    from hf_sphere.search import NeighborSearch

    search, queries = NeighborSearch(F.normalize(draw(50_000, 128)), kind=kind), F.normalize(draw(2000, 128))
    return lambda: search.search(queries, 10)[1].double().sum()


def duplicates_case() -> Case:
    """Return a search for duplicates."""
    from hf_sphere.search import EmbeddingSpace

    space = EmbeddingSpace.fit(clusters(20_000, 18_000))
    return lambda: torch.tensor(float(len(space.duplicates(threshold=0.6).clusters)))


CLASS_LABELS = torch.arange(512) * 7 % 1000
CASES: dict[str, Callable[[], Case]] = {
    **{f"step of {name}": lambda name=name: optimizer_case(name) for name in (
        "adam_srt", "sgd_mrt", "adam_s", "adam_g", "muon", "muon_hyperball", "adamw_hyperball"
    )},
    **{f"{name}, forward and backward": lambda name=name: loss_case(name, CLASS_LABELS, 128, 1000) for name in (
        "ArcFaceLoss", "SubCenterArcFaceLoss", "ProxyAnchorLoss"
    )},
    "SupConLoss, forward and backward": lambda: loss_case("SupConLoss", torch.arange(512) // 4),
    **{f"head {name}, forward and backward": lambda name=name: head_case(name) for name in (
        "cosine", "vmf", "prototype", "spherized"
    )},
    "spherize, forward and backward": spherize_case,
    "SphericalLinear, forward and backward": layer_case,
    "fit of a space": fit_case,
    "search of a space": lambda: search_case(None),
    "search of a space at a level": lambda: search_case(0.05),
    "exact neighbors": lambda: neighbor_case("torch"),
    "neighbors in an inverted file": lambda: neighbor_case("ivf"),
    "duplicates": duplicates_case,
}  # fmt: skip


def work() -> None:
    """Read names of cases from the standard input; print the seconds and the result of each."""
    made: dict[str, Case] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in made:  # the first run warms up
            made[name] = CASES[name]()
            made[name]()
        start = time.perf_counter()
        result = made[name]()
        seconds = time.perf_counter() - start
        print("RESULT", seconds, *result.double().reshape(-1).tolist(), flush=True)


class Worker:
    """A process that runs cases with the library of a tree."""

    def __init__(self, tree: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(tree.resolve())}
        command = [sys.executable, __file__, "--work"]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def run(self, name: str) -> tuple[float, list[float]]:
        """Return the seconds and the result of a case; a RuntimeError if it fails."""
        print(name, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                seconds, *result = map(float, line.split()[1:])
                return seconds, result
        raise RuntimeError(f"the case {name} failed")


def compare(name: str, trees: Sequence[Path], starts: int, rounds: int) -> list[dict[str, Any]]:
    """Run a case in each tree in turn; return the rows of its report.

    Processes are started several times: where their memory lies changes times by some percent.
    """
    seconds: list[list[float]] = [[] for _ in trees]
    results: list[Tensor] = []
    for start in range(starts):
        workers = [Worker(tree) for tree in trees]
        for number in range(rounds):
            for index in (0, 1, 2) if (start + number) % 2 else (2, 1, 0):
                spent, result = workers[index].run(name)
                seconds[index].append(spent)
                results.append(torch.tensor(result, dtype=torch.float64))
        for worker in workers:
            worker.process.stdin.close()
            worker.process.wait()
    now, before, again = seconds
    error = max(float((result - results[0]).norm() / results[0].norm().clamp(min=1e-30)) for result in results)
    return [
        row(f"{name}: now / before, time", ratio(now, before), at_most=NOISE),
        row(f"{name}: now / now, time", ratio(now, again)),
        row(f"{name}: seconds now", statistics.median(now)),
        row(f"{name}: relative difference of the results", error, at_most=1e-6),
    ]


def main() -> None:
    """Compare both trees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="folder of the older tree")
    parser.add_argument("--starts", type=int, default=3, help="processes of each tree, one after the other")
    parser.add_argument("--rounds", type=int, default=6, help="timed runs in each process")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="others keep their rows")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work()
        return
    here, rows = Path(__file__).parents[1], {}
    if (known := RESULTS / "before_after.json").exists():
        rows = {each["what"]: each for each in json.loads(known.read_text())["rows"]}
    for name in args.cases:
        found = compare(name, [here, args.before, here], args.starts, args.rounds)
        rows |= {each["what"]: each for each in found}
        print(*(f"{each['what']}  {each['value']:.4g}" for each in found), sep="\n", flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=args.before, capture_output=True, text=True, check=True)
    report("before_after", [*rows.values()], before=commit.stdout.strip(), threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
