"""Measure `EmbeddingSpace.compare`: its p-values without a difference, its power, and the rows that it finds outside.

python benchmarks/drift.py --weights efficientnet_lite0.safetensors

The embeddings are those of `matching.py`. Without a difference, both sides are halves of a dataset by groups, or 500
images of CIFAR-10 each. Writes `results/drift.json` (about 10 minutes on one core).
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, report, row
from matching import DATA, ROOT, TITLES, corpus, embed_images, load, rank_in_group
from PIL import ImageFilter
from scipy.stats import kstest

from hf_sphere.metrics import energy_test
from hf_sphere.search import EmbeddingSpace
from hf_sphere.search.drift import draw_samples

BLURRED = 1_000
"""Number of test images of CIFAR-10 that are blurred."""

Vectors = tuple[np.ndarray, np.ndarray]


def space(vectors: np.ndarray, groups: np.ndarray) -> EmbeddingSpace:
    return EmbeddingSpace(torch.from_numpy(vectors), None if len(set(groups)) == len(groups) else groups)


def halves(vectors: np.ndarray, groups: np.ndarray, random: np.random.Generator) -> list[Vectors]:
    """Return up to five rows of each of two times up to 500 different groups."""
    order = random.permutation(np.unique(groups))
    count, rows = min(500, len(order) // 2), random.permutation(len(groups))
    rows = rows[rank_in_group(groups[rows]) < 5]
    parts = (rows[np.isin(groups[rows], part)] for part in (order[:count], order[count : 2 * count]))
    return [(vectors[part], groups[part]) for part in parts]


def without_difference(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare halves; intervals and rows that are outside, which take longer, in every fifth draw."""
    rows = []
    for name, title in TITLES.items():
        data, random = corpus(name, args), np.random.default_rng(0)
        p_values, found = [], []
        for draw in range(args.draws):
            first, second = (space(*half) for half in halves(*data, random))
            sides = [(first.vectors, first._groups), (second.vectors, second._groups)]
            p_values.append(energy_test(*draw_samples(first, sides, draw), seed=draw)[1])
            found += [first.compare(second, seed=draw)] if draw % 5 == 0 else []
        shares = {
            "p-values of at most 5%": [p <= 0.05 for p in p_values],
            "any row outside at 5%": [len(each.outside) > 0 for each in found],
            "0 degrees outside of the interval": [each.angle[1] > 0 for each in found],
            "intervals of the dimension without overlap": [
                max(each.dimensions[side][1] for side in (0, 1)) > min(each.dimensions[side][2] for side in (0, 1))
                for each in found
            ],
        }
        rows.append(row(f"{title} halves: Kolmogorov-Smirnov", float(kstest(p_values, "uniform").pvalue), None, 1e-3))
        for what, cases in shares.items():
            at_most = 0.05 + 2 * (0.05 * 0.95 / len(cases)) ** 0.5
            rows.append(row(f"{title} halves: {what}", float(np.mean(cases)), at_most))
        print(*(f"{each['what']} {each['value']:.3g}" for each in rows[-5:]), sep="\n", flush=True)
    return rows


def with_difference(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare parts of a dataset with parts of which some rows are different."""
    images, names = corpus("cifar10", args)
    characters = corpus("omniglot", args)[0]
    texts = corpus("wikitext", args)
    file = np.load(args.output_dir / "cifar10.npz")
    labels, known = file["labels"], file["rows"]
    pictures = load("uoft-cs/cifar10", "test", args.data)["img"]
    chosen = np.random.default_rng(1).permutation(len(images))[:BLURRED]
    blurred = args.output_dir / "cifar10_blurred.npy"
    if not blurred.is_file():
        views = [pictures[int(known[index])].filter(ImageFilter.GaussianBlur(0.5)) for index in chosen]
        np.save(blurred, torch.nn.functional.normalize(embed_images(views, args.weights)).numpy())
    softer = np.load(blurred)

    def topic(random: np.random.Generator) -> list[Vectors]:
        """Return articles, and others that are among the third that is nearest to one article."""
        vectors, groups = texts
        means = np.stack([vectors[groups == group].mean(0) for group in np.unique(groups)])
        near = random.permutation(np.argsort(-means @ means[random.integers(len(means))])[: len(means) // 3])[:20]
        others = random.permutation(np.setdiff1d(np.arange(len(means)), near))[:60]
        return [(vectors[np.isin(groups, part)], groups[np.isin(groups, part)]) for part in (others, near)]

    def replaced(share: float) -> Callable[[np.random.Generator], list[Vectors]]:
        def draw(random: np.random.Generator) -> list[Vectors]:
            first, (vectors, groups) = halves(images, names, random)
            count = round(share * len(vectors))
            vectors = np.concatenate([vectors[count:], random.permutation(characters)[:count]])
            return [first, (vectors, groups)]

        return draw

    def without_class(random: np.random.Generator) -> list[Vectors]:
        first, second = halves(images, names, random)
        kept = labels[second[1]] != random.integers(10)
        return [first, (second[0][kept], second[1][kept])]

    def blur(random: np.random.Generator) -> list[Vectors]:
        others = np.setdiff1d(np.arange(len(images)), chosen)
        first = random.permutation(others)[:500]
        return [(images[first], first), (random.permutation(softer)[:500], np.arange(500))]

    cases = {
        "20 articles of a topic": topic,
        "CIFAR-10 without one class of ten": without_class,
        "CIFAR-10 blurred by half a pixel": blur,
        "CIFAR-10 with 5% of Omniglot": replaced(0.05),
        "CIFAR-10 with 10% of Omniglot": replaced(0.10),
        "Omniglot instead of CIFAR-10": replaced(1.0),
    }
    rows = []
    for what, draw in cases.items():
        random = np.random.default_rng(0)
        found = []
        for seed in range(args.draws // 4):
            first, second = draw(random)
            found.append(space(*first).compare(space(*second), seed=seed))
        rows.append(row(f"{what}: found at 5%", float(np.mean([each.p_value <= 0.05 for each in found]))))
        rows.append(row(f"{what}: degrees", float(np.median([each.angle[0] for each in found]))))
        print(rows[-2], found[-1], flush=True)
    return rows


def outside(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Look for 50 drawings of Omniglot among 950 images of CIFAR-10."""
    images, characters = corpus("cifar10", args)[0], corpus("omniglot", args)[0]
    random, shares = np.random.default_rng(0), []
    for seed in range(args.draws // 10):
        order = random.permutation(len(images))
        others = np.concatenate([images[order[:950]], random.permutation(characters)[:50]])
        found = space(images[order[1_000:]], order[1_000:]).compare(others, seed=seed).outside
        shares.append([float((found >= 950).sum()) / 50, float((found < 950).sum()) / max(1, len(found))])
    found_share, false_share = np.mean(shares, 0)
    error = 2 * np.std(shares, 0)[1] / len(shares) ** 0.5
    what = "50 of Omniglot among 1,000 of CIFAR-10"
    return [row(f"{what}: found", float(found_share)), row(f"{what}: false", float(false_share), 0.05 + error)]


PARTS = {"without": without_difference, "with": with_difference, "outside": outside}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="file of examples/convert_efficientnet_lite0.py")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "matching")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    args = parser.parse_args()
    file = RESULTS / "drift.json"
    rows = json.loads(file.read_text())["rows"] if file.is_file() else []  # those of other parts are kept
    for part in args.parts:
        rows += PARTS[part](args)
        report("drift", [*{line["what"]: line for line in rows}.values()], draws=args.draws)


if __name__ == "__main__":
    main()
