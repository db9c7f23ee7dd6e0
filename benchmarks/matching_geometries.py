"""Measure how often `EmbeddingSpace` accepts queries without a match in some hundred simulated geometries.

python benchmarks/matching_geometries.py
python benchmarks/matching_geometries.py --score cosine
python benchmarks/matching_geometries.py --twins

The geometries differ in how groups lie (independent, in nearly equal pairs, in families, around hubs, with heavy tails,
with unequal spread, with sizes that follow the distance to the center), in their sizes (1, 2, 8, Zipf, uniform, one or
20, rarely 60), dimension, spread and number. In each repetition, groups are drawn, some are enrolled and calibrate,
and the rows of 20 others are queries. Standard errors are over repetitions.
Writes `results/matching_geometries.json` (half an hour). With `--twins`, all groups are loose but for one or two pairs,
whose rows are nearly equal, and each group is the new one in turn: the worst groups that are known for the sharp rule.
Writes `results/matching_twins.json` (three minutes).
"""

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from common import report, row

from hf_sphere.search import EmbeddingSpace

LEVELS = (0.05, 0.10)
NEW = 20
"""Number of groups that are not enrolled."""


class Geometry(NamedTuple):
    """How groups lie, their sizes, the dimension, the spread of rows, and the number of enrolled groups."""

    style: str
    sizes: str
    dim: int
    spread: float
    groups: int

    def __str__(self) -> str:
        return f"{self.style}, sizes {self.sizes}, {self.dim} dimensions, {self.groups} groups"


def geometries() -> Iterator[Geometry]:
    shapes = ((2, 0.3, 30), (8, 0.05, 25), (8, 0.5, 60), (64, 0.7, 40))
    styles = (
        "independent",
        "pairs",
        "families",
        "hub",
        "heavy tails",
        "unequal spread",
        "large inside",
        "large outside",
    )
    for style in styles:
        for sizes in ("1", "2", "8", "zipf", "1 to 8", "1 or 20", "1 to 3 or 60"):
            if not (style.startswith("large") and sizes.isdigit()):
                yield from (Geometry(style, sizes, *shape) for shape in shapes)


def draw_sizes(kind: str, count: int, random: np.random.Generator) -> np.ndarray:
    if kind.isdigit():
        return np.full(count, int(kind))
    if kind == "zipf":
        return np.minimum(200, random.zipf(1.6, count))
    if kind == "1 to 8":
        return random.integers(1, 9, count)
    if kind == "1 or 20":
        return np.where(random.random(count) < 0.5, 1, 20)
    return np.where(random.random(count) < 0.1, 60, random.integers(1, 4, count))


