"""Run time of the projection statistics of a ResNet-50, and memory saved by streaming from a file.

Writes `results/projections.json`. Times include all convolutions and the linear layer, 27,560 filters. The plain
version uses numpy, a loop over filters, and the tests of scipy.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from common import ratio, report, row, time_in_turn
from safetensors.torch import save_file, save_model
from scipy.stats import beta, binomtest, kstest
from torch import nn

from hf_sphere.hyperplanes import projection_statistics

PEAK = """
import json, sys
import torch, safetensors.torch, transformers.pytorch_utils
from hf_sphere.hyperplanes import projection_statistics

def kib(name):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[name].split()[0])

projection_statistics(torch.nn.Linear(3, 4), "all")  # memory that the libraries allocate on first use
before = kib("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # resets the peak
path, mode = sys.argv[1:]
projection_statistics(path if mode == "stream" else safetensors.torch.load_file(path), "all")
print(json.dumps((kib("VmHWM") - before) / 1024))
"""


def plain(model: nn.Module) -> dict[str, Any]:
    """Compute the same statistics filter by filter."""
    statistics = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        weight = module.weight.detach().numpy()
        projections = []
        for kernel in weight:
            normal = kernel.astype(np.float64).ravel()
            projections.append(normal.sum() / (np.linalg.norm(normal) * np.sqrt(normal.size)))
        values = np.array(projections)
        shape = (normal.size - 1) / 2
        statistics[name] = {
            "mean": values.mean(),
            "mass": (values <= 0).mean(),
            "ks": kstest((values + 1) / 2, beta(shape, shape).cdf).pvalue,
            "sign": binomtest(int((values < 0).sum()), len(values)).pvalue,
        }
    return statistics


def times(folder: Path) -> list[dict[str, Any]]:
    model = torchvision.models.resnet50()
    path = folder / "resnet50.safetensors"
    save_model(model, str(path))
    ours = projection_statistics(model, "all", include_1x1=True)
    theirs = plain(model)
    difference = max(
        float(abs(value - theirs[name][key]))
        for name, layer in ours.layers.items()
        for key, value in {
            "mean": layer.mean,
            "mass": layer.mass,
            "ks": layer.ks_p_value,
            "sign": layer.sign_p_value,
        }.items()
    )
    seconds = time_in_turn(
        {
            "module": lambda: projection_statistics(model, "all", include_1x1=True),
            "file": lambda: projection_statistics(path, "all", include_1x1=True),
            "3x3 and 7x7": lambda: projection_statistics(model),
            "plain": lambda: plain(model),
        },
        rounds=5,
        warmup=1,
    )
    return [
        row("ResNet-50, from the module: seconds", min(seconds["module"]), at_most=2),
        row("ResNet-50, streamed from a file: seconds", min(seconds["file"]), at_most=2),
        row("ResNet-50, without 1x1 and linear: seconds", min(seconds["3x3 and 7x7"])),
        row("ResNet-50, plain version: seconds", min(seconds["plain"])),
        row("from the module / plain version, time", ratio(seconds["module"], seconds["plain"])),
        row("largest difference of mean, mass, p-values", difference, at_most=1e-9),
    ]


def memory(folder: Path) -> list[dict[str, Any]]:
    path = folder / "large.safetensors"
    save_file({f"layers.{number}.weight": torch.randn(4096, 2048) for number in range(24)}, path)
    peaks = {}
    for mode in ("stream", "load"):
        command = [sys.executable, "-c", PEAK, str(path), mode]
        peaks[mode] = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return [
        row("768 MiB in 24 layers, streamed: additional peak memory, MiB", peaks["stream"], at_most=128),
        row("768 MiB in 24 layers, loaded at once: additional peak memory, MiB", peaks["load"]),
    ]


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        report("projections", [*memory(Path(folder)), *times(Path(folder))])


if __name__ == "__main__":
    main()
