"""The fast CIFAR-10 run: accuracy, minutes and the curve between them; alone on the machine, with all its cores.

python benchmarks/fast_cifar10.py [--dataset_name uoft-cs/cifar10] [--seed 0]

Minutes are those of the whole command on an existing cache of decoded images, with an evaluation after every epoch.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import report, row

ROOT = Path(__file__).parent.parent
LOCAL = ROOT.parent / "shared" / "data" / "uoft-cs" / "cifar10"


def main() -> None:
    """Run the recipe once and time its epochs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_name", default=str(LOCAL) if LOCAL.is_dir() else "uoft-cs/cifar10")
    parser.add_argument("--seed", default="0")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "recipes" / "train_image_classification.py"), "--config"]
        command += ["cifar10_fast/cifar10-fast-softmax", "--dataset_name", args.dataset_name, "--seed", args.seed]
        command += ["--output_dir", folder, "--disable_tqdm"]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        started, minutes = time.perf_counter(), []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as run:
            assert run.stdout is not None
            for line in run.stdout:
                print(line, end="")
                if line.startswith("epoch "):
                    minutes.append((time.perf_counter() - started) / 60)
        if run.returncode:
            sys.exit(run.returncode)
        total = (time.perf_counter() - started) / 60
        history = json.loads(Path(folder, "all_results.json").read_text(encoding="utf-8"))["history"]
    curve = [
        {"minutes": round(at, 2), "eval_accuracy": epoch["eval_accuracy"]}
        for at, epoch in zip(minutes, history, strict=True)
    ]
    rows = [
        row("test accuracy, %", 100 * curve[-1]["eval_accuracy"], at_least=90.5),
        row("minutes", total, at_most=20),
    ]
    report("fast_cifar10", rows, seed=int(args.seed), curve=curve)


if __name__ == "__main__":
    main()
