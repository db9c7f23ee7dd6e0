"""Measure how often `EmbeddingSpace` accepts queries without a match in some hundred simulated geometries.

python benchmarks/matching_geometries.py
python benchmarks/matching_geometries.py --score cosine
python benchmarks/matching_geometries.py --twins

The geometries differ in how groups lie (independent, in nearly equal pairs, in families, around hubs, with heavy tails,
with unequal spread, with sizes that follow the distance to the center), in their sizes (1, 2, 8, Zipf, uniform, one or
20, rarely 60), dimension, spread and number. In each repetition, groups are drawn, some are enrolled and calibrate,
and the rows of 20 others are queries. Standard errors are over repetitions.
Writes `results/matching_geometries.json` (half an hour). With `--twins`, all groups are loose but for one or two pairs
of nearly equal ones, or three clusters of which each has a row in the previous one, and each group is the new one in
turn: the worst groups that are known. Writes `results/matching_twins.json` (ten minutes).
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
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


def draw_twins(pairs: int, count: int, random: np.random.Generator) -> list[np.ndarray]:
    """Return groups of 8 rows, of which the first ones are in pairs of nearly equal ones."""
    points = random.standard_normal((count, 8, 32))
    points[pairs : 2 * pairs] = points[:pairs] + 0.1 * random.standard_normal((pairs, 8, 32))
    return [*points]


def draw_triplet(count: int, random: np.random.Generator) -> list[np.ndarray]:
    """Return three clusters of 150 rows, of which each has one row in the previous cluster, and groups of 8 rows."""
    centers = np.repeat(random.standard_normal((3, 1, 32)), 150, axis=1)
    centers[:, -1] = np.roll(centers[:, 0], 1, axis=0)
    return [*(centers + 0.1 * random.standard_normal(centers.shape)), *random.standard_normal((count - 3, 8, 32))]


CASES: dict[str, tuple[int, int, Callable[[int, np.random.Generator], list[np.ndarray]]]] = {
    "1 pair of twins among 21 groups": (2, 21, partial(draw_twins, 1)),
    "2 pairs of twins among 21 groups": (4, 21, partial(draw_twins, 2)),
    "2 pairs of twins among 42 groups": (4, 42, partial(draw_twins, 2)),
    "a cyclic triplet among 17 groups": (3, 17, draw_triplet),
    "a cyclic triplet among 34 groups": (3, 34, draw_triplet),
    "a cyclic triplet among 41 groups": (3, 41, draw_triplet),
}
"""Number of special groups, number of groups, and how these are drawn, the special ones first."""


def worst_cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rates for each case, where one of the special groups or one of the others is new, by their numbers."""
    for what, (special, count, draw_groups) in CASES.items():
        random, rates = np.random.default_rng(count), dict[tuple[str, float], list[float]]()
        for _ in range(args.repetitions):
            groups = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in draw_groups(count, random)]
            parts = [part.astype(np.float32) for part in groups]
            shares: dict[tuple[str, float], float] = {}
            for new, weight in ((0, special / count), (count - 1, 1 - special / count)):
                known = [part for number, part in enumerate(parts) if number != new]
                names = np.repeat(np.arange(len(known)), [*map(len, known)])
                space = EmbeddingSpace(torch.from_numpy(np.concatenate(known)), names)
                for rule, p_values in p_values_of(space, args.score, parts[new]).items():
                    for level in LEVELS:
                        share = weight * float((p_values <= level * (1 + 1e-12)).mean())
                        shares[rule, level] = shares.get((rule, level), 0.0) + share
            for key, share in shares.items():
                rates.setdefault(key, []).append(share)
        for (rule, level), values in rates.items():
            rate, error = float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5)
            yield row(f"{what}, {rule}: accepted at {level:.0%}", rate, at_most=1.2 * level + 2 * error)
            yield row(f"{what}, {rule}: standard error at {level:.0%}", error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--every", type=int, default=2, help="measure each geometry, each second one, ...")
    parser.add_argument("--score", choices=["cosine", "margin"], default="margin")
    parser.add_argument("--twins", action="store_true", help="measure the worst groups that are known")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.twins:
        report("matching_twins", [*worst_cases(args)], repetitions=args.repetitions)
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
