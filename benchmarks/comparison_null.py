"""Measure how often `compare_runs` calls a run better or worse where there is no difference in the population.

python benchmarks/comparison_null.py --weights efficientnet_lite0.safetensors  # as for fine_tuning.py

Draws 2,000 families of runs with five seeds for each of six cases, and counts the families with a false claim: by
intervals over seeds alone; by the widest interval that outcomes per image, and the fraction of test images, permit; and
by this interval and the minimum effect of `hf-sphere compare`. Three cases are simulated:

1. One head under eight names, with one test set of 500 images; Welch's test, corrected for seven comparisons.
2. Two heads with equal expected accuracy and different predictions, with one test set of 500 images per family; Welch's
   test. In both cases a prediction is correct if a sum of normally distributed terms is below a threshold: one per
   image, one per head and image, one per seed, and one per seed and image.
3. Two heads that are trained: classifiers of the nearest mean of two classes, each with 50 features of its own, which
   are equally informative. Each seed redraws the split of 500 images, with 100 for the test, and adds noise to the
   means; the paired test.

Three draw from runs of a softmax head on the features of a frozen EfficientNet-Lite0, with the parts of `digits` and
the test of `hf-sphere compare --frozen`. Eight names of one head have different seeds.

4. One head under eight names, with the test split: 40 of 400 runs, without replacement.
5. One head under eight names, with redrawn splits: five of 50 splits, whose eight runs get the names.
6. The head on two halves of the features, of ten pairs the one with the most similar accuracies. The population is 50
   runs of each on the 355 test images; its mean difference is subtracted. Both have the same seeds. They and 180 images
   are drawn with replacement, repeated images as different ones: without it, the images would vary half as much.

Finished runs in `--work_dir` are not repeated. Writes `results/comparison_null.json`.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import report, row
from scipy.stats import binomtest

from hf_sphere.comparison import compare_runs
from hf_sphere.comparison.measures import measure
from hf_sphere.comparison.plan import Plan
from hf_sphere.comparison.planned import PlannedComparison
from hf_sphere.comparison.significance import LEVEL, Test
from hf_sphere.comparison.training_runs import FrozenRuns
from hf_sphere.utils.files import JsonLines

FAMILIES, SEEDS, IMAGES, NAMES, ACCURACY = 2_000, 5, 500, 8, 0.9
VARIANCES = {"image": 0.6, "head": 0.2, "seed": 0.003}
"""Of the terms; that of seed and image has the rest of 1."""

FEATURES, DISTANCE, TESTED, NOISE = 50, 1.3, 100, 0.1
SETTING, EPOCHS = {"learning_rate": 3e-3, "head_kwargs.label_smoothing": 0.1}, 9
SPLITS, RUNS, DRAWN, PAIRS = 50, 50, 180, 10
"""Splits of case 5; and of case 6, the runs of each half, the test images, and the pairs of halves to choose from."""

COUNTED = [f"false claims {how}" for how in ("over seeds", "by the widest interval", "with the minimum effect")]
COUNTED += ["images on which two runs differ", "mean accuracy"]
Family = dict[str, dict[int, dict[int, float]]]


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


class ColumnRuns(FrozenRuns):
    """Trains on the features with the `columns` of an arm."""

    def select(self, arm: Any, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features and labels of a part."""
        features, labels = super().select(arm, part)
        return features[:, arm.options["columns"]], labels


class Pool:
    """Runs on parts of `digits` as `hf-sphere compare` draws them from a split; the finished ones are in a file."""

    def __init__(self, weights: str, folder: Path, split: str) -> None:
        data: Any = {"dataset_name": "digits", "train_split": split, "image_size": 64, "output_dir": str(folder)}
        arms: Any = {"heads": ["softmax", "cosine"], "backbones": [f"tf_efficientnet_lite0={weights}"], "frozen": True}
        study: Any = PlannedComparison(Plan(**data, **arms, seeds=SPLITS)).frozen_study()  # it needs two arms
        self.runs, self.division, self.arm = ColumnRuns(**vars(study.runs)), study.division, study.arms[0]
        self.finished = JsonLines(folder / f"{split}.jsonl")

    def run(self, seed: int, split: int = 0, half: tuple[int, int] | None = None) -> dict[int, float]:
        """Return the outcome of each test image; a half of the features is the number of a pair, and 0 or 1."""
        key = half, split, seed
        if key not in self.finished:
            columns = np.random.default_rng(half[0]).permutation(1280).reshape(2, -1)[half[1]] if half else slice(None)
            arm = replace(self.arm, options={**self.arm.options, "columns": columns})
            evaluated: Any = self.runs.run(arm, SETTING, self.division.of_seed(split), seed=seed, epochs=EPOCHS)
            self.finished[key] = [*measure("accuracy", evaluated).items()]
        return {image: percent / 100 for image, percent in self.finished[key]}


