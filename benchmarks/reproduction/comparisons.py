"""Paired comparisons of runs with the same seeds: intervals, Holm's correction and verdicts."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from reproduction.definitions import error_rate, is_higher_better, is_share, scale

LEVEL = 0.05
"""Significance level of all tests; intervals have the complementary coverage."""

BETTER = (0.05, 0.3)
"""Smallest difference that counts: a share of the reference's error rate, and a maximum in points."""

EQUIVALENT = (0.10, 0.5)
"""Largest difference that does not count: a share of the reference's error rate, and a maximum in points."""

RULES = """Two runs are compared on the seeds that both have. The difference is computed for each seed, and its mean is
given with a 95 % interval. In a table with several metrics, the first one is compared. The p-values are those of the
paired t-test, corrected by Holm's method for the number of tests of the table. A pair of runs is tested when all its
seeds of the queue are finished; until then its verdict is "incomplete". Such tests count as well, as if they had the
largest p-values, so that finishing the queue cannot undo a verdict. A comparison that is in two tables has two
corrected p-values, and may have two verdicts.

- "better" and "worse": the corrected p-value is below 0.05, and the difference is at least 5 % of the reference's error
  rate, or 0.3 points where that is less.
- "equivalent": by two one-sided t-tests at the 5 % level, the difference is smaller than 10 % of the reference's error
  rate, or than 0.5 points where that is less. These tests are not corrected.
- "higher" and "lower": the corrected p-value is below 0.05, for metrics that have no error rate.
- "not distinguished": everything else. It does not mean that there is no difference.

Runs with only one seed in common, or with equal differences for all seeds, are not tested. The error rate is 100 minus
an accuracy, Recall@1, MAP@R, AUROC or AUPR in percent; a calibration error or false positive rate is an error rate
itself. Intervals and tests describe the variation between seeds, with the same training and test images. Runs that
diverged have no value, and are named below their table.

Runs without validation images are evaluated on the test images after every epoch, and runs that select a learning rate
at their end. No epoch of a run and no learning rate was chosen by these numbers. Settings of the fast network, such as
its number of epochs, were compared on test images in single runs, so its accuracies may be optimistic. It is a small
convolutional network for CIFAR-10 (`recipes/configs/cifar10_fast/README.md`).

Published numbers are those of the authors' repositories, not of the papers; "none" says that these state none for the
comparison. The file `results/comparisons.json` has the value of each seed."""


