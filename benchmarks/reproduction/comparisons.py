"""Comparisons of two groups of runs by the tests of `hf_sphere.comparison`, corrected per table, and their rules."""

import bisect
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from hf_sphere.comparison import holm, power
from hf_sphere.comparison.runs import SHARES, decide, show_p_value
from hf_sphere.comparison.significance import LEVEL, Test, TestResult, difference_test
from reproduction.definitions import error_rate, is_higher_better, is_share, scale

RULES = """The first metric of a table is compared, each row with the run that it names. The tests of a table are a
family: their p-values are corrected by Holm's method for the number of tests of the table. Tests of runs that are not
finished count as well, as if they had the largest p-values, so that finishing the queue cannot undo a verdict; until
then the verdict is "incomplete". A difference has one verdict, that of its table. The claims of the papers quote it;
the claims of a paper that no table compares are a family of their own.

The test is planned before the runs. Runs planned before 26 November 2026 have the paired t-test: differences are
computed for each seed that both have. Later ones have Welch's test of independent groups: runs with the same seed are
hardly correlated here (0.1 on average over all comparisons), so that pairing only costs power. Two comparisons planned
before that day have Welch's test all the same: few-shot accuracy with selected settings, and eight classes with more
settings; both tests agree on the verdicts of accuracy. A comparison with a number has the one-sample test. The tables
of the appendix name the planned test before its p-value and have that of the other one in parentheses. The verdict and
the 95 % interval are those of the planned test.

## Verdicts

- "better" and "worse": the corrected p-value is below 0.05, and the difference is at least the **minimum effect**: 5 %
  of the reference's error rate, or 0.3 points where that is less.
- "equivalent": by two one-sided t-tests at the 5 % level, the difference is smaller than the **margin**, which the
  verdict names: 10 % of the reference's error rate, or 0.5 points where that is less. These tests are not corrected.
  The margin is wider than the minimum effect: equivalent runs may differ by what is called better elsewhere.
- "higher" and "lower": the corrected p-value is below 0.05, for metrics that have no error rate; of an
  error in units of its own, such as degrees, "worse" and "better".
- "not decided": everything else, whatever the sign of the difference. The verdict has the number of seeds of each run
  that would find the minimum effect with a probability of 80 %, at the level 0.05 divided by the number of tests, if
  the deviation between seeds is the observed one. From three pairs the 95 % interval of that deviation is from half to
  six times its value, so that the number of seeds is an order of magnitude at best.

Claims that accuracy is *retained*, or a loss *competitive*, are claims of equivalence. Only "equivalent" and "better"
confirm them. The margins were written on 23 November 2026, after the runs of the spherization on MNIST and before the
comparisons on CIFAR-10 and of the other papers. Runs with fresh seeds decide claims that earlier ones left open; their
minimum effects and margins are in `benchmarks/queue.yaml`, written before the runs. For metrics without an error rate,
minimum effects were written on 29 November 2026, after the runs: 0.05 for a mass or a relative loss, 0.5 for a rank
correlation.

The text of pages says "helps" for better, "hurts" for worse, "does not help" for equivalent, and "not decided".

## Costs

"Step time" is the time of a training step relative to that of the run without the method: with two digits from a
benchmark on a CPU, after ≈ from the times of whole runs on the same processor, per epoch. "Core-hours" are those of all
runs of the row, with evaluation, without the selection of settings; hours of a GPU stand apart. A run that
was timed only at its end counts as the mean of the others.

Runs with only one seed, or with equal differences for all seeds, are not tested. The error rate is 100 minus an
accuracy, Recall@1, MAP@R, AUROC or AUPR in percent; a calibration error or false positive rate is an error rate
itself. Intervals and tests describe the variation between seeds, with the same training and test images. Runs that
diverged have no value, and are named below their table.

## Marks

- † CIFAR-10 is a JPEG copy (quality 75, chroma subsampling 4:2:0), which may be harder than the original. Its cost in
  accuracy is not measured; both sides of a comparison have it.
- ‡ Some seeds were planned when the results of earlier ones were known. The verdict is the same at half the level, for
  two looks, unless the page says otherwise.

## Which accuracy

Runs without validation images are evaluated on the test images after every epoch, and runs that select a learning rate
at their end. No epoch of a run and no learning rate was chosen by these numbers. For runs without validation images
that were planned since 26 November 2026, the planned metric is the mean test accuracy of the last quarter of the
epochs, rounded up (`eval_accuracy_last_quarter`), which varies less than the last one. For earlier runs it is only a
second analysis, labelled "post hoc". Settings of the fast network, such as its number of epochs, were compared on test
images in single runs, so its accuracies may be optimistic.

What makes a comparison fair is checked by `python benchmarks/report.py --check`, see `docs/compare.md`. Exceptions to
these rules, with their reasons, are named below the tables of the appendix.

Published numbers are those of the authors' repositories, for prototypes of a re-implementation, not of the papers. The
file `results/comparisons.json` has the value of each seed and the p-values of both tests."""

