import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from hf_sphere.comparison import compare_runs, holm, power, pseudo_values, seeds_for_power
from hf_sphere.comparison.significance import difference_test

OURS, THEIRS = [93.8, 93.9, 94.1, 93.6, 94.4], [93.1, 93.4, 93.2, 93.9, 93.0]
TESTS = ["welch", "paired"]
probabilities = st.lists(st.floats(0.0, 1.0), max_size=7)


def reference(ours: list[float], theirs: list[float], test: str, **options):
    """The test of scipy."""
    if test == "paired":
        return stats.ttest_rel(ours, theirs, **options)
    return stats.ttest_ind(ours, theirs, equal_var=False, **options)


@pytest.mark.parametrize(
    ("test", "ours"), [("welch", OURS), ("paired", OURS), ("welch", OURS[:3]), ("welch", [*OURS, 96.0])]
)
def test_p_value_and_interval_are_those_of_scipy(test, ours):
    found, expected = difference_test(ours, THEIRS, test), reference(ours, THEIRS, test)
    small = difference_test([1e-12 * value for value in ours], [1e-12 * value for value in THEIRS], test)
    assert small.p_value == pytest.approx(expected.pvalue, rel=1e-6)
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.interval == pytest.approx(expected.confidence_interval(0.95), rel=1e-9)


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("sign", [1, -1])
def test_equivalence_is_that_of_two_one_sided_tests(test, sign):
    ours, theirs, margin = (OURS, THEIRS, 1.4) if sign > 0 else (THEIRS, OURS, 1.4)
    above = reference([value + margin for value in ours], theirs, test, alternative="greater").pvalue
    below = reference([value - margin for value in ours], theirs, test, alternative="less").pvalue
    found = difference_test(ours, theirs, test).p_equivalence(margin)
    assert found == pytest.approx(max(above, below), rel=1e-9)


def test_a_constant_reference_makes_both_tests_that_of_one_sample():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [difference_test(OURS, [93.0] * 5, test) for test in TESTS]
    assert found[0].p_value == pytest.approx(stats.ttest_1samp(OURS, 93.0).pvalue, rel=1e-9)
    assert found[1].interval == pytest.approx(found[0].interval)


@pytest.mark.parametrize(
    ("ours", "theirs", "test"),
    [
        ([1.0], [2.0], "paired"),
        ([1.0], [1.0, 2.0], "welch"),
        ([1.0, 1.0], [2.0, 2.0], "welch"),
        ([0.7, 0.5], [0.6, 0.4], "paired"),  # equal but for rounding errors
        ([0.7e-12, 0.5e-12], [0.6e-12, 0.4e-12], "paired"),
    ],
)
def test_values_without_variation_are_not_tested(ours, theirs, test):
    assert difference_test(ours, theirs, test) is None


def test_holm_agrees_with_a_worked_example_and_planned_tests_count_as_the_largest_p_values():
    # By hand: 4 x .005 = .02; 3 x .01 = .03; 2 x .03 = .06; 1 x .04, but at least .06.
    assert holm([0.01, 0.04, None, 0.03, 0.005]) == pytest.approx([0.03, 0.06, None, 0.06, 0.02])
    assert (holm([0.6, 0.7]), holm([])) == ([1, 1], [])
    assert holm([0.01, 0.04, None], 4) == pytest.approx([*holm([0.01, 0.04, 1.0, 1.0])[:2], None])


@given(probabilities)
def test_holm_is_the_closed_test_of_bonferroni(p_values):
    """Its corrected p-value is the largest of Bonferroni's over all sets of hypotheses with this one."""
    sets = [s for n in range(len(p_values)) for s in itertools.combinations(range(len(p_values)), n + 1)]
    expected = [
        max(min(1.0, len(s) * min(p_values[index] for index in s)) for s in sets if own in s)
        for own in range(len(p_values))
    ]
    assert holm(p_values) == pytest.approx(expected)


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize(("seeds", "difference", "tests"), [(2, 3.0, 1), (3, 3.0, 7), (5, 1.5, 7), (10, 1.0, 3)])
def test_power_is_the_share_of_simulated_experiments_with_a_difference(test, seeds, difference, tests):
    """Three seeds have half of the power that the pooled test would have: Welch's degrees of freedom vary."""
    ours, theirs = np.random.default_rng(0).normal(size=(2, 40_000, seeds))
    theirs = 0 * theirs if test == "paired" else theirs
    p_values = reference(list((ours + difference).T), list(theirs.T), test).pvalue
    assert power(difference, 1.0, seeds, tests=tests, test=test) == pytest.approx(
        np.mean(p_values < 0.05 / tests), abs=0.01
    )


@pytest.mark.parametrize(("difference", "expected"), [(0.0, 0.05), (61.0, 1.0), (1e6, 1.0), (1e12, 1.0), (1e300, 1.0)])
def test_power_at_its_ends(difference, expected):
    assert power(difference, 1.0, 4, test="paired") == pytest.approx(expected)
    assert power(-difference, 1.0, 3, tests=7) == power(difference, 1.0, 3, tests=7)
    for seeds in (10**9, 10**30):
        assert power(float(difference > 0), 1.0, seeds) == pytest.approx(expected, rel=1e-3)