def run_halves(pool: Pool) -> np.ndarray:
    """Return outcomes, (2, runs, images), on the pair of halves with the smallest difference of the accuracies."""
    runs = [[[[*pool.run(seed, 0, (p, h)).values()] for seed in range(RUNS)] for h in (0, 1)] for p in range(PAIRS)]
    outcomes = np.array(runs)
    return outcomes[np.abs(np.diff(outcomes.mean((2, 3)))).argmin()]


def draw_names(pool: Sequence[Any], is_redrawn: bool, generator: np.random.Generator) -> Family:
    """Return runs under eight names; if splits are redrawn, each eight successive runs have the same one."""
    runs = np.arange(len(pool)) if is_redrawn else generator.permutation(len(pool))
    drawn = generator.permuted(generator.choice(runs.reshape(-1, NAMES), SEEDS, replace=False), axis=1)
    return {f"run {n}": {seed: pool[run] for seed, run in enumerate(of)} for n, of in enumerate(drawn.T)}


def draw_halves(outcomes: np.ndarray, generator: np.random.Generator) -> Family:
    """Return runs on two halves of the features, with the same seeds and test images."""
    seeds, images = generator.integers(RUNS, size=(SEEDS, 1)), generator.integers(outcomes.shape[2], size=DRAWN)
    drawn = outcomes[:, seeds, images].tolist()
    return {f"run {n}": {seed: dict(enumerate(run[seed])) for seed in range(SEEDS)} for n, run in enumerate(drawn)}


def count(draw: Callable[..., Family], test: Test, test_fraction: float | None = None) -> Iterator[list[float]]:
    """Yield the values of `COUNTED` of each family."""
    for number in range(FAMILIES):
        family = draw(np.random.default_rng(number))
        means = {run: {seed: statistics.fmean(row.values()) for seed, row in of.items()} for run, of in family.items()}
        # As `Study.compare`; `perfect` sets the minimum effect, on which intervals and p-values do not depend.
        compare = partial(compare_runs, reference="run 0", higher_is_better=True, test=test, perfect=1)
        found = [compare(means).values(), compare(family, test_fraction=test_fraction).values()]
        claims = [any(run.p_corrected is not None and run.p_corrected < LEVEL for run in of) for of in found]
        claims.append(any(run.verdict in ("better", "worse") for run in found[1]))
        differ = [abs(value - family["run 1"][0][image]) > 0.5 for image, value in family["run 0"][0].items()]
        yield [*claims, statistics.fmean(differ), statistics.fmean(v for run in means.values() for v in run.values())]


def main() -> None:
    """Count the false claims of all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help="file of examples/convert_efficientnet_lite0.py")
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/comparison_null"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    fixed, redrawn = (Pool(options.weights, options.work_dir, split) for split in ("train", "all"))
    one_set = partial(draw_names, [fixed.run(seed) for seed in range(NAMES * SPLITS)], False)
    splits = partial(draw_names, [redrawn.run(seed, seed // NAMES) for seed in range(NAMES * SPLITS)], True)
    halves = run_halves(fixed)
    accuracies = halves.mean((1, 2))
    halves -= (accuracies - accuracies[0])[:, None, None]
    cases: dict[str, Any] = {
        "one head under eight names": (partial(draw_terms, 1, NAMES), "welch"),
        "two heads, one test set": (partial(draw_terms, 2, 2), "welch"),
        "two heads, redrawn splits": (draw_trained, "paired", TESTED / IMAGES),
        "`digits`, one head under eight names": (one_set, "welch"),
        "`digits`, one head, redrawn splits": (splits, "paired", redrawn.division.test_fraction),
        "`digits`, two halves of the features": (partial(draw_halves, halves), "welch"),
    }
    bound, rows = 0.05 + 2 * math.sqrt(0.05 * 0.95 / FAMILIES), []
    for case, arguments in cases.items():
        for what, values in zip(COUNTED, zip(*count(*arguments), strict=True), strict=True):
            rows.append(row(f"{case}: {what}", statistics.fmean(values), bound if what in COUNTED[1:3] else None))
            if what in COUNTED[:3]:
                rows[-1]["interval"] = [*binomtest(sum(values), FAMILIES).proportion_ci(method="wilson")]
    report("comparison_null", rows, families=FAMILIES, accuracies_of_halves=accuracies.tolist())


if __name__ == "__main__":
    main()
