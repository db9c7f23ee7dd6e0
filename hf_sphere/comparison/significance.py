"""Tests of a difference between two groups of values, their correction for several tests, and their power."""

import bisect
import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple, get_args

import numpy as np
from scipy import stats

from hf_sphere.utils.checks import check_choice

LEVEL = 0.05
"""Significance level of all tests; intervals have the complementary coverage."""

MOST_SEEDS = 10_000
"""Largest number of seeds of `seeds_for_power`."""

Test = Literal["welch", "paired"]
"""Welch's test of two independent groups, or the test of the differences of pairs."""


class TestResult(NamedTuple):
    """Two-sided test of a difference of means."""

    difference: float
    error: float  # standard error of the difference
    freedom: float  # degrees of freedom of Student's distribution

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


def difference_test(
    ours: Sequence[float], theirs: Sequence[float], test: Test, images: tuple[float, int] = (0, 1), overlap: float = 0
) -> TestResult | None:
    """Test whether two means differ; None with fewer than two values of a group, or without any variation.

    The values are about normally distributed, and for `paired` those of both groups in the same order. `images` are the
    variance and degrees of freedom of `crossed.image_variance`. A mean of S values has a variance of 1 / S + `overlap`
    times theirs.
    """
    groups = [[a - b for a, b in zip(ours, theirs, strict=True)]] if test == "paired" else [ours, theirs]
    if min(map(len, groups)) < 2:
        return None
    variances = [statistics.variance(group) for group in groups]
    parts = [(v / len(group) + overlap * v, len(group) - 1) for v, group in zip(variances, groups, strict=True)]
    variance = sum(v for v, _ in (*parts, images))
    error = math.sqrt(variance)
    if error <= 1e-12 * max(map(abs, [*ours, *theirs])):  # equal values, but for rounding errors
        return None
    # Degrees of freedom by Welch and Satterthwaite, over the variances of both groups and that of the images.
    freedom = variance**2 / sum(v**2 / count for v, count in (*parts, images))
    return TestResult(statistics.fmean(ours) - statistics.fmean(theirs), error, freedom)


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
    if not (math.isfinite(difference) and 0 < deviation < math.inf and 2 <= seeds < 1e300 and 1 <= tests <= 1e15):
        needed = "a finite difference, a positive deviation, at least 2 seeds and at least 1 test, at most 1e15"
        raise ValueError(f"power needs {needed}; got {difference}, {deviation}, {seeds} and {tests}.")
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
    if not 0 < target < 1:
        raise ValueError(f"target must be between 0 and 1, exclusive; got {target}.")
    found = partial(power, difference, deviation, tests=tests, test=test)
    seeds = 2 + bisect.bisect_left(range(2, MOST_SEEDS + 1), target, key=found)
    if seeds > MOST_SEEDS:
        raise ValueError(f"a difference of {difference} would need more than {MOST_SEEDS:,} seeds.")
    return seeds
