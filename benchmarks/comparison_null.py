"""Measure how often `compare_runs` calls a run better or worse where there is no difference in the population.

python benchmarks/comparison_null.py

Simulates 2,000 families of runs with five seeds for each of three cases, and counts the families with a false claim: by
intervals over seeds alone, and by the widest interval that outcomes per image, and the fraction of test images, permit.

1. One head under eight names, with one test set of 500 images; Welch's test, corrected for seven comparisons.
2. Two heads with equal expected accuracy and different predictions, with one test set of 500 images per family; Welch's
   test. In both cases a prediction is correct if a sum of normally distributed terms is below a threshold: one per
   image, one per head and image, one per seed, and one per seed and image.
3. Two heads that are trained: classifiers of the nearest mean of two classes, each with 50 features of its own, which
   are equally informative. Each seed redraws the split of 500 images, with 100 for the test, and adds noise to the
   means; the paired test.

No minimum effect is required. Writes `results/comparison_null.json`.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from common import report, row

from hf_sphere.comparison import compare_runs
from hf_sphere.comparison.significance import Test

FAMILIES, SEEDS, IMAGES, NAMES = 2_000, 5, 500, 8
ACCURACY = 0.9
VARIANCES = {"image": 0.6, "head": 0.2, "seed": 0.003}
"""Of the terms; that of seed and image has the rest of 1."""

FEATURES, DISTANCE, TESTED, NOISE = 50, 1.3, 100, 0.1
Family = dict[str, dict[int, dict[int, bool]]]


def draw_terms(heads: int, runs: int, generator: np.random.Generator) -> Family:
    """Return outcomes of runs with one test set; with one head, all runs have it."""

    def term(name: str, *shape: int) -> np.ndarray:
        return generator.normal(scale=math.sqrt(VARIANCES[name]), size=shape)

    rest = math.sqrt(1 - sum(VARIANCES.values())) * generator.normal(size=(runs, SEEDS, IMAGES))
    total = term("image", IMAGES) + term("head", heads, 1, IMAGES) + term("seed", runs, SEEDS, 1) + rest
    correct = (total < statistics.NormalDist().inv_cdf(ACCURACY)).tolist()
    return {f"run {n}": {seed: dict(enumerate(run[seed])) for seed in range(SEEDS)} for n, run in enumerate(correct)}


def draw_trained(generator: np.random.Generator) -> Family:
    """Return outcomes of two trained heads whose seeds redraw the split."""
    labels = generator.choice([-1, 1], size=IMAGES)
    features = generator.normal(size=(2, IMAGES, FEATURES)) + DISTANCE / math.sqrt(FEATURES) * labels[:, None]
    family: Family = {"run 0": {}, "run 1": {}}
    for seed in range(SEEDS):
        tested, trained = np.split(generator.permutation(IMAGES), [TESTED])
        for run, images in zip(family, features, strict=True):
            weights = labels[trained] @ images[trained] / len(trained) + NOISE * generator.normal(size=FEATURES)
            correct = images[tested] @ weights * labels[tested] > 0
            family[run][seed] = dict(zip(tested.tolist(), correct.tolist(), strict=True))
    return family


def count(
    draw: Callable[[np.random.Generator], Family], test: Test, test_fraction: float | None = None
) -> Iterator[tuple[bool, bool, float]]:
    """Yield whether a family has a false claim over seeds alone, and by the widest interval; and its accuracy."""
    for number in range(FAMILIES):
        family = draw(np.random.default_rng(number))
        means = {run: {seed: statistics.fmean(row.values()) for seed, row in of.items()} for run, of in family.items()}
        compare = partial(compare_runs, reference="run 0", higher_is_better=True, test=test)
        over_seeds, widest = (
            any(run.verdict in ("better", "worse") for run in comparison.values())
            for comparison in (compare(means), compare(family, test_fraction=test_fraction))
        )
        yield over_seeds, widest, statistics.fmean(value for run in means.values() for value in run.values())


def main() -> None:
    """Simulate the three cases."""
    bound = 0.05 + 2 * math.sqrt(0.05 * 0.95 / FAMILIES)
    cases = {
        "one head under eight names": count(lambda generator: draw_terms(1, NAMES, generator), test="welch"),
        "two heads, one test set": count(lambda generator: draw_terms(2, 2, generator), test="welch"),
        "two heads, redrawn splits": count(draw_trained, test="paired", test_fraction=TESTED / IMAGES),
    }
    rows = []
    for case, families in cases.items():
        seeds, widest, accuracies = (statistics.fmean(values) for values in zip(*families, strict=True))
        rows.append(row(f"{case}: false claims over seeds", seeds))
        rows.append(row(f"{case}: false claims by the widest interval", widest, at_most=bound))
        rows.append(row(f"{case}: mean accuracy", accuracies))
    report("comparison_null", rows, families=FAMILIES)


if __name__ == "__main__":
    main()
