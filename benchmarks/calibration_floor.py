"""Measure the calibration error that perfectly calibrated predictions show, by chance, on as many images as measured.

python benchmarks/calibration_floor.py

Labels are drawn from the predictions themselves, so that the true calibration error is 0: what is measured is the error
of the estimate. The predictions are of eight classes, their logits of three families, scaled to the expected accuracy
of the tuned heads; their number is that of the test images. Writes `results/calibration_floor.json`.
"""

from typing import Any

import torch
from common import report, row
from scipy.optimize import brentq
from torch import Tensor

from hf_sphere.metrics import calibration_errors

IMAGES, CLASSES, ACCURACY, DRAWS = 8_000, 8, 0.85, 200


def draw_logits(family: str, generator: torch.Generator) -> Tensor:
    """Draw logits (N, K), up to a factor."""
    logits = torch.randn(IMAGES, CLASSES, generator=generator, dtype=torch.float64)
    if family == "one class larger, by differing amounts":
        logits[:, 0] += 3 * torch.rand(IMAGES, generator=generator, dtype=torch.float64)
    elif family == "normal, with a length per image":
        logits *= 0.5 + torch.rand(IMAGES, 1, generator=generator, dtype=torch.float64)
    return logits


def measure(family: str) -> list[dict[str, Any]]:
    """Return the mean and standard deviation of the two calibration errors, in percent."""
    generator, values = torch.Generator().manual_seed(0), []
    for _ in range(DRAWS):
        logits = draw_logits(family, generator)
        factor = brentq(lambda f, z=logits: float((f * z).softmax(1).amax(1).mean()) - ACCURACY, 0.1, 100.0, xtol=1e-4)
        probabilities = (factor * logits).softmax(1)
        labels = probabilities.multinomial(1, generator=generator)[:, 0]
        confidences, classes = probabilities.max(1)
        values.append([100 * value for value in calibration_errors(confidences, classes == labels).values()])
    columns = torch.tensor(values).unbind(1)
    return [
        row(f"logits {family}: calibration error, {kind}, %", column.mean().item()) | {"deviation": column.std().item()}
        for kind, column in zip(("equal mass, L2", "equal width, L1"), columns, strict=True)
    ]


if __name__ == "__main__":
    families = ("normal", "normal, with a length per image", "one class larger, by differing amounts")
    report("calibration_floor", [each for family in families for each in measure(family)])
