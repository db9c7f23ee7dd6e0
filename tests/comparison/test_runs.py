import math
import statistics
from typing import Any

import numpy as np
import pytest

from hf_sphere.comparison import compare_runs, holm, power
from hf_sphere.comparison.runs import show_p_value
from hf_sphere.comparison.significance import difference_test
from hf_sphere.visualization import plot_comparison

RUNS = {
    "softmax": {0: 93.1, 1: 93.3, 2: 93.2},
    "cosine": {0: 93.8, 1: 93.9, 2: 94.1},
    "vmf": {0: 93.0, 1: 92.1, 2: 93.5},
}


def compare(runs: Any = RUNS, **options: Any):
    return compare_runs(runs, **{"reference": "softmax", "higher_is_better": True, "perfect": 100, **options})


def around(mean: float, spread: float, count: int = 5) -> dict[int, float]:
    return {seed: mean + spread * (seed - (count - 1) / 2) for seed in range(count)}


@pytest.mark.parametrize(
    ("difference", "spread", "options", "expected"),
    [
        (0.3, 0.02, {}, "better"),  # at the minimum effect: 5 % of the error rate would be 0.5, but at most 0.3 %
        (-0.3, 0.02, {}, "worse"),
        (0.3, 0.02, {"higher_is_better": False, "perfect": None, "minimum": 0.3}, "worse"),
        (-0.3, 0.02, {"higher_is_better": False, "perfect": None, "minimum": 0.3}, "better"),
        (0.29, 0.02, {}, "equivalent"),  # significant, but smaller than the minimum effect
        (0.29, 0.02, {"minimum": 0.29}, "better"),
        (0.001, 0.0001, {"perfect": None}, "better"),  # without a minimum effect
        (0.0, 0.02, {}, "equivalent"),
        (0.29, 0.02, {"margin": 0.29}, "no significant difference"),
        (0.29, 0.02, {"margin": 0.321}, "equivalent"),  # the interval of 90 % ends at 0.3201
        (0.29, 0.02, {"margin": 0.319}, "no significant difference"),
        (0.0, 0.02, {"perfect": None}, "no significant difference"),  # without a margin
        (0.5, 1.0, {}, "no significant difference"),
        (0.3, 0.0, {}, "not tested: no variation"),
        (0.3, 0.02, {"seeds": 6}, "incomplete"),
    ],
)
def test_verdict_at_its_borders(difference, spread, options, expected):
    # The reference has an error rate of 10 % and a constant accuracy.
    runs = {"softmax": dict.fromkeys(range(5), 90.0), "run": around(90.0 + difference, spread)}
    assert compare(runs, **options)["run"].verdict == expected


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e9])
def test_verdicts_do_not_depend_on_the_unit(unit):
    runs = {name: {seed: unit * value for seed, value in run.items()} for name, run in RUNS.items()}
    runs["near"] = {seed: unit * value for seed, value in {0: 93.12, 1: 93.3, 2: 93.25}.items()}
    found = compare(runs, perfect=100 * unit)
    assert [run.verdict for run in found.values()] == ["better", "no significant difference", "equivalent"]
    assert found["vmf"].power == pytest.approx(compare({**RUNS, "near": RUNS["softmax"]})["vmf"].power)


def test_a_verdict_needs_the_corrected_p_value():
    runs = {"softmax": dict.fromkeys(range(5), 90.0), "run": around(90.4, 0.15)}
    assert compare(runs, margin=0.001)["run"].verdict == "better"
    many = compare({**runs, **{f"other {n}": around(90.0, 1.0) for n in range(9)}}, margin=0.001)
    assert many["run"].p_value < 0.05 < many["run"].p_corrected
    assert many["run"].verdict == "no significant difference"


