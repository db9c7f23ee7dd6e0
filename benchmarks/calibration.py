"""Calibration error of a classifier as it was trained, and with the temperature fitted to held-out images.

python recipes/train_image_classification.py --config cifar10_fast/cifar10-fast-softmax \
    --backbone_kwargs '{"widths": [32, 128, 128]}' --num_train_epochs 5 --warmup_epochs 1.5 --validation_fraction 0.1 \
    --calibrate temperature --output_dir outputs/calibrated
python benchmarks/calibration.py --model outputs/calibrated

Draws the reliability diagram of the documentation.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
from common import report, row

from hf_sphere.data import load_image_split
from hf_sphere.metrics import calibration_errors, reliability_bins
from hf_sphere.nn.calibration import calibrate
from hf_sphere.ood import model_outputs
from hf_sphere.search.extract import load_embedding_model

ROOT = Path(__file__).parent.parent
LOCAL = ROOT.parent / "shared" / "data" / "uoft-cs" / "cifar10"
PICTURE = ROOT / "docs" / "tasks" / "calibration.png"


def main() -> None:
    """Measure both on the test images, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="outputs/calibrated", help="trained with --calibrate temperature")
    parser.add_argument("--dataset_name", default=str(LOCAL) if LOCAL.is_dir() else "uoft-cs/cifar10")
    args = parser.parse_args()
    model = load_embedding_model(args.model)
    fitted, model.config.calibration = model.config.calibration, None
    if fitted is None:
        parser.error(f"{args.model} was trained without --calibrate.")
    images = load_image_split(args.dataset_name, "test", like=args.model, progress=False)
    found = model_outputs(model, images.batches)
    correct = found.logits.argmax(1) == found.labels
    rows = [row("accuracy %", 100 * correct.double().mean().item()), row("temperature", fitted["temperature"])]
    figure, axes = plt.subplots(figsize=(4.2, 3.6), layout="constrained")
    axes.plot((0, 100), (0, 100), "--", color="0.5", linewidth=1)
    titles = {
        "as trained": (found.logits, "o"),
        "with the fitted temperature": (calibrate(found.logits, **fitted), "s"),
    }
    for (title, (logits, marker)), color in zip(titles.items(), ("#0072B2", "#E69F00"), strict=True):
        confidences = logits.double().softmax(1).amax(1)
        errors = calibration_errors(confidences, correct)
        rows += [row(f"{title}: {name} %", 100 * value) for name, value in errors.items()]
        bins = reliability_bins(confidences, correct)
        axes.plot(100 * bins.confidence, 100 * bins.accuracy, marker=marker, color=color, markersize=4, label=title)
    lowest = 10 * int(min(line.get_xydata()[0].min() for line in axes.lines[1:]) // 10)
    axes.set(xlabel="confidence, %", ylabel="accuracy, %", xlim=(lowest, 101), ylim=(lowest, 101))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(PICTURE, dpi=160)
    report("calibration", rows, model=args.model)


if __name__ == "__main__":
    main()
