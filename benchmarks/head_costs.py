"""Time and memory of a training step of the fast CIFAR-10 network, by head and relative to softmax.

python benchmarks/head_costs.py

The heads have the settings of `hf_sphere/configs/cifar10_fast.yaml`; batches of 500 images, bfloat16, one thread.
Memory is what the model, a batch and three steps add to a process that has imported the library, or take on the GPU.
"""

import argparse
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
from common import ratio, report, row, synchronize, time_in_turn

from hf_sphere.models import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.training import initialize_from_data
from hf_sphere.utils.configs import load_config

HEADS = ["softmax", "spherized", "cosine", "arcface", "hyperbolic", "vmf", "prototype", "angular"]
BATCH = 500
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def training_step(head: str) -> Callable[[], None]:
    """Return a function that trains the network with a head for one step."""
    torch.manual_seed(0)
    settings = load_config(f"cifar10_fast/cifar10-fast-{head}").settings
    config = SphereVisionConfig(
        backbone=settings["backbone"], head=head, head_kwargs=settings.get("head_kwargs"), num_labels=10
    )
    model = SphereVisionForImageClassification(config).to(DEVICE, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, fused=True)
    images = torch.randn(BATCH, 3, 32, 32, device=DEVICE).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (BATCH,), device=DEVICE)
    initialize_from_data(model, [{"pixel_values": images}])

    def step() -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(images, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def added_memory(head: str) -> float:
    """Return the megabytes that the model, a batch and three steps add to this process, or take on the GPU."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    step = training_step(head)
    for _ in range(3):
        step()
    if DEVICE == "cuda":
        synchronize()
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before


def measure_memory(head: str) -> float:
    """Return the added memory in a new process."""
    command = [sys.executable, __file__, "--memory_of", head]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Time the heads in turn, and measure the memory of each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory_of", choices=HEADS, help="print the memory of a head, in megabytes, and stop")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.memory_of:
        print(added_memory(args.memory_of))
        return
    megabytes = {head: measure_memory(head) for head in HEADS}
    seconds = time_in_turn({head: training_step(head) for head in HEADS}, rounds=5, warmup=1)
    rows = [row("softmax: ms per step", 1000 * statistics.median(seconds["softmax"]))]
    rows += [row("softmax: added memory, MB", megabytes["softmax"])]
    for head in HEADS[1:]:
        rows.append(row(f"{head}: time / softmax", ratio(seconds[head], seconds["softmax"])))
        rows.append(row(f"{head}: memory / softmax", megabytes[head] / megabytes["softmax"]))
    report("head_costs", rows)


if __name__ == "__main__":
    main()