@pytest.mark.parametrize(
    ("perfect", "reference", "minimum", "margin"),
    [(100, 98.0, 0.1, 0.2), (100, 90.0, 0.3, 0.5), (1, 0.9, 0.003, 0.005), (0, 4.0, 0.2, 0.4), (None, 4.0, None, None)],
)
def test_minimum_and_margin_are_shares_of_the_distance_from_a_perfect_value(perfect, reference, minimum, margin):
    runs = {"softmax": {0: reference, 1: reference}, "run": {0: reference, 1: reference}}
    found = compare(runs, perfect=perfect, higher_is_better=perfect != 0)
    assert (found.minimum, found.margin) == pytest.approx((minimum, margin))
    assert compare({"softmax": {0: np.float32(100), 1: 100}, "run": {0: 99, 1: 98}}).minimum is None


@pytest.mark.parametrize("test", ["welch", "paired"])
def test_numbers_are_those_of_the_test_and_of_holm(test):
    found = compare(test=test)
    theirs = [*RUNS["softmax"].values()]
    tests = {name: difference_test([*RUNS[name].values()], theirs, test) for name in found}
    assert [run.p_value for run in found.values()] == [result.p_value for result in tests.values()]
    assert [run.interval for run in found.values()] == [result.interval for result in tests.values()]
    assert [run.p_corrected for run in found.values()] == holm([result.p_value for result in tests.values()])
    assert found["vmf"].difference == pytest.approx(statistics.mean(RUNS["vmf"].values()) - 93.2)


@pytest.mark.parametrize("test", ["welch", "paired"])
@pytest.mark.parametrize("other", [{0: 94.0}, {0: 94.0, 7: 93.0}])
def test_the_table_says_why_one_seed_is_not_tested(test, other):
    found = compare({"softmax": {0: 93.0}, "run": other}, test=test)
    assert found["run"].verdict == "not tested: one seed"
    assert str(found).endswith("|  |  | not tested: one seed |")


@pytest.mark.parametrize(
    ("values", "perfect", "higher_is_better"),
    [([60.0, 101.0], 100, True), ([0.6, 0.7], 100, False), ([93.0, 94.0], 1, True), ([-0.1, 0.2], 0, False)],
)
def test_a_value_better_than_perfect_is_an_error(values, perfect, higher_is_better):
    runs = {"softmax": {0: perfect, 1: perfect}, "run": dict(enumerate(values))}
    with pytest.raises(ValueError, match=f"run has the value .*, better than perfect={perfect}"):
        compare(runs, perfect=perfect, higher_is_better=higher_is_better)


@pytest.mark.parametrize("direction", ["false", None, "lower"])
def test_a_direction_that_is_no_truth_value_is_an_error(direction):
    runs = {"a": {0: 0.8, 1: 0.82}, "b": {0: 0.7, 1: 0.72}}
    with pytest.raises(ValueError, match=f"higher_is_better must be one of True, False; got {direction!r}"):
        compare_runs(runs, reference="b", higher_is_better=direction)


def test_a_value_may_be_better_than_perfect_by_rounding():
    runs = {"softmax": {0: {"a": 0.3, "b": 0.1}}, "run": {0: {"a": 0.3, "b": -0.3 - 1e-16}}}
    assert statistics.fmean(compare(runs, perfect=0, higher_is_better=False)["run"].values.values()) < 0


@pytest.mark.parametrize("spoiled", [{"softmax", "run"}, {"run"}])
def test_fractions_under_a_perfect_value_of_100_warn(spoiled):
    runs = {name: {0: 60.0, 1: 61.0} for name in ("softmax", "run")}
    runs |= {name: {0: 0.85, 1: 0.86} for name in spoiled}
    with pytest.warns(UserWarning, match="1 % of perfect=100; check that they are not fractions") as caught:
        compare(runs)
    assert len(caught) == len(spoiled)


def test_power_is_that_for_the_minimum_effect_at_the_strictest_level():
    deviation = math.sqrt((statistics.variance(RUNS["vmf"].values()) + 0.01) / 2)
    assert compare()["vmf"].power == pytest.approx(power(0.3, deviation, 3, tests=2))
    assert compare(perfect=None)["vmf"].power is None


