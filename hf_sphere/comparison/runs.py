"""Runs with several seeds, compared with a reference: differences, verdicts, tables and a figure."""

import math
import statistics
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from hf_sphere.comparison.crossed import Outcomes, Variation, widest_test
from hf_sphere.comparison.significance import LEVEL, Test, TestResult, holm, power
from hf_sphere.utils.checks import check_choice
from hf_sphere.utils.pages import Table, draw_markdown

if TYPE_CHECKING:
    from pandas import DataFrame

SHARES = {"minimum": (0.05, 0.003), "margin": (0.10, 0.005)}
"""Defaults of the minimum effect and of the margin of equivalence: a fraction of the reference's distance from a
perfect value, at most a fraction of that value."""

Verdict = Literal[
    "better",
    "worse",
    "equivalent",
    "no significant difference",
    "incomplete",
    "not tested: one seed",
    "not tested: no variation",
]
"""What a comparison says about a run."""


@dataclass(frozen=True)
class Difference:
    """A run compared with the reference.

    Attributes:
        run: Name of the run.
        reference: Name of the reference.
        values: Values by seed.
        reference_values: Those of the reference.
        mean: Mean value of the run.
        difference: Mean of the run minus mean of the reference, for a paired test on the common seeds.
        interval: 95 % interval of the difference; None if it cannot be tested, as the p-values.
        variation: That of the interval: `seeds`, `seeds and test images`, `resampled splits`, or `test images`; None
            without one.
        p_value: Two-sided p-value.
        p_corrected: P-value corrected by Holm's method for all runs of the comparison.
        p_equivalence: P-value of equivalence within the margin, not corrected; None without a margin.
        power: Probability of finding a difference of the minimum effect, at the strictest level of the family, if the
            standard error is the observed one; None without a minimum effect or a test.
        verdict: See `compare_runs`.
    """

    run: str
    reference: str
    values: Mapping[int, float]
    reference_values: Mapping[int, float]
    mean: float
    difference: float
    interval: tuple[float, float] | None
    variation: Variation | None
    p_value: float | None
    p_corrected: float | None
    p_equivalence: float | None
    power: float | None
    verdict: Verdict


@dataclass(frozen=True, repr=False)
class RunComparison(Table, Mapping[str, Difference]):
    """Runs compared with a reference, by name.

    Attributes:
        reference: Name of the reference.
        reference_values: Its values by seed.
        differences: The other runs, in the order of `compare_runs`.
        minimum: Smallest difference that counts; None if any does.
        margin: Largest difference of equivalent runs; None without a test of equivalence.
        test: The test.
        higher_is_better: Whether larger values are better.
    """

    reference: str
    reference_values: Mapping[int, float]
    differences: Mapping[str, Difference]
    minimum: float | None
    margin: float | None
    test: Test
    higher_is_better: bool

    def __getitem__(self, name: str) -> Difference:
        return self.differences[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.differences)

    def __len__(self) -> int:
        return len(self.differences)

    def __repr__(self) -> str:
        return self.to_markdown()

    def to_pandas(self) -> "DataFrame":
        """Return a row per run, with the numbers of `Difference`."""
        import pandas as pd

        columns = ["difference", "low", "high", "p_value", "p_corrected", "p_equivalence", "power", "verdict"]
        rows: dict[str, dict[str, Any]] = {self.reference: _describe(self.reference_values)}
        for name, difference in self.differences.items():
            low, high = difference.interval or (None, None)
            values = {column: getattr(difference, column, None) for column in columns} | {"low": low, "high": high}
            rows[name] = _describe(difference.values) | values
        return pd.DataFrame.from_dict(rows, orient="index", columns=["seeds", "mean", "deviation", *columns])

    def _repr_html_(self) -> str:
        return draw_markdown([self.to_markdown()])

    def to_markdown(self) -> str:
        """Return the table for a page."""
        lines = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |" for cells in self._cells()]
        kinds = {name: run.variation for name, run in self.differences.items() if run.variation}
        same = len({*kinds.values()}) == 1 and len(kinds) == len(self.differences)
        note = "; ".join({*kinds.values()} if same else (f"{name}: {kind}" for name, kind in kinds.items()))
        below = ["", f"Variation of the intervals: {note}."] if {*kinds.values()} - {"seeds"} else []
        return "\n".join([lines[0], "|---|" + "---:|" * 5 + "---|", *lines[1:], *below])

    def to_latex(self) -> str:
        """Return the table for a paper, a `tabular` with the rules of the package booktabs."""
        import pandas as pd

        header, *rows = self._cells()
        text = pd.DataFrame(rows, columns=header).to_latex(index=False, escape=True, column_format="lrrrrrl")
        return text.replace("±", r"$\pm$").replace("<", "$<$").strip()

    def _cells(self) -> list[list[str]]:
        is_paired = self.test == "paired" or all(run.variation == "test images" for run in self.values())
        test = "paired" if is_paired else "Welch"
        header = ["run", "seeds", "mean ± deviation", f"minus {self.reference} (95 % CI)"]
        header += [f"p ({test}, Holm)", "power", "verdict"]
        rows = [[self.reference, *_show(self.reference_values), "", "", "", "reference"]]
        for name, run in self.differences.items():
            interval = "" if run.interval is None else f" ({run.interval[0]:+.4g} to {run.interval[1]:+.4g})"
            numbers = [f"{run.difference:+.4g}{interval}", show_p_value(run.p_corrected)]
            numbers.append("" if run.power is None else f"{run.power:.2f}")
            rows.append([name, *_show(run.values), *numbers, run.verdict])
        return [header, *rows]


