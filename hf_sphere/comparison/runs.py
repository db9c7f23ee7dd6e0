"""Runs with several seeds, compared with a reference: differences, verdicts, tables and a figure."""

import math
import statistics
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pandas as pd

from hf_sphere.comparison.significance import LEVEL, Outcomes, Test, Variation, holm, mean_of, widest_test
from hf_sphere.utils.checks import check_choice, check_number
from hf_sphere.utils.pages import Table, draw_markdown, markdown_rows

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
        values: Values by seed.
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

    values: Mapping[int, float]
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

    def to_pandas(self) -> pd.DataFrame:
        """Return a row per run, with the numbers of `Difference`."""
        columns = ["difference", "low", "high", "p_value", "p_corrected", "p_equivalence", "power", "verdict"]
        rows: dict[str, dict[str, Any]] = {self.reference: _describe(self.reference_values)}
        for name, run in self.items():
            low, high = run.interval or (None, None)
            rows[name] = {**_describe(run.values), **vars(run), "low": low, "high": high}
        return pd.DataFrame.from_dict(rows, orient="index", columns=["seeds", "mean", "deviation", *columns])

    def _repr_html_(self) -> str:
        return draw_markdown([self.to_markdown()])

    def to_markdown(self) -> str:
        """Return the table for a page."""
        kinds = {name: run.variation for name, run in self.items() if run.variation}
        same = len({*kinds.values()}) == 1 and len(kinds) == len(self)
        note = "; ".join({*kinds.values()} if same else (f"{name}: {kind}" for name, kind in kinds.items()))
        below = ["", f"Variation of the intervals: {note}."] if {*kinds.values()} - {"seeds"} else []
        return "\n".join([*markdown_rows(self._cells(), "|---|" + "---:|" * 5 + "---|"), *below])

    def to_latex(self) -> str:
        """Return the table for a paper, a `tabular` with the rules of the package booktabs."""
        header, *rows = self._cells()
        text = pd.DataFrame(rows, columns=header).to_latex(index=False, escape=True, column_format="lrrrrrl")
        return text.replace("±", r"$\pm$").replace("<", "$<$").strip()

    def _cells(self) -> list[list[str]]:
        is_paired = self.test == "paired" or all(run.variation == "test images" for run in self.values())
        test = "paired" if is_paired else "Welch"
        header = ["run", "seeds", "mean ± deviation", f"minus {self.reference} (95 % CI)"]
        header += [f"p ({test}, Holm)", "power", "verdict"]
        rows = [[self.reference, *_show(self.reference_values), "", "", "", "reference"]]
        for name, run in self.items():
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
        KeyError: If there is no such reference.
        ValueError: If a value is not finite, or better than `perfect`, the test images of a seed differ, or an argument
            is invalid.

    Example:
        >>> runs = {"softmax": {0: 93.1, 1: 93.3, 2: 93.2}, "cosine": {0: 93.8, 1: 93.9, 2: 94.1}}
        >>> comparison = compare_runs(runs, reference="softmax", higher_is_better=True, perfect=100)
        >>> comparison["cosine"].verdict, round(comparison["cosine"].difference, 2)
        ('better', 0.73)
    """
    _check(values, reference, minimum=minimum, margin=margin, seeds=seeds, perfect=perfect, test_fraction=test_fraction)
    check_choice("test", test, get_args(Test))
    check_choice("higher_is_better", higher_is_better, (True, False))  # a text such as "false" would count as true
    means = {name: {seed: mean_of(value) for seed, value in run.items()} for name, run in values.items()}
    if perfect is not None:
        rounding = 1e-9 * max(abs(value) for run in means.values() for value in run.values())
        for name, run in means.items():
            best = (max if higher_is_better else min)(run.values())
            if (best - perfect if higher_is_better else perfect - best) > rounding:
                wrong = f"{name} has the value {best:g}, better than perfect={perfect:g}"
                raise ValueError(f"{wrong}; check its unit and higher_is_better.")
            if perfect and all(0 <= value / perfect <= 0.01 for value in run.values()):  # maybe in another unit
                text = f"all values of {name} are at most {perfect / 100:g}, 1 % of perfect={perfect:g}"
                warnings.warn(f"{text}; check that they are not fractions of 1.", stacklevel=2)
        distance = abs(perfect - statistics.fmean(means[reference].values()))
        minimum, margin = (
            min(fraction * distance, most * abs(perfect) or math.inf) or None if size is None else size
            for size, (fraction, most) in zip((minimum, margin), SHARES.values(), strict=True)
        )  # None if the reference is perfect
    theirs, groups = means.pop(reference), dict[str, Any]()
    for name, ours in means.items():
        common = sorted({*ours} & {*theirs})
        if test == "paired" and not common:
            raise ValueError(f"{name} and {reference} have no seed in common for a paired test.")
        pair = values[name], values[reference]
        groups[name] = [[run[seed] for seed in common] if test == "paired" else [*run.values()] for run in pair]
    results = {name: widest_test(a, b, test, test_fraction) for name, (a, b) in groups.items()}
    counts = {name: min(map(len, group)) for name, group in groups.items()}
    complete = {name for name, count in counts.items() if seeds is None or count >= seeds}
    p_values = [result.p_value if result and name in complete else None for name, result in results.items()]
    differences = {}
    for name, p_value, p_corrected in zip(results, p_values, holm(p_values, len(results)), strict=True):
        result, (a, b) = results[name], (statistics.fmean(map(mean_of, group)) for group in groups[name])
        p_equivalence = result.p_equivalence(margin) if result and margin and name in complete else None
        if p_corrected is not None:
            verdict = decide(a - b if higher_is_better else b - a, minimum, p_corrected, p_equivalence)
        elif name not in complete:
            verdict = "incomplete"
        else:
            verdict = "not tested: one seed" if counts[name] < 2 else "not tested: no variation"
        differences[name] = Difference(
            values=means[name],
            difference=a - b,
            interval=result and result.interval,
            variation=result and result.variation,
            p_value=p_value,
            p_corrected=p_corrected,
            p_equivalence=p_equivalence,
            power=result and result.power(minimum, counts[name], tests=len(means), test=test),
            verdict=verdict,
        )
    return RunComparison(reference, theirs, differences, minimum, margin, test, higher_is_better)


def decide(improvement: float, minimum: float | None, p_corrected: float, p_equivalence: float | None) -> Verdict:
    """Return the verdict on a run that was tested, see `compare_runs`; the improvement is positive if it is better."""
    if p_corrected < LEVEL and abs(improvement) >= (1 - 1e-9) * (minimum or 0.0):
        return "better" if improvement > 0 else "worse"
    is_equivalent = p_equivalence is not None and p_equivalence < LEVEL
    return "equivalent" if is_equivalent else "no significant difference"


def _check(values: Mapping[str, Mapping[int, Any]], reference: str, **numbers: Any) -> None:
    limits = {"seeds": "[2, inf)", "perfect": "(-inf, inf)", "test_fraction": "(0, 1)"}
    for name, number in numbers.items():
        if number is not None:
            check_number(name, number, limits.get(name, "(0, inf)"))
    if len({isinstance(value, Mapping) for run in values.values() for value in run.values()}) > 1:
        raise ValueError("all runs need a number per seed, or all outcomes; got both.")
    for name, run in values.items():
        if not run or not all(math.isfinite(mean_of(value)) for value in run.values()):
            raise ValueError(f"{name} needs finite values by seed; got {str(run)[:99]}. Leave out diverged seeds.")
        for seed, ours in run.items():
            theirs = values[reference].get(seed, ours)
            if isinstance(ours, Mapping) and (len(ours) < 2 or ours.keys() != theirs.keys()):
                needed = f"{name} and {reference} need outcomes of the same images for seed {seed}, at least 2"
                got = f"{len(ours)} and {len(theirs)} images, {len(ours.keys() & theirs.keys())} of them in both"
                raise ValueError(f"{needed}; got {got}.")


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
