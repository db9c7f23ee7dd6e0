"""Tests of a difference between two groups of values, their correction for several tests, and their power."""

import bisect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from hf_sphere.utils.checks import check_choice, check_not_text

LEVEL = 0.05
"""Significance level of all tests; intervals have the complementary coverage."""

Outcomes = Mapping[Any, float]
"""By the id of the test image, an int or str."""

Test = Literal["welch", "paired"]
"""Welch's test of two independent groups, or the test of the differences of pairs."""

Variation = Literal["seeds", "seeds and test images", "resampled splits", "test images"]
"""What an interval of a difference accounts for; only that of test images if a run has a single seed."""


class TestResult(NamedTuple):
    """Two-sided test of a difference of means."""

    difference: float
    error: float  # standard error of the difference
    freedom: float  # degrees of freedom of Student's distribution
    variation: Variation = "seeds"

    @property
    def interval(self) -> tuple[float, float]:
        """Interval of the difference, with a coverage of 95 %."""
        half = float(stats.t.isf(LEVEL / 2, self.freedom)) * self.error
        return self.difference - half, self.difference + half

    @property
    def p_value(self) -> float:
        """Two-sided p-value, not corrected."""
        return float(2 * stats.t.sf(abs(self.difference) / self.error, self.freedom))

    def p_equivalence(self, margin: float) -> float:
        """Return the larger p-value of two one-sided tests of a difference within a margin (TOST; Schuirmann, 1987)."""
        return float(stats.t.sf((margin - abs(self.difference)) / self.error, self.freedom))

    def power(self, minimum: float | None, seeds: int, *, tests: int, test: Test) -> float | None:
        """Return the power for a minimum effect with this standard error, of at least so many seeds per group."""
        if not minimum:
            return None
        if self.variation == "test images":
            seeds, test = round(self.freedom) + 1, "paired"
        # The deviation between seeds that has the standard error; a test over images has more degrees of freedom.
        deviation = self.error * math.sqrt(seeds / (1 if test == "paired" else 2))
        return power(minimum, deviation, seeds, tests=tests, test=test)


def mean_of(value: float | Outcomes) -> float:
    """Return the value of a run with a seed, which may be the mean of outcomes."""
    return statistics.fmean(value.values()) if isinstance(value, Mapping) else float(value)


def widest_test(
    ours: Sequence[float | Outcomes], theirs: Sequence[float | Outcomes], test: Test, test_fraction: float | None
) -> TestResult | None:
    """Return the test with the widest interval of those that are possible; the arguments are as of `compare_runs`."""
    rows: list[Any] = [*ours, *theirs]
    a, b = ([mean_of(value) for value in group] for group in (ours, theirs))
    results = [difference_test(a, b, test)]
    if isinstance(rows[0], Mapping) and min(len(a), len(b)) > 1:
        results.append(difference_test(a, b, test, images=image_variance(ours, theirs, test)))  # type: ignore[arg-type]
    elif isinstance(rows[0], Mapping) and all(row.keys() == rows[0].keys() for row in rows):
        c, d = (pd.DataFrame(group)[[*rows[0]]].mean().tolist() for group in (ours, theirs))
        result: Any = difference_test(c, d, "paired")
        results.append(result and result._replace(variation="test images"))
    if test_fraction is not None:
        results.append(difference_test(a, b, test, overlap=test_fraction / (1 - test_fraction)))
    return max(filter(None, results), key=lambda result: result.interval[1] - result.interval[0], default=None)


def difference_test(
    ours: Sequence[float],
    theirs: Sequence[float],
    test: Test,
    *,
    images: tuple[float, int] | None = None,
    overlap: float = 0,
) -> TestResult | None:
    """Test whether two means differ; None with fewer than two values of a group, or without any variation.

    The values are about normally distributed, and for `paired` those of both groups in the same order. `images` are
    those of `image_variance`. A mean of S values has a variance of 1 / S + `overlap` times theirs.
    """
    groups = [[a - b for a, b in zip(ours, theirs, strict=True)]] if test == "paired" else [ours, theirs]
    if min(map(len, groups)) < 2:
        return None
    variances = [statistics.variance(group) for group in groups]
    parts = [(v / len(group) + overlap * v, len(group) - 1) for v, group in zip(variances, groups, strict=True)]
    parts += [images] if images else []
    variance = sum(v for v, _ in parts)
    error = math.sqrt(variance)
    if error <= 1e-12 * max(map(abs, [*ours, *theirs])):  # equal values, but for rounding errors
        return None
    # Degrees of freedom by Welch and Satterthwaite, over the variances of both groups and that of the images.
    freedom = variance**2 / sum(v**2 / count for v, count in parts)
    variation: Variation = "resampled splits" if overlap else "seeds and test images" if images else "seeds"
    return TestResult(statistics.fmean(ours) - statistics.fmean(theirs), error, freedom, variation)


