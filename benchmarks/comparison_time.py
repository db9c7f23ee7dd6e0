"""Measure how long `hf-sphere compare --frozen` takes after the features are computed.

python benchmarks/comparison_time.py --weights efficientnet_lite0.safetensors --cifar10 uoft-cs/cifar10

Eight heads with five seeds each, on the features of an EfficientNet-Lite0 at 64 pixels of 10,000 images of CIFAR-10;
weights as for fine_tuning.py. Run it alone on the machine. Writes `results/comparison_time.json`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

from common import report, row

HEADS = ("softmax", "cosine", "arcface", "cosface", "vmf", "spherized", "hyperbolic", "prototype")


def measure() -> None:
    """Run the command, and write the seconds before and after the line that names the features."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--cifar10", required=True)
    args = parser.parse_args()
    command = [sys.executable, "-m", "hf_sphere.commands.main", "compare", args.cifar10, "--frozen", "--heads", *HEADS]
    command += ["--train_split", "train[:10000]", "--image_size", "64"]
    command += ["--backbones", f"tf_efficientnet_lite0={args.weights}"]
    start, embedded = time.monotonic(), None
    with tempfile.TemporaryDirectory() as folder:
        command += ["--output_dir", f"{folder}/comparison"]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            for line in process.stdout or ():
                print(line, end="")
                embedded = time.monotonic() if line.startswith("features") else embedded
    if process.returncode or embedded is None:
        sys.exit(f"hf-sphere compare ended with {process.returncode}.")
    seconds = time.monotonic() - embedded
    rows = [row("seconds after the features, 8 heads, 5 seeds, 10,000 images", seconds, at_most=180)]
    report("comparison_time", [*rows, row("seconds to start and to compute the features", embedded - start)])


if __name__ == "__main__":
    measure()