NOT_DECIDED = "not decided"
MOST_SEEDS = 1000
"""Largest number of seeds that a verdict names."""


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
    def counts(self) -> list[int]:
        """Numbers of seeds that are compared, of the run and of a reference that is no number."""
        return [*map(len, self._planned)][: 1 + (as_number(self.reference) is None)]

    @property
    def error_rate(self) -> float | None:
        """Mean error rate of the reference in percent; None if the metric has none."""
        return error_rate(self.metric, statistics.fmean(self._planned[1])) if self.mean is not None else None

    @property
    def margin(self) -> float | None:
        """Margin of equivalence; None if the metric has no error rate."""
        return relevant("margin", self.error_rate) if self.error_rate else None

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
        result = self.results[self.test]
        return result and result.power(minimum, seeds, tests=self.tests, test=self.test)

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
            words = ("worse", "better") if "error" in self.metric else ("higher", "lower")
            return words[self.mean < 0] if is_significant else NOT_DECIDED
        improvement = self.mean if is_higher_better(self.metric) else -self.mean
        found = decide(improvement, relevant("minimum", self.error_rate), corrected, self.equivalence_p_value)
        return NOT_DECIDED if found == "no significant difference" else found

    def p_value(self, test: Test) -> float | None:
        """Return the p-value of a test; None if there is none, or not yet."""
        result = self.results[test] if self.is_complete else None
        return result and result.p_value

    def show(self) -> str:
        """Format the mean difference with its interval."""
        if self.mean is None:
            return "no common seed"
        result = self.results[self.test] if self.is_complete else None
        low, high = result.interval if result else (None, None)
        found = f"{self.mean:+.2f}" if low is None else f"{self.mean:+.2f} ({low:+.2f} to {high:+.2f})"
        is_partial = self.test == "paired" and len(self.seeds) < len(self.values)
        return f"{found}, seeds {', '.join(map(str, self.seeds))}" if is_partial else found

    def show_means(self) -> str:
        """Format the means of the run and of the reference."""
        return " / ".join(f"{statistics.fmean(side):.2f}" for side in self._planned if side)

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

    def show_verdict(self, minimum: float | None = None) -> str:
        """Return the verdict, with the margin of an equivalence, or the number of seeds that would decide.

        Args:
            minimum: The minimum effect, if the metric has no error rate.
        """
        if self.verdict == "equivalent":
            return f"equivalent (within {self.margin:.2f})"
        minimum = relevant("minimum", self.error_rate) if self.error_rate else minimum
        if self.verdict != NOT_DECIDED or minimum is None:
            return self.verdict
        seeds = self.seeds_to_decide(minimum)
        count = f"more than {MOST_SEEDS:,}" if seeds is None else f"{seeds}"
        return f"{self.verdict} ({count} seeds would decide {minimum:.2f})"

    def seeds_to_decide(self, minimum: float) -> int | None:
        """Return the seeds of each group that find an effect in 80 % of cases; None if they are above `MOST_SEEDS`."""
        result, seeds = self.results[self.test], min(map(len, self._planned))
        test: Test = self.test if as_number(self.reference) is None else "paired"
        if result is None:
            return None
        deviation = float(f"{result.error * math.sqrt(seeds / (1 if test == 'paired' else 2)):.6g}")
        return _count_seeds(minimum, deviation, self.tests, test)

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
            "seeds_to_decide": self.seeds_to_decide(relevant("minimum", rate)) if rate else None,
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


@functools.cache
def _count_seeds(minimum: float, deviation: float, tests: int, test: Test) -> int | None:
    """Return the smallest number of seeds with a power of 80 %; None if it is above `MOST_SEEDS`."""
    found = functools.partial(power, minimum, deviation, tests=tests, test=test)
    seeds = 2 + bisect.bisect_left(range(2, MOST_SEEDS + 1), 0.8, key=found)
    return None if seeds > MOST_SEEDS else seeds


def _other(test: Test) -> Test:
    return "welch" if test == "paired" else "paired"


def _name(test: Test) -> str:
    return "paired" if test == "paired" else "Welch"


def _round(value: float | None) -> float | None:
    """Round to six digits, so that the file does not depend on the processor."""
    return None if value is None else float(f"{value:.6g}")
