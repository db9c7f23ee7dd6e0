"""Measure memory and time of a step of SupConLoss by the batch size, encoded at once and in chunks.

python benchmarks/pair_batch.py

Each measurement is a process of its own, whose peak memory beyond that before the step is reported, with images of 32 x
32 pixels made before it.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from common import report, row
from torch import nn

from hf_sphere.losses import SupConLoss, cached_step

CACHED, WHOLE, CHUNK = (256, 512, 1024, 2048, 4096, 8192), (256, 512, 1024, 2048), 64


def encoder() -> nn.Module:
    """Return a small convolutional network with group norms, which do not depend on the batch."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels, width in ((3, 32), (32, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(channels, width, 3, stride=width // 32, padding=1), nn.GroupNorm(8, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 128))


def measure(batch: int, chunk: int | None) -> dict[str, float]:
    """Return peak memory in MB and processor seconds of a step, at once if there is no chunk size."""
    model, loss, images, labels = encoder(), SupConLoss(), torch.randn(batch, 3, 32, 32), torch.arange(batch) % 50
    cached_step(model, loss, (images[:CHUNK], labels[:CHUNK]), CHUNK)  # memory of the libraries and of gradients
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    if chunk is None:
        loss(model(images), labels).backward()
    else:
        cached_step(model, loss, (images, labels), chunk)
    seconds = time.process_time() - start
    return {"memory": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, "seconds": seconds}


def main() -> None:
    """Measure each setting in a new process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs=2, type=int, metavar=("BATCH", "CHUNK"), help="print one measurement")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only[0], options.only[1] or None)))
        return
    rows: list[dict[str, Any]] = []
    found: dict[tuple[int, int], dict[str, float]] = {}
    for chunk, sizes in ((CHUNK, CACHED), (0, WHOLE)):
        for batch in sizes:
            command = [sys.executable, __file__, "--only", str(batch), str(chunk)]
            found[chunk, batch] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            how = f"in chunks of {chunk}" if chunk else "at once"
            rows.append(row(f"batch {batch}, {how}: additional memory, MB", found[chunk, batch]["memory"]))
            rows.append(row(f"batch {batch}, {how}: ms per example", 1000 * found[chunk, batch]["seconds"] / batch))
            print(rows[-2:])
    growth = found[CHUNK, CACHED[-1]]["memory"] - found[CHUNK, CACHED[0]]["memory"]
    rows.append(row(f"batch {CACHED[-1]} - batch {CACHED[0]}, in chunks: additional memory, MB", growth, 100))
    ratios = [found[CHUNK, batch]["seconds"] / found[0, batch]["seconds"] for batch in WHOLE]
    rows.append(row("time in chunks / at once, largest", max(ratios), 2.0))
    report("pair_batch", rows)


if __name__ == "__main__":
    main()