def compare_runs(
    values: Mapping[str, Mapping[int, float | Outcomes]],
    *,
    reference: str,
    higher_is_better: bool,
    perfect: float | None = None,
    minimum: float | None = None,
    margin: float | None = None,
    test: Test = "welch",
    seeds: int | None = None,
    test_fraction: float | None = None,
) -> RunComparison:
    """Compare runs with several seeds with a reference: one planned metric, one planned test, one family.

    The verdicts:

    - `better` and `worse`: the corrected p-value is below 0.05 and the difference is at least the minimum effect.
    - `equivalent`: otherwise, if by two one-sided tests at the 5 % level the difference is within the margin. These
      tests are not corrected.
    - `no significant difference`: everything else. It does not mean that there is none; see the interval and the power.
    - `incomplete`: seeds are missing. Such a run is not tested, but counts in the correction.
    - `not tested`, and why: there is one seed of the run or the reference (for a paired test, in common), or nothing
      varies. Such a run counts in the correction, too.

    With a number per seed, intervals and tests describe the variation between seeds, not that between test sets. With
    outcomes per image they also cross seeds with test images, and with `test_fraction` allow for redrawn splits. The
    widest of these intervals, with its p-value, gives the verdict; `Difference.variation` names it. If there is one
    seed, outcomes of the same images have a paired test over images: it is about these trained models, not about others
    with other seeds.

    Args:
        values: A value per seed, by run: the planned metric, such as the accuracy after the last epoch. Or outcomes by
            the id of the test image, such as 1 where a prediction is correct and 0 where it is not, whose mean is the
            value; `pseudo_values` makes them of other measures. Runs with the same seed are tested on the same images.
        reference: Name of the run with which the others are compared.
        higher_is_better: Whether larger values are better, as of an accuracy.
        perfect: Value of a perfect run, such as 1 or 100 of an accuracy or 0 of an error rate. With it, `minimum` is by
            default 5 %, and `margin` 10 %, of the reference's mean distance from it, at most 0.3 % and 0.5 % of it. A
            run whose values are all at most 1 % of it gets a warning, as fractions of 1 where `perfect` is 100.
        minimum: Smallest difference that counts; without it, every significant one does.
        margin: Largest difference between equivalent runs; without it, none is called equivalent.
        test: `welch` for independent runs; `paired` for runs that share more than the number of their seed, such as
            the data.
        seeds: Planned number of seeds of each run; if None, the seeds in `values`.
        test_fraction: Test images divided by training and test images, f, if each seed resamples the
            split of the same data. The corrected resampled t-test (Nadeau and Bengio, "Inference for the generalization
            error", 2003) then multiplies the variance s^2 / S of the mean of S seeds by 1 + S f / (1 - f).

    Raises:
        ValueError: If there is no such reference, no other run, a value is not finite, or better than `perfect`, only
            some values are outcomes, the test images of a seed differ, or an argument is invalid.

    Example:
        >>> runs = {"softmax": {0: 93.1, 1: 93.3, 2: 93.2}, "cosine": {0: 93.8, 1: 93.9, 2: 94.1}}
        >>> comparison = compare_runs(runs, reference="softmax", higher_is_better=True, perfect=100)
        >>> comparison["cosine"].verdict, round(comparison["cosine"].difference, 2)
        ('better', 0.73)
    """
    sizes = {"minimum": (minimum, 0, math.inf), "margin": (margin, 0, math.inf), "seeds": (seeds, 1, math.inf)}
    limits = {"test_fraction": (test_fraction, 0, 1), "perfect": (perfect, -math.inf, math.inf)}
    _check(values, reference, test, **sizes, **limits)
    means = {name: {seed: _mean(value) for seed, value in run.items()} for name, run in values.items()}
    if perfect is not None:
        rounding = 1e-9 * max(abs(number) for run in values.values() for number in _numbers(run))
        _check_perfect(means, perfect, higher_is_better, rounding)
    theirs = means.pop(reference)
    distance = None if perfect is None else abs(perfect - statistics.fmean(theirs.values()))
    minimum = _default("minimum", distance, perfect) if minimum is None else minimum
    margin = _default("margin", distance, perfect) if margin is None else margin
    results: dict[str, dict[str, Any]] = {}
    for name, ours in means.items():
        common = sorted({*ours} & {*theirs})
        pair = values[name], values[reference]
        groups = [[run[seed] for seed in common] if test == "paired" else [*run.values()] for run in pair]
        if not groups[0]:
            raise ValueError(f"{name} and {reference} have no seed in common for a paired test.")
        a, b = ([_mean(value) for value in group] for group in groups)
        result, variation = widest_test(a, b, test, groups, test_fraction)
        count = min(len(a), len(b))
        is_complete = seeds is None or count >= seeds
        over_images = variation == "test images"
        kind: Test = "paired" if over_images else test
        sample = round(result.freedom) + 1 if result and over_images else count
        results[name] = {
            "difference": statistics.fmean(a) - statistics.fmean(b),
            "interval": result and result.interval,
            "variation": variation,
            "p_value": result.p_value if result and is_complete else None,
            "p_equivalence": result.p_equivalence(margin) if result and margin and is_complete else None,
            "power": observed_power(result, minimum, sample, tests=len(means), test=kind),
            "verdict": f"not tested: {'one seed' if count < 2 else 'no variation'}" if is_complete else "incomplete",
        }
    corrected = holm([numbers["p_value"] for numbers in results.values()], len(results))
    differences = {}
    for (name, numbers), p_corrected in zip(results.items(), corrected, strict=True):
        if p_corrected is not None:
            change = numbers["difference"] if higher_is_better else -numbers["difference"]
            numbers["verdict"] = decide(change, minimum, p_corrected, numbers["p_equivalence"])
        mean = statistics.fmean(means[name].values())
        numbers |= {"mean": mean, "p_corrected": p_corrected}
        differences[name] = Difference(name, reference, means[name], theirs, **numbers)
    return RunComparison(reference, theirs, differences, minimum, margin, test, higher_is_better)


