import itertools
import json
import math
import statistics

import pytest
from hypothesis import given, strategies as st
from reproduction.comparisons import BETTER, EQUIVALENT, Comparison, compare, correct, holm, margin
from scipy.integrate import quad

probabilities = st.lists(st.floats(0.0, 1.0), max_size=7)


def t_density(x: float, freedom: int) -> float:
    factor = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    return factor * (1 + x * x / freedom) ** (-(freedom + 1) / 2)


def t_tail(x: float, freedom: int) -> float:
    """The probability of a larger value of Student's distribution."""
    return quad(t_density, x, math.inf, args=(freedom,), epsabs=1e-12)[0]


def pair(differences: list[float], reference: float = 0.9, metric: str = "eval_accuracy") -> Comparison:
    """Runs with these differences in points from a reference with a constant value."""
    theirs = dict.fromkeys(range(len(differences)), reference)
    ours = {seed: reference + difference / 100 for seed, difference in enumerate(differences)}
    found = compare("table", metric, "a", ours, "b", theirs)
    correct([found])
    return found


def around(mean: float, spread: float = 0.02, count: int = 5) -> list[float]:
    """Differences with this mean."""
    return [mean + spread * (seed - (count - 1) / 2) for seed in range(count)]


DIFFERENCES = [0.31, -0.12, 0.44, 0.05, 0.27]


def test_p_value_and_interval_are_those_of_the_paired_t_test():
    found = pair(DIFFERENCES)
    error = statistics.stdev(DIFFERENCES) / math.sqrt(5)
    t = statistics.mean(DIFFERENCES) / error
    assert found.p_value == pytest.approx(2 * t_tail(t, 4), rel=1e-8)
    half = 2.7764451 * error  # quantile at 97.5 % with 4 degrees of freedom, from a printed table
    assert found.interval == pytest.approx((found.mean - half, found.mean + half), rel=1e-6)


def test_equivalence_is_that_of_two_one_sided_tests():
    found = pair(DIFFERENCES, reference=0.95)
    bound = 0.10 * 5.0
    mean, error = statistics.mean(DIFFERENCES), statistics.stdev(DIFFERENCES) / math.sqrt(5)
    expected = max(t_tail((mean + bound) / error, 4), t_tail((bound - mean) / error, 4))
    assert found.equivalence_p_value == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(
    ("error_rate", "better", "equivalent"), [(2.0, 0.1, 0.2), (5.0, 0.25, 0.5), (6.0, 0.3, 0.5), (40.0, 0.3, 0.5)]
)
def test_margins_are_a_share_of_the_error_rate_and_bounded(error_rate, better, equivalent):
    assert margin(error_rate, BETTER) == pytest.approx(better)
    assert margin(error_rate, EQUIVALENT) == pytest.approx(equivalent)


@pytest.mark.parametrize(
    ("differences", "reference", "verdict"),
    [
        (around(0.31), 0.90, "better"),
        (around(-0.31), 0.90, "worse"),
        (around(0.29), 0.90, "equivalent"),  # significant, but less than 0.3 points
        (around(0.11), 0.98, "better"),  # 5 % of 2 % are 0.1 points
        (around(0.09), 0.98, "equivalent"),
        (around(0.0), 0.90, "equivalent"),
        (around(0.5, spread=1.0), 0.90, "not distinguished"),
        (around(0.15, spread=0.2), 0.98, "not distinguished"),
        ([5.0], 0.90, "not distinguished"),
        ([5.0, 5.0, 5.0], 0.90, "not distinguished"),  # no deviation, so no test
    ],
)
def test_verdict(differences, reference, verdict):
    assert pair(differences, reference).verdict == verdict


def test_verdict_uses_the_corrected_p_value():
    found = pair(around(0.4, spread=0.15))
    assert found.p_value < 0.05
    assert found.verdict == "better"
    found.corrected = 0.06
    assert found.verdict != "better"


@pytest.mark.parametrize(
    ("metric", "verdict"), [("scores/eval_calibration_error_equal_mass_l2", "worse"), ("x_fpr_y", "worse")]
)
def test_a_higher_error_is_worse(metric, verdict):
    assert pair(around(1.0), 0.05, metric).verdict == verdict


def test_an_error_has_its_own_value_as_error_rate():
    assert pair(around(1.0), 0.05, "eval_calibration_error").error_rate == pytest.approx(5.0)
    assert pair(around(1.0), 0.95, "scores/eval_recall_at_1").error_rate == pytest.approx(5.0)


def test_a_metric_without_error_rate_is_only_higher_or_lower():
    values = {0: 0.61, 1: 0.62, 2: 0.6}
    assert [verdict("projections/mass", values, 0.5), verdict("projections/mass", values, 0.7)] == ["higher", "lower"]
    assert verdict("projections/mass", values, 0.609) == "not distinguished"


def verdict(metric: str, values: dict[int, float], number: float) -> str:
    found = compare("table", metric, "a", values, number, number)
    correct([found])
    return found.verdict


def test_only_common_seeds_are_compared():
    found = compare("table", "x", "a", {0: 1.0, 1: 2.0, 2: 4.0}, "b", {1: 1.0, 2: 2.0, 3: 9.0})
    assert (found.seeds, found.differences) == ([1, 2], [1.0, 2.0])


def test_no_common_seed_permits_no_statement():
    found = compare("table", "x", "a", {0: 1.0}, "b", {1: 1.0})
    assert (found.show(), found.verdict, found.p_value, found.error_rate) == ("no common seed", "", None, None)


def test_rounding_errors_are_no_deviation():
    found = compare("table", "eval_accuracy", "a", {0: 0.7, 1: 0.5}, "b", {0: 0.6, 1: 0.4})
    assert (found.differences, found.p_value) == ([10.0, 10.0], None)


def test_the_record_has_the_values_of_each_seed_and_is_valid_json():
    record = pair([1.0, 2.0]).record()
    assert (record["values"], record["reference_values"]) == ({"0": 91.0, "1": 92.0}, {"0": 90.0, "1": 90.0})
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_holm_agrees_with_a_worked_example():
    # By hand: 4 x .005 = .02; 3 x .01 = .03; 2 x .03 = .06; 1 x .04, but at least .06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_unknown_p_values_count_as_the_largest_ones():
    assert holm([0.01, 0.04], 4) == pytest.approx(holm([0.01, 0.04, 1.0, 1.0])[:2])


@given(probabilities)
def test_holm_is_the_closed_test_of_bonferroni(p_values):
    """Its corrected p-value is the largest of Bonferroni's over all sets of hypotheses with this one."""
    sets = [s for n in range(len(p_values)) for s in itertools.combinations(range(len(p_values)), n + 1)]
    expected = [
        max(min(1.0, len(s) * min(p_values[index] for index in s)) for s in sets if own in s)
        for own in range(len(p_values))
    ]
    assert holm(p_values) == pytest.approx(expected)


@given(probabilities)
def test_holm_is_between_the_p_values_and_bonferroni(p_values):
    for p_value, corrected in zip(p_values, holm(p_values), strict=True):
        assert p_value <= corrected <= min(1.0, len(p_values) * p_value) + 1e-12


@given(probabilities, st.randoms())
def test_holm_does_not_depend_on_the_order(p_values, random):
    order = random.sample(range(len(p_values)), len(p_values))
    assert holm([p_values[index] for index in order]) == [holm(p_values)[index] for index in order]


@given(probabilities)
def test_holm_keeps_the_order_of_the_p_values(p_values):
    corrected = holm(p_values)
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    assert sorted(corrected) == [corrected[index] for index in order]