def test_a_paired_test_uses_the_common_seeds():
    runs = {"softmax": {0: 1.0, 1: 2.0, 2: 3.0}, "run": {2: 4.0, 1: 2.5, 7: 100.0}}
    found = compare(runs, test="paired", seeds=3)["run"]
    assert (found.difference, found.verdict) == (0.75, "incomplete")
    assert compare(runs)["run"].difference == pytest.approx(106.5 / 3 - 2)


def test_an_incomplete_run_counts_in_the_correction():
    found = compare({**RUNS, "late": {0: 94.0}}, seeds=3)
    assert found["late"].verdict == "incomplete"
    assert found["cosine"].p_corrected == pytest.approx(3 * found["cosine"].p_value)


def test_markdown_has_a_row_per_run():
    lines = str(compare({**RUNS, "a|b": {0: 94.0}}, seeds=3)).splitlines()
    assert [line.count("|") for line in lines] == [8] * 6
    assert lines[2] == "| softmax | 3 | 93.2 ± 0.1 |  |  |  | reference |"
    assert lines[3] == "| cosine | 3 | 93.933 ± 0.15 | +0.7333 (+0.4212 to +1.045) | 0.011 | 0.20 | better |"
    assert lines[5] == "| a&#124;b | 1 | 94 | +0.8 |  |  | incomplete |"


def test_latex_escapes_names_and_a_frame_has_the_numbers():
    found = compare({**RUNS, "a_b & 5 %": {0: 94.0, 1: 94.1}})
    lines, frame = found.to_latex().splitlines(), found.to_pandas()
    assert lines[:2] == [r"\begin{tabular}{lrrrrrl}", r"\toprule"]
    assert lines[-3] == r"a\_b \& 5 \% & 2 & 94.05 $\pm$ 0.071 & +0.85 (+0.6012 to +1.099) & 0.0056 & 0.09 & better \\"
    assert [*frame.index] == ["softmax", "cosine", "vmf", "a_b & 5 %"]
    assert frame.loc["vmf", "p_corrected"] == found["vmf"].p_corrected
    assert (frame.loc["vmf", "low"], frame.loc["vmf", "high"]) == found["vmf"].interval
    assert frame.loc["softmax", ["seeds", "mean"]].tolist() == [3, pytest.approx(93.2)]


def test_the_figure_has_a_row_of_values_mean_interval_and_verdict_per_run():
    pytest.importorskip("matplotlib")
    found = compare_runs({**RUNS, "late": {0: 94.0}}, reference="softmax", higher_is_better=False, margin=0.25, seeds=3)
    left, right = plot_comparison(found).axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["softmax", "cosine", "vmf", "late"]
    assert left.get_ylim() == (3.5, -0.5)  # the first row is at the top, and all are off the frame
    points = [line.get_xydata().tolist() for line in left.lines]
    assert points[0] == [[93.1, 0], [93.3, 0], [93.2, 0]]
    assert points[1:3] == [[[pytest.approx(93.2), 0]], [[93.8, 1], [93.9, 1], [94.1, 1]]]
    rows = {"cosine": 1, "vmf": 2, "late": 3}
    texts = [(text.get_text(), text.xy) for text in right.texts]
    assert texts == [(found[name].verdict, (1.02, row)) for name, row in rows.items()]
    intervals, means = right.lines[0:4:2], [*right.lines[1:4:2], right.lines[4]]
    for line, name in zip(intervals, ("cosine", "vmf"), strict=True):
        assert line.get_xydata().tolist() == [[bound, rows[name]] for bound in found[name].interval]
    assert [line.get_xydata().tolist() for line in means] == [
        [[found[name].difference, row]] for name, row in rows.items()
    ]
    assert "lower is better" in left.get_xlabel()
    assert "gray: margin of equivalence, 0.25" in right.get_xlabel()
    (band,) = right.patches
    assert (band.get_x(), band.get_width()) == (-0.25, 0.5)


@pytest.mark.parametrize(
    ("p_value", "shown"), [(None, ""), (0.0009, "< 0.001"), (0.001, "0.001"), (0.0456, "0.046"), (1.0, "1")]
)
def test_a_p_value_is_shown_with_two_digits(p_value, shown):
    assert show_p_value(p_value) == shown
