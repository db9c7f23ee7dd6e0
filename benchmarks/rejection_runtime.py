"""Compare the decisions of a rejection in ONNX with those of Python, and measure what a rejection costs.

OMP_NUM_THREADS=1 python benchmarks/rejection_runtime.py

The decisions are those of a model of `rejection.py` on the 10,000 test images of MNIST, of which it does not know two
classes. It is calibrated with images of its training: the level is not tested here, and a test image that calibrates
would be exactly at the threshold. Times are those of the fast CIFAR-10 network without training, alone on the machine.
Writes `results/rejection_runtime.json`.
"""

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import ratio, report, row, time_in_turn
from onnxruntime import InferenceSession
from rejection import LEVEL, ROOT, Lines, local, scores, train
from torch import Tensor

from hf_sphere.data import load_image_split
from hf_sphere.export import export_onnx
from hf_sphere.models import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.ood import SCORES, fit_rejection
from hf_sphere.search.extract import class_names, load_embedding_model

OF_LOGITS = ("max_softmax", "max_logit", "energy")


def onnx(args: argparse.Namespace) -> Lines:
    """Compare the decisions of exported models on all test images of MNIST with those of Python."""
    model = load_embedding_model(train(args, "mnist", 0))
    load = partial(load_image_split, local("ylecun/mnist"), like=model, progress=False)
    known = load("training", select_class=set(class_names(model)).__contains__, max_samples=2_000).batches
    pixels = [batch["pixel_values"] for batch in load("test").batches.epoch()]
    rows: Lines = []
    for score in (*(score for score in SCORES if score != "concentration"), "max_softmax by class"):
        by_class = score.endswith(" by class")
        rejection = fit_rejection(model, known, LEVEL, score.removesuffix(" by class"), by_class=by_class)
        calibration = rejection.class_calibration if by_class else rejection.calibration[None]
        ranks = (LEVEL * (calibration.isfinite().sum(1) + 1)).floor().long()
        thresholds, different, close = calibration.gather(1, ranks[:, None] - 1)[:, 0], 0, 0
        with tempfile.TemporaryDirectory() as path, torch.inference_mode():
            export_onnx(model, Path(path, "model.onnx"))
            session = InferenceSession(Path(path, "model.onnx"), providers=["CPUExecutionProvider"])
            for batch in pixels:
                computed = model(batch)
                [exported] = session.run(["known"], {"pixel_values": batch.numpy()})
                pooled, of_classes = scores(rejection, computed)
                own = of_classes if by_class else pooled[:, None]
                is_close = ((own - thresholds).abs() < 1e-5).any(1)[computed.known != torch.from_numpy(exported)]
                different, close = different + int((~is_close).sum()), close + int(is_close.sum())
        title = f"ONNX, {score}, 10,000 images of MNIST"
        rows.append(row(f"{title}: other decisions, score not within 1e-5 of the threshold", different, at_most=0))
        rows.append(row(f"{title}: other decisions, score within 1e-5 of the threshold", close, at_most=5))
    return rows


def cost(args: argparse.Namespace) -> Lines:
    """Time the forward pass of the fast CIFAR-10 network with and without a rejection, in turn."""
    config = SphereVisionConfig(backbone="airbench_cifar", head="softmax", num_labels=10, image_size=32)
    model = SphereVisionForImageClassification(config).eval()
    generator = torch.Generator().manual_seed(0)
    known = [(torch.randn(500, 3, 32, 32, generator=generator), torch.arange(500) % 10) for _ in range(2)]
    attached: dict[str, Any] = {"none": None}
    attached |= {score: fit_rejection(model, known, LEVEL, score) for score in SCORES if score != "concentration"}
    rows: Lines = []
    for size, rounds in ((512, args.rounds), (1, 40 * args.rounds)):

        def run(rejection: Any, batch: Tensor) -> None:
            model.rejection = rejection
            model(batch)

        batch = torch.randn(size, 3, 32, 32, generator=generator)
        with torch.inference_mode():
            seconds = time_in_turn({key: partial(run, value, batch) for key, value in attached.items()}, rounds)
        none = seconds.pop("none")
        rows.append(row(f"batch of {size}: milliseconds without", 1e3 * statistics.median(none)))
        for score, own in seconds.items():
            bound = 1.1 if score in OF_LOGITS else None
            rows.append(row(f"batch of {size}, {score}: time with / without", ratio(own, none), bound))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "rejection", help="of rejection.py")
    parser.add_argument("--rounds", type=int, default=7, help="of a batch; 40 times as many of one image")
    args = parser.parse_args()
    rows = [*onnx(args), *cost(args)]
    report("rejection_runtime", rows, threads=torch.get_num_threads(), rounds=args.rounds)


if __name__ == "__main__":
    main()
