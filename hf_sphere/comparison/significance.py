"""Tests of a difference between two groups of values, their correction for several tests, and their power."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from scipy import stats

LEVEL = 0.05
"""Significance level of all tests; intervals have the complementary coverage."""

Test = Literal["welch", "paired"]
"""Welch's test of two independent groups, or the test of the differences of pairs."""


class TestResult(NamedTuple):
    """Two-sided test of a difference of means.

    Attributes:
        interval: Interval of the difference with a coverage of 95 %.
        p_value: P-value, not corrected.
    """

    interval: tuple[float, float]
    p_value: float


def difference_test(ours: Sequence[float], theirs: Sequence[float], test: Test) -> TestResult | None:
    """Test whether two means differ; None with fewer than two values of a group, or without any variation.

    Args:
        ours: Values of one group.
        theirs: Values of the other one; for `paired` in the order of the first.
        test: The test, for values that are about normally distributed.
    """
    if not _can_be_tested(ours, theirs, test):
        return None
    found = _t_test(ours, theirs, test)
    low, high = found.confidence_interval(1 - LEVEL)
    return TestResult((float(low), float(high)), float(found.pvalue))


def equivalence_test(ours: Sequence[float], theirs: Sequence[float], margin: float, test: Test) -> float | None:
    """Return the larger p-value of two one-sided tests that a difference of means is within a margin.

    Reference:
        Schuirmann, "A comparison of the two one-sided tests procedure and the power approach for assessing the
        equivalence of average bioavailability", 1987.
    """
    if not _can_be_tested(ours, theirs, test):
        return None
    above = _t_test([value + margin for value in ours], theirs, test, "greater").pvalue
    below = _t_test([value - margin for value in ours], theirs, test, "less").pvalue
    return float(max(above, below))


def _can_be_tested(ours: Sequence[float], theirs: Sequence[float], test: Test) -> bool:
    if min(len(ours), len(theirs)) < 2:
        return False
    if test == "paired":
        # Rounded, since differences of equal size must not differ by rounding errors, which the test would measure.
        return len({round(a - b, 9) for a, b in zip(ours, theirs, strict=True)}) > 1
    return len({*ours}) > 1 or len({*theirs}) > 1


def _t_test(ours: Sequence[float], theirs: Sequence[float], test: Test, alternative: str = "two-sided") -> Any:
    if test == "paired":
        differences = [round(a - b, 9) for a, b in zip(ours, theirs, strict=True)]
        return stats.ttest_1samp(differences, 0.0, alternative=alternative)
    return stats.ttest_ind(ours, theirs, equal_var=False, alternative=alternative)


def holm(p_values: Sequence[float | None], count: int | None = None) -> list[float | None]:
    """Correct p-values for several tests by Holm's step-down method, which controls the family-wise error rate.

    The tests may be dependent.

    Args:
        p_values: The p-values; None for tests that were not run.
        count: Number of tests of the family, if some are not run yet: they count as if they had the largest p-values.
            By default, only the tests that were run count.

    Reference:
        Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6, 1979.

    Example:
        >>> holm([0.01, 0.04, 0.03, None])
        [0.03, 0.06, 0.06, None]
    """
    corrected: list[float | None] = [None] * len(p_values)
    known = sorted((value, index) for index, value in enumerate(p_values) if value is not None)
    count = len(known) if count is None else count
    largest = 0.0
    for rank, (value, index) in enumerate(known):
        largest = max(largest, min(1.0, (count - rank) * value))
        corrected[index] = largest
    return corrected


def power(difference: float, deviation: float, seeds: int, *, tests: int = 1, test: Test = "welch") -> float:
    """Return the probability that a test finds a difference of means.

    Args:
        difference: The difference.
        deviation: Standard deviation between seeds, of each group, or for `paired` of the differences.
        seeds: Number of seeds of each group, at least 2.
        tests: Number of tests of the family; each is then made at a level of 0.05 / `tests`, the strictest of Holm's.
        test: The test.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> round(power(0.5, 0.3, 5), 2)
        0.64
    """
    if not (math.isfinite(difference) and 0 < deviation < math.inf and seeds >= 2 and tests >= 1):
        raise ValueError(
            "power needs a finite difference, a positive deviation, at least 2 seeds and at least 1 test; got "
            f"{difference}, {deviation}, {seeds} and {tests}."
        )
    freedom = seeds - 1 if test == "paired" else 2 * (seeds - 1)
    effect = abs(difference) / deviation * math.sqrt(seeds if test == "paired" else seeds / 2)
    critical = stats.t.isf(LEVEL / tests / 2, freedom)
    return float(stats.nct.sf(critical, freedom, effect) + stats.nct.cdf(-critical, freedom, effect))


def seeds_for_power(
    difference: float, deviation: float, *, target: float = 0.8, tests: int = 1, test: Test = "welch"
) -> int:
    """Return the smallest number of seeds of each group with which a difference is found with a probability.

    The arguments are those of `power`; `target` is the probability.

    Raises:
        ValueError: If a number is out of range, or more than 10,000 seeds would be needed.

    Example:
        >>> seeds_for_power(0.5, 0.3)
        7
    """
    if not 0 < target < 1:
        raise ValueError(f"target must be between 0 and 1, exclusive; got {target}.")
    low, high = 1, 2
    while power(difference, deviation, high, tests=tests, test=test) < target:
        low, high = high, 2 * high
        if high > 10_000:
            raise ValueError(f"a difference of {difference} would need more than 10,000 seeds.")
    while high - low > 1:
        middle = (low + high) // 2
        enough = power(difference, deviation, middle, tests=tests, test=test) >= target
        low, high = (low, middle) if enough else (middle, high)
    return high