def decide(improvement: float, minimum: float | None, p_corrected: float, p_equivalence: float | None) -> Verdict:
    """Return the verdict on a run that was tested, see `compare_runs`; the improvement is positive if it is better."""
    if p_corrected < LEVEL and abs(improvement) >= (1 - 1e-9) * (minimum or 0.0):
        return "better" if improvement > 0 else "worse"
    is_equivalent = p_equivalence is not None and p_equivalence < LEVEL
    return "equivalent" if is_equivalent else "no significant difference"


def observed_power(
    result: TestResult | None, minimum: float | None, seeds: int, *, tests: int, test: Test
) -> float | None:
    """Return the power for a minimum effect with the standard error of a test, of at least so many seeds per group."""
    if result is None or not minimum:
        return None
    # The deviation between seeds that has the standard error; a test over images has more degrees of freedom.
    deviation = result.error * math.sqrt(seeds / (1 if test == "paired" else 2))
    return power(minimum, deviation, seeds, tests=tests, test=test)


def _check(values: Mapping[str, Mapping[int, Any]], reference: str, test: str, **limited: Any) -> None:
    """Check the arguments of `compare_runs`; `limited` are a number or None, and its limits, which are excluded."""
    if not isinstance(values, Mapping):
        raise ValueError(f"values must be a mapping of runs, {{name: {{seed: value}}}}; got a {type(values).__name__}.")
    if reference not in values or len(values) < 2:
        raise ValueError(f"there is no run {reference!r} to compare others with; the runs are {', '.join(values)}.")
    check_choice("test", test, get_args(Test))
    for name, (number, low, high) in limited.items():
        if number is not None and not low < number < high:
            raise ValueError(f"{name} must be above {low} and below {high}; got {number}.")
    for name, run in values.items():
        is_valid = [isinstance(v, Real | np.bool_) and math.isfinite(v) for v in _numbers(run)]
        if not is_valid or not all(is_valid) or any(isinstance(seed, bool | np.bool_) for seed in run):
            needed = f"{name} needs a mapping of integer seeds to finite values or outcomes"
            raise ValueError(f"{needed}; got {str(run)[:200]}. Leave out seeds that diverged.")
    largest = max(abs(float(v)) for run in values.values() for v in _numbers(run))
    if not 1e-100 < (largest or 1.0) < 1e100:  # the variances would be infinite or zero
        raise ValueError(f"the largest value must be between 1e-100 and 1e100; got {largest}. Change the unit.")
    kinds = {name: {isinstance(value, Mapping) for value in run.values()} for name, run in values.items()}
    if len(set.union(*kinds.values())) > 1:
        numbers = ", ".join(name for name, found in kinds.items() if False in found)
        raise ValueError(f"all runs need a number per seed, or all outcomes; got numbers of {numbers}.")
    for name, seed, ours in (
        (name, *item) for name, run in values.items() for item in run.items() if True in kinds[name]
    ):
        theirs = values[reference].get(seed, ours)
        if len(ours) < 2 or ours.keys() != theirs.keys():
            got = f"{len(ours)} and {len(theirs)} images, {len(ours.keys() & theirs.keys())} of them in both"
            needed = f"{name} and {reference} need outcomes of the same images for seed {seed}, at least 2"
            raise ValueError(f"{needed}; got {got}.")