@dataclass
class Comparison:
    """A metric of two groups of runs, on the seeds that both have.

    Attributes:
        table: Table of the comparison. The tests of a table are corrected together.
        run: Group of runs.
        reference: Group that it is compared with, or a number.
        metric: The metric.
        values: Values of the run by seed, as shown: in percent, if the metric is a share.
        reference_values: Those of the reference.
        is_complete: Whether all planned seeds are finished; otherwise there is no test.
        corrected: P-value after Holm's correction, see `correct`; None without a test.
    """

    table: str
    run: str
    reference: str
    metric: str
    values: Mapping[int, float]
    reference_values: Mapping[int, float]
    is_complete: bool = True
    corrected: float | None = None

    def __post_init__(self) -> None:
        self.seeds = sorted(set(self.values) & set(self.reference_values))
        pairs = [(self.values[seed], self.reference_values[seed]) for seed in self.seeds]
        # Rounded, since differences of equal size must not differ by rounding errors, which the tests would measure.
        self.differences = [round(ours - theirs, 9) for ours, theirs in pairs]
        self.mean = statistics.mean(self.differences) if pairs else None
        self.interval: tuple[float, float] | None = None
        self.p_value: float | None = None
        if len(set(self.differences)) > 1:
            test = stats.ttest_1samp(self.differences, 0.0)
            low, high = test.confidence_interval(1 - LEVEL)
            self.interval = float(low), float(high)
            self.p_value = float(test.pvalue) if self.is_complete else None

    @property
    def error_rate(self) -> float | None:
        """Mean error rate of the reference in percent, on the common seeds; None if the metric has none."""
        if not self.seeds:
            return None
        return error_rate(self.metric, statistics.mean(self.reference_values[seed] for seed in self.seeds))

    @property
    def equivalence_p_value(self) -> float | None:
        """The larger p-value of the two one-sided tests; None without a test."""
        if self.p_value is None or self.error_rate is None:
            return None
        bound = margin(self.error_rate, EQUIVALENT)
        above = stats.ttest_1samp(self.differences, -bound, alternative="greater").pvalue
        below = stats.ttest_1samp(self.differences, bound, alternative="less").pvalue
        return float(max(above, below))

    @property
    def verdict(self) -> str:
        """What the values say about the run, by the `RULES`; empty without common seeds."""
        if self.mean is None:
            return ""
        if not self.is_complete:
            return "incomplete"
        significant = self.corrected is not None and self.corrected < LEVEL
        if self.error_rate is None:
            return ("higher" if self.mean > 0 else "lower") if significant else "not distinguished"
        if significant and abs(self.mean) >= margin(self.error_rate, BETTER) - 1e-9:
            return "better" if (self.mean > 0) == is_higher_better(self.metric) else "worse"
        equivalence = self.equivalence_p_value
        return "equivalent" if equivalence is not None and equivalence < LEVEL else "not distinguished"

    def show(self) -> str:
        """Format the mean difference with its interval."""
        if self.mean is None:
            return "no common seed"
        found = show_interval(self.mean, self.interval)
        return found if len(self.seeds) == len(self.values) else f"{found}, seeds {', '.join(map(str, self.seeds))}"

    def record(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        bounds = None if self.error_rate is None else [margin(self.error_rate, rule) for rule in (BETTER, EQUIVALENT)]
        return {
            "table": self.table,
            "run": self.run,
            "reference": self.reference,
            "metric": self.metric,
            "unit": "%" if is_share(self.metric) else None,
            "values": {str(seed): _round(value) for seed, value in sorted(self.values.items())},
            "reference_values": {str(seed): _round(value) for seed, value in sorted(self.reference_values.items())},
            "seeds": self.seeds,
            "mean_difference": _round(self.mean),
            "interval_95": None if self.interval is None else [_round(bound) for bound in self.interval],
            "p_value": _round(self.p_value),
            "p_value_holm": _round(self.corrected),
            "p_value_equivalence": _round(self.equivalence_p_value),
            "reference_error_rate": _round(self.error_rate),
            "smallest_relevant_difference": None if bounds is None else _round(bounds[0]),
            "equivalence_bound": None if bounds is None else _round(bounds[1]),
            "verdict": self.verdict,
        }


def compare(
    table: str,
    metric: str,
    run: str,
    values: Mapping[int, float],
    other: Any,
    others: Any,
    *,
    is_complete: bool = True,
) -> Comparison:
    """Compare the values of results files.

    Args:
        table: The table.
        metric: The metric.
        run: Group of the run.
        values: Its values by seed.
        other: Group of the reference, or what else names it.
        others: Its values by seed, or a number.
        is_complete: See `Comparison`.
    """
    factor = scale(metric)
    theirs = others if isinstance(others, Mapping) else dict.fromkeys(values, others)
    ours, theirs = [{seed: factor * value for seed, value in found.items()} for found in (values, theirs)]
    return Comparison(table, run, str(other), metric, ours, theirs, is_complete)


def correct(comparisons: Sequence[Comparison], tests: int | None = None) -> None:
    """Set the corrected p-values of the comparisons of a table, which will have this number of tests."""
    tested = [comparison for comparison in comparisons if comparison.p_value is not None]
    p_values = [comparison.p_value for comparison in tested if comparison.p_value is not None]
    for comparison, corrected in zip(tested, holm(p_values, tests), strict=True):
        comparison.corrected = corrected


def holm(p_values: Sequence[float], count: int | None = None) -> list[float]:
    """Return p-values corrected by Holm's step-down method (Scandinavian Journal of Statistics 6, 1979).

    Args:
        p_values: The p-values.
        count: Number of tests, if those of some are not known; they count as the largest ones.
    """
    count = len(p_values) if count is None else count
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (count - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def margin(error_rate: float, rule: tuple[float, float]) -> float:
    """Return a difference in points: a share of an error rate in percent, at most so many points."""
    share, points = rule
    return min(share * error_rate, points)


def show_interval(mean: float, interval: tuple[float, float] | None) -> str:
    """Format a mean difference with its interval, if there is one."""
    return f"{mean:+.2f}" if interval is None else f"{mean:+.2f} ({interval[0]:+.2f} to {interval[1]:+.2f})"


def show_p_value(p_value: float | None) -> str:
    """Format a p-value; empty without one."""
    return "" if p_value is None else "< 0.001" if p_value < 0.001 else f"{p_value:.2g}"


def _round(value: float | None) -> float | None:
    """Round to six digits, so that the file does not depend on the processor."""
    return None if value is None else float(f"{value:.6g}")
