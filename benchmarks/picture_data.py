"""Train the networks that pictures of the documentation show, and keep what `docs/_tools/pictures` draws of them.

python benchmarks/picture_data.py [--only masses] [--mnist ylecun/mnist] [--cifar10 uoft-cs/cifar10]

Single runs with seed 0 on one CPU core: LeNet-9 with true and random labels, LeNet-5 with three units and five heads on
MNIST, and the toy task of the spherization. A network in `--work_dir` is not trained again. Writes
`results/pictures/`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import PICTURES, keep_for_pictures
from safetensors.torch import save_file
from transformers import AutoModelForImageClassification

from hf_sphere.data import ImageDataOptions, load_image_split
from hf_sphere.search.extract import load_embedding_model
from hf_sphere.search.store import read_embeddings

ROOT = Path(__file__).parent.parent
DATA = ROOT.parent / "shared" / "data"
HEADS = {
    "spherized": ("spherized",),
    "spherized10": ("spherized", "--head_kwargs", "{scaling: 1.0, radius: 10.0}"),
    "cosine": ("cosine",),
    "prototype": ("prototype",),
    "vmf": ("vmf",),
}
"""Configuration and further arguments of each panel."""
POINTS = 500
TRUE = {"true": ["--label_noise", "0"], "random": []}


def run(*words: str | Path) -> None:
    """Run a command of hf-sphere."""
    print("hf-sphere", *words, flush=True)
    subprocess.run([sys.executable, "-m", "hf_sphere.commands.main", *map(str, words)], check=True)


def train(folder: Path, *words: str) -> None:
    """Train a classifier, unless its folder has one."""
    if not (folder / "model.safetensors").exists():
        run("train", "classification", *words, "--output_dir", folder, "--disable_tqdm")


def read(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text("utf-8"))


def measure_layers(folder: Path, cifar10: str) -> None:
    """Train LeNet-9 with true and random labels; keep masses by epoch, and the accuracy with a layer reset."""
    found = {}
    for kind, labels in TRUE.items():
        out = folder / f"lenet9-{kind}"
        words = ["--config", "hyperplanes/cifar10-lenet9", "--config", "hyperplanes/corruptions/label_noise-1.0"]
        words += ["--dataset_name", cifar10, "--max_train_samples", "2000", "--num_train_epochs", "200"]
        words += ["--per_device_train_batch_size", "64", "--learning_rate", "0.02", "--lr_scheduler_type", "cosine"]
        words += ["--early_stopping_patience", "200", "--snapshot_until", "1", "--snapshot_epochs", "50"]
        train(out, *words, *labels)
        run("projections", "--model_name_or_path", out, "--output_dir", out / "projections")
        words = ["--split", "train", "--max_samples", "500", "--num_random", "10", "--output_dir", str(out / "reset")]
        run("reinitialize", "--model_name_or_path", out, *words)
        training, reset = read(out / "projections" / "training.json"), read(out / "reset" / "reinitialization.json")
        kept = "mass", "null_mass_low", "null_mass_high"
        layers = {each["epoch"]: each["projections"]["layers"] for each in training["epochs"]}
        found[kind] = {
            "masses": {
                epoch: {name: [layer[key] for key in kept] for name, layer in each.items()}
                for epoch, each in layers.items()
            },
            "reset": {key: reset[key] for key in ("accuracy", "layers")},
            **{key: read(out / "all_results.json")[key] for key in ("train_accuracy", "eval_accuracy")},
        }
    keep_for_pictures("lenet9", found)


def embed_digits(folder: Path, mnist: str) -> None:
    """Train LeNet-5 with three units and each head; keep directions of test images and of the classes."""
    tensors, accuracies = {}, {}
    for name, (config, *more) in HEADS.items():
        out = folder / f"mnist-3d-{name}"
        words = ["--config", f"visualization/mnist-3d-{config}", "--backbone", "lenet5", "--bf16", *more]
        words += ["--num_train_epochs", "5", "--dataset_name", mnist]
        train(out, *words)
        words = ["--dataset_name", mnist, "--split", "test", "--output_dir", str(out / "embeddings")]
        run("extract", "--model_name_or_path", out, *words, "--disable_tqdm")
        data, head = read_embeddings(str(out / "embeddings")), load_embedding_model(str(out)).head
        tensors[name] = F.normalize(data.embeddings[:POINTS].double(), dim=1).half()
        tensors[f"{name}.directions"] = F.normalize(head.directions().detach().double(), dim=1).half()
        tensors["labels"] = data.labels[:POINTS].byte()
        accuracies[name] = f"{read(out / 'all_results.json')['eval_accuracy']:.4f}"
    save_file(tensors, PICTURES / "mnist_3d.safetensors", metadata=accuracies)


@torch.inference_mode()
def separate_clusters(folder: Path) -> None:
    """Train both networks of the toy task; keep the inputs, weights and biases of their last layers."""
    sys.path.append(str(ROOT / "examples"))
    import toy_task

    found = {}
    for kind in toy_task.KINDS:
        toy_task.train(kind, folder / kind, 100, 0)
        model = AutoModelForImageClassification.from_pretrained(folder / kind).eval()
        options = ImageDataOptions("two_clusters", image_mean=(1 / 22,), image_std=(1 / 1.1,))
        (batch,) = load_image_split(options, "test", batch_size=200).batches.epoch()
        weight, bias = toy_task.last_layer(model)
        points = model(batch["pixel_values"]).embeddings.tolist()
        found[kind] = {
            "points": points, "labels": batch["labels"].tolist(), "weight": weight.tolist(), "bias": bias.tolist(),
            "eval_accuracy": read(folder / kind / "all_results.json")["eval_accuracy"],
        }  # fmt: skip
    keep_for_pictures("toy_task", found)


def main() -> None:
    """Train and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("layers", "digits", "clusters"))
    for name, hub in (("mnist", "ylecun/mnist"), ("cifar10", "uoft-cs/cifar10")):
        parser.add_argument(f"--{name}", default=str(DATA / hub) if (DATA / hub).is_dir() else hub)
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/pictures"))
    args = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    chosen = args.only or ("layers", "digits", "clusters")
    if "layers" in chosen:
        measure_layers(args.work_dir, args.cifar10)
    if "digits" in chosen:
        embed_digits(args.work_dir, args.mnist)
    if "clusters" in chosen:
        separate_clusters(args.work_dir)


if __name__ == "__main__":
    main()
