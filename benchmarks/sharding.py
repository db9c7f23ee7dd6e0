"""Measure losses in blocks of classes and class vectors on several processes.

Writes `results/sharding.json`. On a GPU (`python benchmarks/sharding.py`), the parts on one process run there. The
parts are `time`, `gradients`, `memory`, `vmf` and `processes`; name some to run only these, which writes no file.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from common import ratio, report, row, time_in_turn
from torch import Tensor

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.data import ImagesInMemory
from hf_sphere.nn import build_head
from hf_sphere.training import RecipeArguments, TrainingLoop, gather_classes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIM, BATCH = 512, 1024
HEADS: dict[str, dict[str, Any]] = {"cosine": {"scale": 16.0}, "arcface": {"scale": 64.0}}


def make_head(name: str, classes: int, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return build_head(name, DIM, classes, **HEADS.get(name, {}), **options)


def make_batch(classes: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, labels = torch.randn(batch, DIM, generator=generator), torch.randint(classes, (batch,), generator=generator)
    return x.to(DEVICE).requires_grad_(), labels.to(DEVICE)


def step(head: torch.nn.Module, x: Tensor, labels: Tensor) -> Callable[[], None]:
    def run() -> None:
        head.zero_grad(set_to_none=True)
        x.grad = None
        head(x, labels).loss.backward()

    return run


def compare_time(classes: int = 100_000) -> list[dict[str, Any]]:
    rows, (x, labels) = [], make_batch(classes)
    for name in ("softmax", *HEADS):
        heads = {kind: make_head(name, classes, blockwise=kind == "blocks") for kind in ("logits", "blocks")}
        functions = {kind: step(head, x, labels) for kind, head in heads.items()}
        if name == "softmax" and hasattr(torch.nn, "LinearCrossEntropyOptions"):
            linear = heads["logits"].linear
            options = torch.nn.LinearCrossEntropyOptions()

            def chunked(linear: Any = linear, options: Any = options) -> None:
                linear.zero_grad(set_to_none=True)
                x.grad = None
                arguments = {"linear_bias": linear.bias, "options": options}
                F.linear_cross_entropy(x, linear.weight, labels, **arguments).backward()

            functions["torch"] = chunked
        seconds = time_in_turn(functions, rounds=3, warmup=1)
        what = f"{name}, {classes:,} classes: time in blocks / time with logits"
        rows.append(row(what, ratio(seconds["blocks"], seconds["logits"]), at_most=1.4))
        if "torch" in seconds:
            what = f"{name}, {classes:,} classes: time of torch's chunked cross-entropy / time with logits"
            rows.append(row(what, ratio(seconds["torch"], seconds["logits"])))
        del heads, functions
    return rows


def compare_gradients(classes: int = 20_000) -> list[dict[str, Any]]:
    rows, (x, labels) = [], make_batch(classes)
    for name in HEADS:
        found = []
        for blockwise in (False, True):
            head = make_head(name, classes, blockwise=blockwise)
            step(head, x, labels)()
            found.append((x.grad.clone(), head.weight.grad.clone()))
        worst = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*found, strict=True))
        rows.append(row(f"{name}, {classes:,} classes: largest relative deviation of a gradient", worst, at_most=1e-5))
    return rows


def read_memory(field: str) -> int:
    """Return a value of /proc/self/status in bytes: VmRSS, or its largest value VmHWM."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status[field].split()[0])


def measure_memory(name: str, classes: int, batch: int) -> None:
    """Print the bytes of a step, in addition to weights and their gradient; in a process of its own."""
    x, labels = make_batch(classes, batch)
    head = make_head(name, classes, blockwise=True)
    if head.needs_data_initialization:
        head.initialize_from_data(x)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, which the initialization has raised
    before = torch.cuda.memory_allocated() if DEVICE == "cuda" else read_memory("VmRSS")
    step(head, x, labels)()
    after = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else read_memory("VmHWM")
    print(after - before - head.weight.nbytes)