def image_variance(ours: Sequence[Outcomes], theirs: Sequence[Outcomes], test: Test) -> tuple[float, int]:
    """Return the variance of a difference by the choice of test images that several seeds share, and its freedom."""
    # Two-way random effects: outcome z_si = mean + seed_s + image_i + noise_si of n_s images, a set T_s, with mean v_s.
    # The variance of the mean of S seeds exceeds the expectation of s^2 / S, which a test of the v_s estimates, by the
    # mean covariance of v_s and v_t over s != t: Var(image) |T_s & T_t| / (n_s n_t). Var(image) is estimated by the
    # products (z_si - v_s)(z_ti - v_t) of an image in different seeds, whose noise is independent. With one test set of
    # n images this is 1 / n times the variance over images of the mean over seeds, minus the mean square of the
    # interaction / S. Between independent groups (Welch), the covariances of both are subtracted.
    if test == "paired":
        ours, theirs = [{image: a[image] - b[image] for image in a} for a, b in zip(ours, theirs, strict=True)], []
    table = np.array(pd.DataFrame([*ours, *theirs], dtype=np.float64), order="C")
    tested = np.isfinite(table)
    sizes = tested.sum(1, keepdims=True)
    residuals = np.where(tested, table - np.nanmean(table, 1, keepdims=True), 0.0) / sizes
    common = tested.astype(np.float64) @ tested.T
    # The means v_s are estimated from the same images, so that a product has this fraction of Var(image).
    kept = 1 - 1 / sizes - 1 / sizes.T + common / (sizes * sizes.T)
    covariances = residuals @ residuals.T / np.where(common > 0, kept, 1.0)
    counts = np.repeat([len(ours), len(theirs)], [len(ours), len(theirs)])
    signs = np.repeat([1, -1], [len(ours), len(theirs)])
    weights = np.where(np.equal.outer(signs, signs), 1 / (counts - 1), -1 / counts) / counts[:, None]
    np.fill_diagonal(weights, 0.0)
    freedom = int((tested.sum(0) > 1).sum()) - 1  # of a variance over the images that several rows have
    return max(0.0, float((weights * covariances).sum())), max(1, freedom)


def holm(p_values: Sequence[float | None], count: int | None = None) -> list[float | None]:
    """Correct p-values of tests, which may be dependent, by Holm's method, which controls the family-wise error rate.

    Args:
        p_values: The p-values; None for tests that were not run.
        count: Number of tests of the family, if some are not run yet: they count as if they had the largest p-values.
            By default, only the tests that were run count.

    Raises:
        ValueError: If a p-value is not from 0 to 1, such as NaN, or more tests were run than the family has.

    Reference:
        Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6, 1979.

    Example:
        >>> holm([0.01, 0.04, 0.03, None])
        [0.03, 0.06, 0.06, None]
    """
    corrected: list[float | None] = [None] * len(p_values)
    ordered = sorted((value, index) for index, value in enumerate(p_values) if value is not None)
    count = len(ordered) if count is None else count
    if count < len(ordered) or not all(0 <= value <= 1 + 1e-9 for value, _ in ordered):  # some are rounded up
        raise ValueError(f"holm needs p-values from 0 to 1, at most {count} of them; got {[*p_values]}.")
    largest = 0.0
    for rank, (value, index) in enumerate(ordered):
        largest = max(largest, min(1.0, (count - rank) * value))
        corrected[index] = largest
    return corrected


