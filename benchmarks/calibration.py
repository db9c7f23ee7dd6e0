"""Calibration error of a classifier as it was trained, and with the temperature fitted to held-out images.

python recipes/train_image_classification.py --config cifar10_fast/cifar10-fast-softmax \
    --backbone_kwargs '{"widths": [32, 128, 128]}' --num_train_epochs 5 --warmup_epochs 1.5 --validation_fraction 0.1 \
    --calibrate temperature --output_dir outputs/calibrated
python benchmarks/calibration.py --model outputs/calibrated
"""

import argparse
from pathlib import Path

from common import report, row

from hf_sphere.data import load_image_split
from hf_sphere.metrics import calibration_errors, reliability_bins
from hf_sphere.nn.calibration import calibrate
from hf_sphere.ood import model_outputs
from hf_sphere.search.extract import load_embedding_model

ROOT = Path(__file__).parent.parent
LOCAL = ROOT.parent / "shared" / "data" / "uoft-cs" / "cifar10"


def main() -> None:
    """Measure both on the test images."""
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
    curves = {}
    titles = {"as trained": found.logits, "with the fitted temperature": calibrate(found.logits, fitted["temperature"])}
    for title, logits in titles.items():
        confidences = logits.double().softmax(1).amax(1)
        errors = calibration_errors(confidences, correct)
        rows += [row(f"{title}: {name} %", 100 * value) for name, value in errors.items()]
        bins = reliability_bins(confidences, correct)
        curves[title] = {"confidence": bins.confidence.tolist(), "accuracy": bins.accuracy.tolist()}
    report("calibration", rows, curves=curves, model=args.model)


if __name__ == "__main__":
    main()