def in_new_process(name: str, classes: int, batch: int) -> int:
    command = [sys.executable, __file__, "measure", name, str(classes), str(batch)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def compare_memory(classes: int = 1_000_000) -> list[dict[str, Any]]:
    logits = 4 * BATCH * classes
    return [
        row(f"{name}, {classes:,} classes: memory / that of the logits", in_new_process(name, classes, BATCH) / logits,
            at_most=0.1)
        for name in HEADS
    ]  # fmt: skip


def compare_vmf(classes: int = 200_000, batch: int = 64) -> list[dict[str, Any]]:
    used = {count: in_new_process("vmf", count, batch) for count in (classes // 4, classes // 2, classes)}
    return [
        row(f"vmf, {count:,} classes, batch {batch}: memory, GB", value / 1e9, at_most=1.0)
        for count, value in used.items()
    ]


# Class weights on several processes


def train(folder: str, processes: int, rank: int, classes: int, **arguments: Any) -> dict[str, Any] | None:
    """Train four steps of 12 images with class vectors on processes; return losses and weights on the first one."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    config = SphereVisionConfig(
        backbone="linear_embedding", backbone_kwargs={"width": 64}, num_channels=1, image_size=6, num_labels=classes,
        head="arcface", head_kwargs={"shard_classes": True},
    )  # fmt: skip
    model = SphereVisionForImageClassification(config)
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (24, 1, 6, 6), dtype=torch.uint8, generator=generator)
    batches = ImagesInMemory(
        images, torch.randint(classes, (24,), generator=generator), batch_size=12 // processes, mean=[0.5], std=[0.3],
        shuffle=True, process_index=rank, num_processes=processes,
    )  # fmt: skip
    args = RecipeArguments(
        output_dir=folder, num_train_epochs=2, optim="sgd", learning_rate=0.1, disable_tqdm=True, **arguments
    )
    loop = TrainingLoop(model, batches, args, accelerator, evaluate=lambda model: {"accuracy": 0.0})
    loop.run()
    state = gather_classes(loop.trained_model)
    return None if state is None else {"losses": [e["train_loss"] for e in loop.state.history], "state": state}


def train_on(rank: int, processes: int, port: int, folder: str, classes: int, arguments: dict[str, Any]) -> None:
    import os

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(processes), ACCELERATE_USE_CPU="true")
    torch.set_num_threads(1)
    found = train(folder, processes, rank, classes, **arguments)
    if rank == 0:
        torch.save(found, f"{folder}/of-{processes}.pt")
    torch.distributed.destroy_process_group()


def compare_processes(classes: int = 200_000) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        one = train(f"{folder}/one", 1, 0, classes)
        mp.spawn(train_on, args=(4, 29611, folder, classes, {}), nprocs=4)
        four = torch.load(f"{folder}/of-4.pt", weights_only=True)
        rows += rows_of("4 processes and 1", four, one)
        resume = {"resume_from_checkpoint": f"{folder}/checkpoint-2"}
        mp.spawn(train_on, args=(3, 29612, folder, classes, resume), nprocs=3)
        rows += rows_of("4 resumed by 3 and 4", torch.load(f"{folder}/of-3.pt", weights_only=True), four)
        for state in (AcceleratorState, PartialState):
            state._reset_state()
        rows += rows_of("4 resumed by 1 and 4", train(folder, 1, 0, classes, **resume), four)
    return rows


def rows_of(what: str, found: Any, expected: Any) -> list[dict[str, Any]]:
    loss = max(abs(a - b) / b for a, b in zip(found["losses"], expected["losses"], strict=True))
    weights = max((found["state"][n] - value).abs().max().item() for n, value in expected["state"].items())
    return [
        row(f"{what}: largest relative deviation of a loss", loss, at_most=1e-5),
        row(f"{what}: largest deviation of a weight", weights, at_most=1e-5),
    ]


PARTS = {
    "time": compare_time,
    "gradients": compare_gradients,
    "memory": compare_memory,
    "vmf": compare_vmf,
    "processes": compare_processes,
}


def main() -> None:
    if sys.argv[1:2] == ["measure"]:
        measure_memory(sys.argv[2], *map(int, sys.argv[3:]))
    elif sys.argv[1:]:
        for name in sys.argv[1:]:
            print(json.dumps(PARTS[name](), indent=1))
    else:
        report("sharding", [line for part in PARTS.values() for line in part()])


if __name__ == "__main__":
    main()