def power(difference: float, deviation: float, seeds: int, *, tests: int = 1, test: Test = "welch") -> float:
    """Return the probability that a test finds a difference of means between normally distributed values.

    Args:
        difference: The difference.
        deviation: Standard deviation between seeds, of each group, or for `paired` of the differences. With a
            `test_fraction` f of `compare_runs` and S seeds, multiply it by sqrt(1 + S f / (1 - f)).
        seeds: Number of seeds of each group, at least 2.
        tests: Number of tests of the family; each is then made at a level of 0.05 / `tests`, the strictest of Holm's.
        test: The test.

    Raises:
        ValueError: If a number is out of range, or the test is unknown.

    Example:
        >>> round(power(0.5, 0.3, 5), 2)
        0.61
    """
    if not (deviation > 0 and seeds >= 2 and tests >= 1):
        needed = "a positive deviation, at least 2 seeds and at least 1 test"
        raise ValueError(f"power needs {needed}; got {deviation}, {seeds} and {tests}.")
    check_choice("test", test, get_args(Test))
    pairs, others = test == "paired", float(seeds) - 1
    freedom = (1 if pairs else 2) * others
    # Welch's degrees of freedom depend on the fraction of the variance in one group: the mean over its quantiles.
    fractions = 0.0 if pairs else stats.beta.ppf((np.arange(200) + 0.5) / 200, others / 2, others / 2)
    critical = stats.t.isf(LEVEL / tests / 2, others / (fractions**2 + (1 - fractions) ** 2))
    effect = abs(difference) / deviation * math.sqrt(seeds if pairs else seeds / 2)
    if effect > 1e4:  # scipy is inaccurate there, and NaN from 1e10; only the variation of the deviation matters
        return float(np.mean(stats.chi2.cdf(freedom * (min(effect, 1e100) / critical) ** 2, freedom)))
    opposite = np.nan_to_num(stats.nct.cdf(-critical, freedom, effect))  # scipy returns NaN where it is below 1e-80
    return float(np.mean(stats.nct.sf(critical, freedom, effect) + opposite))


def seeds_for_power(
    difference: float, deviation: float, *, target: float = 0.8, tests: int = 1, test: Test = "welch"
) -> int:
    """Return the smallest number of seeds of each group with which a difference is found with a probability.

    For arguments, see `power`; `target` is the probability.

    Raises:
        ValueError: If a number is out of range, or more than 10,000 seeds would be needed.

    Example:
        >>> seeds_for_power(0.5, 0.3)
        7
    """
    found = partial(power, difference, deviation, tests=tests, test=test)
    seeds = 2 + bisect.bisect_left(range(2, 10_001), target, key=found)
    if seeds > 10_000:
        raise ValueError(f"a difference of {difference} would need more than 10,000 seeds.")
    return seeds


def pseudo_values(measure: Callable[[Tensor], float], ids: Sequence[int] | Sequence[str]) -> dict[Any, float]:
    """Return outcomes per image of a measure that is no mean over images, such as AUROC, for `compare_runs`.

    They are the jackknife's pseudo-values n theta - (n - 1) theta_(-i), where theta_(-i) is the measure without image
    i, shifted so that their mean is theta, the measure of all images. For a mean they are the values of the images. The
    measure is computed n + 1 times, and must be smooth: the jackknife fails for a median.

    Args:
        measure: Computes the measure from the indices of the rows it uses.
        ids: An id per image, in the order of the rows. Images with the same id are a block: they are left out together
            and have one outcome, which takes less time for many images. Blocks should have nearly equal sizes.

    Raises:
        ValueError: If there are fewer than two ids, or the measure is not finite.

    Reference:
        Tukey, "Bias and confidence in not quite large samples", Annals of Mathematical Statistics 29, 1958.

    Example:
        >>> correct = torch.tensor([1.0, 0.0], dtype=torch.float64)
        >>> pseudo_values(lambda rows: correct[rows].mean().item(), ["a", "b"])
        {'a': 1.0, 'b': 0.0}
    """
    check_not_text("ids", ids)
    blocks: dict[Any, list[int]] = {}
    for row, image in enumerate(ids):
        blocks.setdefault(image, []).append(row)
    if len(blocks) < 2:
        raise ValueError(f"ids must be at least 2 different ones; got {len(blocks)}.")
    rows = torch.arange(len(ids))
    theta = float(measure(rows))
    without = [float(measure(rows[torch.isin(rows, torch.tensor(block), invert=True)])) for block in blocks.values()]
    if not all(map(math.isfinite, [theta, *without])):
        raise ValueError(f"the measure must be finite; got {theta}, and {without} without each block of images.")
    mean = math.fsum(without) / len(blocks)
    return {image: theta + (len(blocks) - 1) * (mean - value) for image, value in zip(blocks, without, strict=True)}
