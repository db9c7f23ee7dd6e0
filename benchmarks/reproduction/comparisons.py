"""Comparisons of two groups of runs by the tests of `hf_sphere.comparison`, corrected per table, and their rules."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from hf_sphere.comparison import holm
from hf_sphere.comparison.runs import SHARES, decide, observed_power, show_p_value
from hf_sphere.comparison.significance import LEVEL, Test, TestResult, difference_test
from reproduction.definitions import error_rate, is_higher_better, is_share, scale

RULES = """The first metric of a table is compared, each row with the run that it names. The tests of a table are a
family: their p-values are corrected by Holm's method for the number of tests of the table. Tests of runs that are not
finished count as well, as if they had the largest p-values, so that finishing the queue cannot undo a verdict; until
then the verdict is "incomplete". A difference has one verdict, that of its table. The claims of the papers quote it;
the claims of a paper that no table compares are a family of their own.

The test is planned before the runs. Runs planned before 26 November 2026 have the paired t-test: differences are
computed for each seed that both have. Later ones have Welch's test of independent groups: runs with the same seed are
hardly correlated here (0.1 on average over all comparisons), so that pairing only costs power, with three seeds and
seven tests up to half of it. Two comparisons planned before that day have Welch's test all the same: few-shot accuracy
with selected settings, and eight classes with more settings; both tests agree on their verdicts. A comparison with a
number has the one-sample test. The table names the planned test before its p-value and has that of the other one in
parentheses, corrected in the same way. The verdict and the 95 % interval are those of the planned test.

- "better" and "worse": the corrected p-value is below 0.05, and the difference is at least 5 % of the reference's error
  rate, or 0.3 points where that is less: the minimum effect.
- "equivalent": by two one-sided t-tests at the 5 % level, the difference is smaller than 10 % of the reference's error
  rate, or than 0.5 points where that is less. These tests are not corrected. The margin is wider than
  the minimum effect, so that equivalent runs may differ by an effect that is called better elsewhere.
- "higher" and "lower": the corrected p-value is below 0.05, for metrics that have no error rate.
- "no significant difference": everything else. It does not mean that there is none. The power is the probability that
  the test finds a difference of the minimum effect at its level, 0.05 divided by the number of tests of the table, if
  the deviation between seeds is the observed one.

Runs with only one seed, or with equal differences for all seeds, are not tested. The error rate is 100 minus an
accuracy, Recall@1, MAP@R, AUROC or AUPR in percent; a calibration error or false positive rate is an error rate
itself. Intervals and tests describe the variation between seeds, with the same training and test images. Runs that
diverged have no value, and are named below their table.

Runs without validation images are evaluated on the test images after every epoch, and runs that select a learning rate
at their end. No epoch of a run and no learning rate was chosen by these numbers. For runs without validation images
that were planned since 26 November 2026, the planned metric is the mean test accuracy of the last quarter of the
epochs, rounded up (`eval_accuracy_last_quarter`), which varies less than the last one. For earlier runs it is only a
second analysis, labelled "post hoc". Settings of the fast network, such as its number of epochs, were compared on test
images in single runs, so its accuracies may be optimistic. It is a small convolutional network for CIFAR-10
(`docs/results/heads.md`).

What makes a comparison fair is checked by `python benchmarks/report.py --check`, see `docs/compare.md`. Exceptions to
these rules, with their reasons, are named below the tables.