def test_power_of_an_effect_that_is_as_large_as_its_threshold_depends_on_the_deviation():
    tests = 0.05 / 2 / stats.t.sf(1e6, 1)  # with one degree of freedom, the threshold is a million
    expected = stats.chi2.cdf(1.0, 1)
    assert power(1e6 / math.sqrt(2), 1.0, 2, tests=tests, test="paired") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize(
    ("difference", "tests", "target"), [(0.3, 1, 0.8), (0.3, 7, 0.9), (0.05, 3, 0.8), (9.0, 1, 0.5)]
)
def test_the_number_of_seeds_is_the_smallest_with_the_power(test, difference, tests, target):
    seeds = seeds_for_power(difference, 0.3, target=target, tests=tests, test=test)
    assert power(difference, 0.3, seeds, tests=tests, test=test) >= target
    assert seeds == 2 or power(difference, 0.3, seeds - 1, tests=tests, test=test) < target


RUNS = {"a": {0: 93.1, 1: 93.3}, "b": {0: 93.8, 1: 93.9}}
GOOD = {seed: {1: 1.0, 2: 0.0, 3: 1.0} for seed in range(3)}


def compare(ours=RUNS["b"], theirs=RUNS["a"], **options):
    return compare_runs({"a": theirs, "b": ours}, **{"reference": "a", "higher_is_better": True, **options})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: power(0.3, 0.0, 5), "positive deviation.*got 0.0, 5 and 1"),
        (lambda: power(0.3, 0.3, 1), "at least 2 seeds"),
        (lambda: power(0.3, 0.3, 5, tests=0), "at least 1 test"),
        (lambda: power(0.3, 0.3, 5, test="pairs"), "test must be one of welch, paired; got 'pairs'"),
        (lambda: seeds_for_power(0.3, 0.3, target=1.1), "would need more than 10,000 seeds"),
        (lambda: seeds_for_power(1e-6, 0.3), "would need more than 10,000 seeds"),
        (lambda: seeds_for_power(0.3, -1.0), "positive deviation"),
        (lambda: holm([math.nan, 0.01]), r"p-values from 0 to 1, at most 2 of them; got \[nan, 0.01\]"),
        (lambda: holm([0.01, 1.5]), "p-values from 0 to 1"),
        (lambda: holm([0.01, 0.02], 1), "at most 1 of them"),
        (lambda: compare({}), "b needs finite values by seed"),
        (lambda: compare({0: math.nan}), "b needs .*Leave out diverged seeds"),
        (lambda: compare({7: 93.0}, test="paired"), "b and a have no seed in common"),
        (lambda: compare(test="t"), "test must be one of welch, paired; got 't'"),
        (lambda: compare(minimum=0.0), r"minimum must be a number in \(0, inf\); got 0.0"),
        (lambda: compare(margin=-1.0), "margin must be a number in .*; got -1.0"),
        (lambda: compare(perfect=math.nan), "perfect must be a number in .*; got nan"),
        (lambda: compare(seeds=1), "seeds must be a number in .*; got 1"),
        (lambda: compare(test_fraction=0.0), r"test_fraction must be a number in \(0, 1\)"),
        (lambda: compare(test_fraction=1.0), r"test_fraction must be a number in \(0, 1\)"),
        (lambda: compare({**GOOD, 2: {1: 1.0, 2: 0.0}}, GOOD), "same images for seed 2.*; got 2 and 3 images"),
        (lambda: compare({**GOOD, 2: {1: 1.0, 2: 0.0, 4: 1.0}}, GOOD), "got 3 and 3 images, 2 of them in both"),
        (lambda: compare({**GOOD, 0: {7: 1.0, 8: 0.0}}, GOOD, test="paired"), "for seed 0.*; got 2 and 3 images, 0 of"),
        (lambda: compare({0: 0.9, 1: 0.8}, GOOD), "all runs need a number per seed, or all outcomes"),
        (lambda: compare({**GOOD, 8: {1: 1.0}}, GOOD), "for seed 8, at least 2; got 1 and 1 images"),
        (lambda: compare({**GOOD, 1: {1: 1.0, 2: 0.0, 3: math.nan}}, GOOD), "b needs finite values by seed"),
        (lambda: pseudo_values(len, [1, 1, 1]), "ids must be at least 2 different ones; got 1"),
        (
            lambda: pseudo_values(lambda rows: math.inf if len(rows) == 2 else 1.0, ["a", "b"]),
            "must be finite; got inf",
        ),
        (lambda: pseudo_values(lambda rows: 1.0 if 0 in rows else math.nan, ["a", "b"]), r"1.0, and \[nan, 1.0\]"),
    ],
)
def test_bad_input_is_an_error_that_names_it(call, message):
    with pytest.raises(ValueError, match=message):
        call()
