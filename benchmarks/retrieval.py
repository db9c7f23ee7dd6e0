"""Compare the speed of retrieval scores with pytorch-metric-learning, and measure the memory for 60,000 embeddings.

Writes `results/retrieval.json`. `--quick` skips the 60,000 embeddings.
"""

import argparse
import resource
import time
from typing import Any

import torch
import torch.nn.functional as F
from common import ratio, report, row, time_in_turn
from torch import Tensor

from hf_sphere.metrics import retrieval_scores

NAMES = {
    "precision_at_1": "recall_at_1",
    "r_precision": "r_precision",
    "mean_average_precision_at_r": "map_at_r",
}
"""Names of the scores in pytorch-metric-learning, and here."""


def clusters(count: int, dim: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return embeddings around the centers of their classes, and their labels."""
    generator = torch.Generator().manual_seed(0)
    centers = F.normalize(torch.randn(classes, dim, generator=generator), dim=1) * dim**0.5
    embeddings = torch.randn(count, dim, generator=generator).mul_(2)
    for number, center in enumerate(centers):  # in place: a memory peak here would hide a later one
        embeddings[number::classes] += center
    return embeddings, torch.arange(count) % classes


def compare() -> list[dict[str, Any]]:
    try:
        from pytorch_metric_learning.distances import CosineSimilarity
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
        from pytorch_metric_learning.utils.inference import CustomKNN
    except ImportError as error:
        raise SystemExit("this benchmark requires `pip install pytorch-metric-learning`") from error
    embeddings, labels = clusters(10_000, 128, classes=100)
    calculator = AccuracyCalculator(include=tuple(NAMES), k="max_bin_count", knn_func=CustomKNN(CosineSimilarity()))
    theirs = calculator.get_accuracy(embeddings, labels)
    seconds = time_in_turn(
        {
            "theirs": lambda: calculator.get_accuracy(embeddings, labels),
            "ours": lambda: retrieval_scores(embeddings, labels),
        },
        rounds=5,
        warmup=1,
    )
    ours = retrieval_scores(embeddings, labels)
    difference = max(abs(theirs[their] - ours[our]) for their, our in NAMES.items())
    relative = ratio(seconds["ours"], seconds["theirs"])
    return [
        row("10,000 x 128, torch: time relative to pytorch-metric-learning", relative, 1.0),
        row("10,000 x 128, torch: largest difference of a score", difference, at_most=1e-6),
        row("10,000 x 128, torch: seconds", min(seconds["ours"])),
        row("10,000 x 128, pytorch-metric-learning: seconds", min(seconds["theirs"])),
    ]


def many() -> list[dict[str, Any]]:
    embeddings, labels = clusters(60_000, 512, classes=10)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    retrieval_scores(embeddings, labels)
    took = time.perf_counter() - start
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return [
        row("60,000 x 512, 10 classes: seconds", took),
        row("60,000 x 512, 10 classes: additional memory, MiB", memory, at_most=2048),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="skip the 60,000 embeddings")
    quick = parser.parse_args().quick
    # The large case first: the memory peak of the other one would hide it.
    rows = [] if quick else many()
    report("retrieval", [*rows, *compare()])


if __name__ == "__main__":
    main()