Published numbers are those of the authors' repositories, not of the papers; "none" says that these state none for the
comparison. The file `results/comparisons.json` has the value of each seed and the p-values of both tests."""


@dataclass
class Comparison:
    """A metric of two groups of runs.

    Attributes:
        table: Table of the comparison. The tests of a table are corrected together.
        run: Group of runs.
        reference: Group that it is compared with, or a number.
        metric: The metric.
        values: Values of the run by seed, as shown: in percent, if the metric is a share.
        reference_values: Those of the reference.
        test: The planned test. The paired one uses the seeds that both have.
        is_complete: Whether all planned seeds are finished; otherwise there is no test.
        tests: Number of tests of the table.
        corrected: P-values after Holm's correction, by test, see `correct`.
    """

    table: str
    run: str
    reference: str
    metric: str
    values: Mapping[int, float]
    reference_values: Mapping[int, float]
    test: Test = "welch"
    is_complete: bool = True
    tests: int = 1
    corrected: dict[Test, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seeds = sorted(set(self.values) & set(self.reference_values))
        self._planned = self._groups(self.test)
        ours, theirs = self._planned
        self.mean = statistics.fmean(ours) - statistics.fmean(theirs) if ours else None
        self.results = {test: self._result(test) for test in get_args(Test)}

    @property
    def error_rate(self) -> float | None:
        """Mean error rate of the reference in percent; None if the metric has none."""
        return error_rate(self.metric, statistics.fmean(self._planned[1])) if self.mean is not None else None

    @property
    def equivalence_p_value(self) -> float | None:
        """The larger p-value of the two one-sided tests; None without a test."""
        result = self.results[self.test]
        if self.error_rate is None or not self.is_complete or result is None:
            return None
        return result.p_equivalence(relevant("margin", self.error_rate))

    @property
    def power(self) -> float | None:
        """Power for the minimum effect; None without a test."""
        if not self.error_rate:
            return None
        minimum, seeds = relevant("minimum", self.error_rate), min(map(len, self._planned))
        return observed_power(self.results[self.test], minimum, seeds, tests=self.tests, test=self.test)

    @property
    def verdict(self) -> str:
        """What the values say about the run, by the `RULES`; empty without values."""
        if self.mean is None:
            return ""
        if not self.is_complete:
            return "incomplete"
        corrected = self.corrected.get(self.test)
        if corrected is None:
            return "not tested"
        if self.error_rate is None:
            is_significant = corrected < LEVEL
            return ("higher" if self.mean > 0 else "lower") if is_significant else "no significant difference"
        improvement = self.mean if is_higher_better(self.metric) else -self.mean
        return decide(improvement, relevant("minimum", self.error_rate), corrected, self.equivalence_p_value)

    def p_value(self, test: Test) -> float | None:
        """Return the p-value of a test; None if there is none, or not yet."""
        result = self.results[test] if self.is_complete else None
        return result and result.p_value

    def show(self) -> str:
        """Format the mean difference with its interval."""
        if self.mean is None:
            return "no common seed"
        result = self.results[self.test]
        low, high = result.interval if result else (None, None)
        found = f"{self.mean:+.2f}" if low is None else f"{self.mean:+.2f} ({low:+.2f} to {high:+.2f})"
        is_partial = self.test == "paired" and len(self.seeds) < len(self.values)
        return f"{found}, seeds {', '.join(map(str, self.seeds))}" if is_partial else found

    def show_p_values(self) -> str:
        """Format the corrected p-values: that of the planned test, and in parentheses that of the other one."""
        planned, other = self.corrected.get(self.test), self.corrected.get(_other(self.test))
        if planned is None:
            return ""
        name = _name(self.test) if as_number(self.reference) is None else "one-sample"
        first = f"{name} {show_p_value(planned)}"
        if other is None or math.isclose(planned, other):
            return first
        return f"{first} ({_name(_other(self.test))} {show_p_value(other)})"

    def show_verdict(self) -> str:
        """Return the verdict, with the power where there is no significant difference."""
        power = self.power if self.verdict == "no significant difference" else None
        return self.verdict if power is None else f"{self.verdict} (power {power:.2f})"

    def record(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        result, rate = self.results[self.test], self.error_rate
        return {
            "table": self.table,
            "run": self.run,
            "reference": self.reference,
            "metric": self.metric,
            "unit": "%" if is_share(self.metric) else None,
            "values": {str(seed): _round(value) for seed, value in sorted(self.values.items())},
            "reference_values": {str(seed): _round(value) for seed, value in sorted(self.reference_values.items())},
            "seeds": self.seeds,
            "test": self.test,
            "mean_difference": _round(self.mean),
            "interval_95": None if result is None else [_round(bound) for bound in result.interval],
            "p_value": _round(self.p_value(self.test)),
            "p_value_holm": _round(self.corrected.get(self.test)),
            "p_value_equivalence": _round(self.equivalence_p_value),
            "other_test": _other(self.test),
            "other_p_value": _round(self.p_value(_other(self.test))),
            "other_p_value_holm": _round(self.corrected.get(_other(self.test))),
            "tests": self.tests,
            "reference_error_rate": _round(rate),
            "smallest_relevant_difference": None if rate is None else _round(relevant("minimum", rate)),
            "equivalence_bound": None if rate is None else _round(relevant("margin", rate)),
            "power": _round(self.power),
            "verdict": self.verdict,
        }

    def _groups(self, test: Test) -> tuple[list[float], list[float]]:
        """Return the values that a test compares, empty if there are none of one group."""
        ours, theirs = self.values, self.reference_values
        if test == "paired" or not ours or not theirs:
            return [ours[seed] for seed in self.seeds], [theirs[seed] for seed in self.seeds]
        return [*ours.values()], [*theirs.values()]

    def _result(self, test: Test) -> TestResult | None:
        return difference_test(*self._groups(test), test)


def compare(
    table: str,
    metric: str,
    run: str,
    values: Mapping[int, float],
    other: Any,
    others: Any,
    **more: Any,
) -> Comparison:
    """Compare the values of results files.

    Args:
        table: The table.
        metric: The metric.
        run: Group of the run.
        values: Its values by seed.
        other: Group of the reference, or what else names it.
        others: Its values by seed, or a number.
        more: See `Comparison`.
    """
    factor = scale(metric)
    theirs = others if isinstance(others, Mapping) else dict.fromkeys(values, others)
    ours, theirs = [{seed: factor * value for seed, value in found.items()} for found in (values, theirs)]
    return Comparison(table, run, str(other), metric, ours, theirs, **more)


def correct(comparisons: Sequence[Comparison], tests: int | None = None) -> None:
    """Set the corrected p-values of the comparisons of a table, which will have this number of tests."""
    for is_planned in (True, False):
        chosen: list[Test] = [row.test if is_planned else _other(row.test) for row in comparisons]
        p_values = [row.p_value(test) for row, test in zip(comparisons, chosen, strict=True)]
        run = sum(value is not None for value in p_values)
        family = max(run, run if tests is None else tests)
        for row, test, corrected in zip(comparisons, chosen, holm(p_values, family), strict=True):
            row.corrected[test] = corrected
            row.tests = max(1, run if tests is None else tests)


def relevant(name: str, error_rate: float) -> float:
    """Return the minimum effect or the margin of equivalence in points, for an error rate in percent."""
    share, most = SHARES[name]
    return min(share * error_rate, 100 * most)


def as_number(text: str) -> float | None:
    """Return the number that a text is, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def _other(test: Test) -> Test:
    return "welch" if test == "paired" else "paired"


def _name(test: Test) -> str:
    return "paired" if test == "paired" else "Welch"


def _round(value: float | None) -> float | None:
    """Round to six digits, so that the file does not depend on the processor."""
    return None if value is None else float(f"{value:.6g}")