def draw(geometry: Geometry, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return unit vectors (n, d) of groups in random order, and the groups (n,)."""
    style, kind, dim, spread, enrolled = geometry
    count = enrolled + NEW
    sizes, axis = draw_sizes(kind, count, random), np.eye(dim)[0]
    centers, spreads = random.standard_normal((count, dim)), np.full(count, spread)
    if style == "pairs":
        half = count // 2
        centers[half : 2 * half] = centers[:half] + 0.05 * random.standard_normal((half, dim))
        centers = centers[random.permutation(count)]
    elif style == "families":
        family = random.standard_normal((max(2, count // 4), dim))
        centers = family[random.integers(0, len(family), count)] + 0.4 * centers
    elif style == "hub":
        centers = 0.7 * centers + 2 * axis
    elif style == "heavy tails":
        centers = centers * np.exp(random.standard_normal((count, 1))) + 1.5 * axis
    elif style == "unequal spread":
        spreads = spread * np.exp(0.8 * random.standard_normal(count))
    elif style.startswith("large"):
        is_inside = (sizes > np.median(sizes)) == (style == "large inside")
        centers = centers * np.where(is_inside, 0.3, 1.5)[:, None] + axis
    groups = np.repeat(np.arange(count), sizes)
    points = centers[groups] + spreads[groups, None] * random.standard_normal((len(groups), dim))
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32), groups


def p_values_of(space: EmbeddingSpace, score: str, queries: np.ndarray) -> dict[str, np.ndarray]:
    """Return the p-values of the best row of queries by each rule."""
    p_values = {}
    for rule in ("sharp", "strict"):
        space.calibrate(score=score, rule=rule)
        p_values[rule] = space.search(queries, 1).p_values.numpy()[:, 0]
    is_bounded = space.calibration.num_groups < len(space.calibration.groups)  # else all rules are the strict one
    p_values["bounded"] = np.maximum(p_values["sharp"], p_values["strict"] / 1.2 if is_bounded else 0)
    return p_values


def accepted(geometry: Geometry, random: np.random.Generator, score: str) -> dict[tuple[str, float], float]:
    """Return the fraction of rows of new groups that is accepted, the mean over groups, by rule and level."""
    points, groups = draw(geometry, random)
    is_known = groups < geometry.groups
    shares = {}
    space = EmbeddingSpace(torch.from_numpy(points[is_known]), groups[is_known])
    for rule, p_values in p_values_of(space, score, points[~is_known]).items():
        new, counts = np.unique(groups[~is_known], return_inverse=True, return_counts=True)[1:]
        for level in LEVELS:
            shares[rule, level] = (np.bincount(new, p_values <= level * (1 + 1e-12)) / counts).mean()
    return shares


def twins(pairs: int, enrolled: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rates for groups of 8 rows, of which some are pairs of twins; of them and of the others, one is new."""
    random, dim, size = np.random.default_rng(enrolled), 32, 8
    share = 2 * pairs / (enrolled + 1)
    rates: dict[tuple[str, float], list[float]] = {}
    for _ in range(args.repetitions):
        points = random.standard_normal((enrolled + 1, size, dim))
        points[pairs : 2 * pairs] = points[:pairs] + 0.1 * random.standard_normal((pairs, size, dim))
        points = (points / np.linalg.norm(points, axis=2, keepdims=True)).astype(np.float32)
        p = {}
        for new, weight in ((0, share), (enrolled, 1 - share)):
            space = EmbeddingSpace(
                torch.from_numpy(np.delete(points, new, 0).reshape(-1, dim)), np.arange(enrolled * size) // size
            )
            p |= {(rule, weight): values for rule, values in p_values_of(space, args.score, points[new]).items()}
        for rule in dict.fromkeys(rule for rule, _ in p):
            for level in LEVELS:
                values = [weight * (p[rule, weight] <= level * (1 + 1e-12)).mean() for weight in (share, 1 - share)]
                rates.setdefault((rule, level), []).append(sum(values))
    for (rule, level), values in rates.items():
        rate, error = float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5)
        what = f"{pairs} pair{'s' * (pairs > 1)} of twins among {enrolled + 1} groups, {rule}"
        yield row(f"{what}: accepted at {level:.0%}", rate, at_most=1.2 * level + 2 * error)
        yield row(f"{what}: standard error at {level:.0%}", error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--every", type=int, default=2, help="measure each geometry, each second one, ...")
    parser.add_argument("--score", choices=["cosine", "margin"], default="margin")
    parser.add_argument("--twins", action="store_true", help="measure pairs of twins among loose groups")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.twins:
        rows = [line for pairs, enrolled in ((1, 20), (2, 20), (2, 41)) for line in twins(pairs, enrolled, args)]
        report("matching_twins", rows, repetitions=args.repetitions)
        return
    rows = []
    worst: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for number, geometry in list(enumerate(geometries()))[:: args.every]:
        random = np.random.default_rng(number)
        shares = [accepted(geometry, random, args.score) for _ in range(args.repetitions)]
        for rule, level in shares[0]:
            values = np.array([share[rule, level] for share in shares])
            rate, error = float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)
            worst.setdefault((rule, level), []).append((rate, error))
            rows.append(row(f"{geometry}, {rule}: accepted at {level:.0%}", rate, at_most=1.2 * level + 2 * error))
        print(geometry, *(f"{entry['value']:.3f}" for entry in rows[-6:]), flush=True)
    for (rule, level), rates in worst.items():
        rows.append(row(f"largest of {len(rates)} geometries, {rule}: accepted at {level:.0%}", *max(rates)[:1]))
    name = "matching_geometries" + f"_{args.score}" * (args.score != "margin")
    report(name, rows, repetitions=args.repetitions)


if __name__ == "__main__":
    main()
