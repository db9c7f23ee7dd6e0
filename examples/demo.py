"""A complete example on the bundled digits: train, compare, save, load, classify, plot.

python examples/demo.py [--output_dir outputs/demo]
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline
from transformers.utils import logging

import hf_sphere  # noqa: F401  (registers the models with transformers)
from hf_sphere.data.sources import load_splits
from hf_sphere.visualization import plot_sphere

KINDS = ("plain", "spherized")


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo"))
    folder = parser.parse_args().output_dir
    logging.disable_progress_bar()

    for step, kind in enumerate(KINDS, 1):
        print(f"\n[{step}/4] Training LeNet-5, {kind}, on scikit-learn's handwritten digits", flush=True)
        train(kind, folder / kind)
    accuracy = {kind: json.loads((folder / kind / "all_results.json").read_text())["eval_accuracy"] for kind in KINDS}
    print("\n    test accuracy   " + "   ".join(f"{kind} {100 * accuracy[kind]:.2f} %" for kind in KINDS))

    print(f"\n[3/4] Loading {folder / 'spherized'} and classifying an image")
    classify = pipeline("image-classification", model=str(folder / "spherized"))
    test = load_splits("digits")["test"]
    picture, label = test[7]["image"], test[7]["label"]
    picture.save(folder / "digit.png")
    print(f"    {folder / 'digit.png'} shows a {label}; the predictions are:")
    for answer in classify(picture, top_k=3):
        print(f"    {answer['label']}   {100 * answer['score']:5.1f} %")

    print("\n[4/4] Drawing the test digits on the sphere")
    draw(folder / "spherized", test, folder / "sphere.png")
    print(f"    {folder / 'sphere.png'}\n\nDone. Next: README.md, or hf-sphere train classification --help")


def train(kind: str, output_dir: Path) -> None:
    """Train a configuration."""
    command = [
        *("train", "classification", "--config"),
        *(f"spherization/digits-lenet5-{kind}", "--num_train_epochs", "10", "--output_dir", str(output_dir)),
    ]
    print("    hf-sphere " + " ".join(command), flush=True)
    subprocess.run([sys.executable, "-m", "hf_sphere.commands.main", *command, "--overwrite_output_dir"], check=True)


@torch.inference_mode()
def draw(model_dir: Path, dataset, path: Path) -> None:
    """Draw the embeddings of a dataset."""
    model = AutoModelForImageClassification.from_pretrained(model_dir).eval()
    processor = AutoImageProcessor.from_pretrained(model_dir)
    points = model(**processor(list(dataset["image"]), return_tensors="pt")).embeddings
    plot_sphere(
        points,
        torch.tensor(dataset["label"]),
        list(model.config.id2label.values()),
        title="Digits on the sphere: spherized LeNet-5",
        path=path,
    )


if __name__ == "__main__":
    main()
