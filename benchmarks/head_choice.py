"""Measure the regret of choosing a head by `hf-sphere compare --frozen` before fine-tuning.

python benchmarks/head_choice.py --weights efficientnet_lite0.safetensors \
    --cifar10 uoft-cs/cifar10 --omniglot brendenlake/omniglot  # weights as for fine_tuning.py

On each of three datasets, `hf-sphere compare --frozen --finetune 4` tunes four heads on the frozen features of an
EfficientNet-Lite0 at 32 pixels (`digits`: 64), ranks them by three seeds, and then trains all four with the backbone,
in that order.
The regret is the accuracy of the best of the four minus that of the head chosen by the frozen ranking, in points, with
the interval of this difference. The best is taken after the runs, so that its mean is somewhat too high.

Finished runs in `--work_dir` are not repeated. Writes `results/head_choice.json`.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from common import report, row

from hf_sphere.commands.main import main

HEADS = ("softmax", "cosine", "arcface", "vmf")
TRAINING = "{num_train_epochs: 3, per_device_train_batch_size: 64, lr_scheduler_type: cosine}"
DATA = {
    "digits": ["--image_size", "64"],
    "cifar10": ["--image_size", "32", "--train_split", "train[:5000]", "--eval_split", "test[:1000]"],
    "omniglot": ["--image_size", "32", "--train_split", "train[:2000]"],
}


def mean_accuracies(content: dict[str, Any]) -> dict[str, float]:
    """Return the mean accuracy of each arm of a comparison."""
    arms = content["compared"].items()
    return {name: statistics.fmean(run["accuracy"] for run in arm["runs"].values()) for name, arm in arms}


def regret_of(folder: Path) -> dict[str, Any]:
    """Return the heads that were chosen and best, and the regret with its interval, in points."""
    frozen, trained = (json.loads((folder / part / "comparison.json").read_text()) for part in ("", "finetuned"))
    before, after = mean_accuracies(frozen), mean_accuracies(trained)
    chosen, best = max(before, key=before.__getitem__), max(after, key=after.__getitem__)
    numbers = {each["name"]: each for each in trained["comparison"]}[best]  # against the first arm, the chosen one
    interval = [0.0, 0.0] if best == chosen else [numbers["low"], numbers["high"]]
    return {
        "chosen": chosen,
        "best": best,
        "frozen": before,
        "finetuned": after,
        "regret": after[best] - after[chosen],
        "interval": interval,
    }


def measure() -> None:
    """Run the comparisons, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--cifar10", required=True)
    parser.add_argument("--omniglot", required=True)
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/head_choice"))
    args = parser.parse_args()
    sources, regrets = {"digits": "digits", "cifar10": args.cifar10, "omniglot": args.omniglot}, {}
    for name, parts in DATA.items():
        folder, backbone = args.work_dir / name, f"tf_efficientnet_lite0={args.weights}"
        options = ["--frozen", "--finetune", str(len(HEADS)), "--heads", *HEADS, "--backbones", backbone]
        options += ["--seeds", "3", "--training", TRAINING, "--output_dir", str(folder)]
        main(["compare", sources[name], *parts, *options])
        regrets[name] = regret_of(folder)
    rows = [row(f"regret on {name}, points", each["regret"]) for name, each in regrets.items()]
    report("head_choice", rows, regrets=regrets)


if __name__ == "__main__":
    measure()