def _numbers(run: Mapping[int, float | Outcomes]) -> list[float]:
    return [number for value in run.values() for number in (value.values() if isinstance(value, Mapping) else [value])]


def _check_perfect(
    means: Mapping[str, Mapping[int, float]], perfect: float, higher_is_better: bool, rounding: float
) -> None:
    """Check that no value is better than a perfect one, and warn of those that may have another unit."""
    for name, run in means.items():
        best = (max if higher_is_better else min)(run.values())
        if (best - perfect if higher_is_better else perfect - best) > rounding:
            hint = "give perfect in the unit of the values, or check higher_is_better"
            raise ValueError(f"{name} has the value {best:g}, better than perfect={perfect:g}; {hint}.")
        if perfect and all(0 <= value / perfect <= 0.01 for value in run.values()):
            text = f"all values of {name} are at most {perfect / 100:g}, 1 % of perfect={perfect:g}"
            warnings.warn(f"{text}; check that they are not fractions of 1.", stacklevel=3)


def _mean(value: float | Outcomes) -> float:
    return statistics.fmean(value.values()) if isinstance(value, Mapping) else float(value)


def _default(name: str, distance: float | None, perfect: float | None) -> float | None:
    """Return the default of a size, which is None if the reference is perfect."""
    fraction, most = SHARES[name]
    limits = [] if distance is None else [fraction * distance, *([most * abs(perfect)] if perfect else [])]
    return min(limits, default=None) or None


def _describe(values: Mapping[int, float]) -> dict[str, Any]:
    numbers = [*values.values()]
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
    return {"seeds": len(numbers), "mean": statistics.fmean(numbers), "deviation": deviation}


def _show(values: Mapping[int, float]) -> list[str]:
    seeds, mean, deviation = _describe(values).values()
    return [str(seeds), f"{mean:.5g}" + ("" if deviation is None else f" ± {deviation:.2g}")]


def show_p_value(p_value: float | None) -> str:
    """Format a p-value; empty without one."""
    return "" if p_value is None else "< 0.001" if p_value < 0.001 else f"{p_value:.2g}"
