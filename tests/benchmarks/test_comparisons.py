import json
import statistics

import pytest
from reproduction.claims import Claim
from reproduction.comparisons import Comparison, compare, correct, relevant
from reproduction.entries import Entry
from reproduction.rules import check_rules, value_beyond
from reproduction.tables import Table

from hf_sphere.comparison import power, seeds_for_power
from hf_sphere.comparison.significance import difference_test


def pair(differences: list[float], reference: float = 0.9, metric: str = "eval_accuracy") -> Comparison:
    """Runs with these differences in points from a reference with a constant value."""
    theirs = dict.fromkeys(range(len(differences)), reference)
    ours = {seed: reference + difference / 100 for seed, difference in enumerate(differences)}
    found = compare("table", metric, "a", ours, "b", theirs, test="paired")
    correct([found])
    return found


def around(mean: float, spread: float = 0.02, count: int = 5) -> list[float]:
    """Differences with this mean."""
    return [mean + spread * (seed - (count - 1) / 2) for seed in range(count)]


OURS, THEIRS = {0: 0.911, 1: 0.915, 2: 0.909, 7: 0.91}, {0: 0.901, 1: 0.902, 2: 0.897, 3: 0.95, 4: 0.91}


@pytest.mark.parametrize("test", ["welch", "paired"])
def test_numbers_are_those_of_the_planned_test(test):
    found = compare("table", "eval_accuracy", "a", OURS, "b", THEIRS, test=test)
    correct([found], 4)
    groups = [[100 * v for seed, v in run.items() if test == "welch" or seed < 3] for run in (OURS, THEIRS)]
    result, rate = difference_test(*groups, test), 100 - statistics.mean(groups[1])
    assert found.mean == pytest.approx(statistics.mean(groups[0]) - statistics.mean(groups[1]))
    assert (found.p_value(test), found.corrected[test]) == pytest.approx((result.p_value, min(1, 4 * result.p_value)))
    assert found.equivalence_p_value == pytest.approx(result.p_equivalence(min(0.1 * rate, 0.5)))
    deviation = statistics.stdev([1.0, 1.3, 1.2])
    if test == "paired":
        assert found.power == pytest.approx(power(0.3, deviation, 3, tests=4, test=test))


def test_both_tests_are_shown_and_recorded_and_the_planned_one_first():
    found = [compare("t", "eval_accuracy", "a", OURS, "b", THEIRS, test=test) for test in ("welch", "paired")]
    for row in found:
        correct([row])
    records = [row.record() for row in found]
    assert records[0]["p_value_holm"] == records[1]["other_p_value_holm"] != records[0]["other_p_value_holm"]
    welch, paired = (f"{record['p_value_holm']:.2g}" for record in records)
    assert found[0].show_p_values() == f"Welch {welch} (paired {paired})"
    assert found[1].show_p_values() == f"paired {paired} (Welch {welch})"


def test_a_verdict_names_the_seeds_that_would_decide_or_the_margin():
    found = pair(around(0.5, spread=1.0))
    deviation = statistics.stdev(around(0.5, spread=1.0))
    seeds = seeds_for_power(0.3, deviation, test="paired")
    assert found.show_verdict() == f"not decided ({seeds} seeds would decide 0.30)"
    assert found.seeds_to_decide(0.001) is None
    assert pair(around(0.5, spread=90.0)).show_verdict() == "not decided (more than 1,000 seeds would decide 0.30)"
    assert pair(around(0.31)).show_verdict() == "better"
    assert pair(around(0.0), 0.98).show_verdict() == "equivalent (within 0.20)"


@pytest.mark.parametrize(
    ("error_rate", "better", "equivalent"), [(2.0, 0.1, 0.2), (5.0, 0.25, 0.5), (6.0, 0.3, 0.5), (40.0, 0.3, 0.5)]
)
def test_margins_are_a_share_of_the_error_rate_and_bounded(error_rate, better, equivalent):
    assert relevant("minimum", error_rate) == pytest.approx(better)
    assert relevant("margin", error_rate) == pytest.approx(equivalent)


@pytest.mark.parametrize(
    ("differences", "reference", "verdict"),
    [
        (around(0.31), 0.90, "better"),
        (around(-0.31), 0.90, "worse"),
        (around(0.29), 0.90, "equivalent"),  # significant, but less than 0.3 points
        (around(0.11), 0.98, "better"),  # 5 % of 2 % are 0.1 points
        (around(0.09), 0.98, "equivalent"),
        (around(0.0), 0.90, "equivalent"),
        (around(0.5, spread=1.0), 0.90, "not decided"),
        (around(0.15, spread=0.2), 0.98, "not decided"),
        ([5.0], 0.90, "not tested"),
        ([5.0, 5.0, 5.0], 0.90, "not tested"),  # no deviation, so no test
    ],
)
def test_verdict(differences, reference, verdict):
    assert pair(differences, reference).verdict == verdict


def test_verdict_uses_the_corrected_p_value():
    found = pair(around(0.4, spread=0.15))
    assert found.p_value("paired") < 0.05
    assert found.verdict == "better"
    found.corrected["paired"] = 0.06
    assert found.verdict != "better"


@pytest.mark.parametrize("metric", ["scores/eval_calibration_error_equal_mass_l2", "x_fpr_y"])
def test_a_higher_error_is_worse_and_has_its_own_value_as_error_rate(metric):
    assert pair(around(1.0), 0.05, metric).verdict == "worse"
    assert pair(around(1.0), 0.05, metric).error_rate == pytest.approx(5.0)
    assert pair(around(1.0), 0.95, "scores/eval_recall_at_1").error_rate == pytest.approx(5.0)


def test_a_metric_without_error_rate_is_only_higher_or_lower_and_needs_a_minimum_effect():
    for number, verdict in ((0.5, "higher"), (0.7, "lower"), (0.609, "not decided")):
        found = compare("table", "projections/mass", "a", {0: 0.61, 1: 0.62, 2: 0.6}, number, number)
        correct([found])
        assert found.verdict == verdict
    found = compare("table", "projections/mass", "a", {0: 0.5, 1: 0.6, 2: 0.4}, 0.45, 0.45)
    correct([found])
    seeds = seeds_for_power(0.2, 0.1, test="paired")
    assert found.show_verdict(0.2) == f"not decided ({seeds} seeds would decide 0.20)"
    assert found.show_verdict() == "not decided"


def test_only_common_seeds_are_paired():
    found = compare("table", "x", "a", {0: 1.0, 1: 2.0, 2: 4.0}, "b", {1: 1.0, 2: 2.0, 3: 9.0}, test="paired")
    assert (found.seeds, found.mean, found.show().partition("seeds")[2]) == ([1, 2], 1.5, " 1, 2")


def test_the_record_has_the_values_of_each_seed_and_is_valid_json():
    record = pair([1.0, 2.0]).record()
    assert (record["values"], record["reference_values"]) == ({"0": 91.0, "1": 92.0}, {"0": 90.0, "1": 90.0})
    assert json.loads(json.dumps(record, allow_nan=False)) == record


PLAIN, SPHERIZED = "mnist-lenet5-plain", "mnist-lenet5-spherized"
USUAL = {"priority": 1, "task": "classification", "minutes": 1.0, "seeds": 3}
DIFFERS = ["head", "head_kwargs", "momentum", "nesterov"]


def entry(name: str, *configs: str, **more) -> Entry:
    configs = [f"spherization/{config}" for config in configs or (PLAIN, SPHERIZED)]
    return Entry(**{"entry": name, "configs": configs, "overrides": {"validation_fraction": 0.1}, **USUAL, **more})


def table(row: str = f"{SPHERIZED} - {PLAIN}", differs=DIFFERS, metric="eval_accuracy", name="t") -> Table:
    return Table(name, "README.md", [row], {"accuracy %": metric}, differs=differs)


def problems(source, *tables: Table, claims=()) -> list[str]:
    return check_rules(tables or [table()], claims, source)[0]


def tuning(*rates: float, name: str = "tune", **more) -> Entry:
    return entry(name, label="tuning", grid={"learning_rate": list(rates)}, seeds=1, **more)


def tuned(rates: tuple[float, ...], best: float, **more) -> list[dict]:
    """A tuning of both runs with this best rate."""
    groups = [f"{config}-tuning-learning_rate{rate}" for config in (PLAIN, SPHERIZED) for rate in rates]
    scores = [0.9 - abs(rate - best) / 100 for _ in range(2) for rate in rates]
    return {name: {0: {"validation_accuracy": score}} for name, score in zip(groups, scores, strict=True)}


def test_a_comparison_that_keeps_the_rules_has_no_problem(finished):
    assert problems(finished([entry("e")])) == []


def test_arms_have_the_same_number_of_settings(finished):
    entries = [tuning(0.1, 0.2, 0.3), entry("a", PLAIN), entry("b", SPHERIZED, tuned_by="tune")]
    (found,) = problems(finished(entries))
    assert "entry 'b': 3 settings against 1 of mnist-lenet5-plain; tune both with equally many." in found
    assert problems(finished([tuning(0.1, 0.2, 0.3), entry("e", tuned_by="tune")])) == []


@pytest.mark.parametrize(("best", "add"), [(0.1, "add 0.05"), (0.4, "add 0.8"), (0.2, None)])
def test_the_best_value_is_inside_its_grid(finished, best, add):
    rates = (0.1, 0.2, 0.4)
    entries = [tuning(*rates), entry("e", tuned_by="tune")]
    found = problems(finished(entries, tuned(rates, best)))
    assert len(found) == (2 if add else 0)
    text = f"entry 'tune': learning_rate {best:g} of spherization/{PLAIN} is the end of its grid; {add}."
    assert add is None or found[0].startswith(text)


def test_settings_are_selected_on_validation_images(finished):
    entries = [tuning(0.1, 0.2, 0.4), entry("e", tuned_by="tune", selection_metric="eval_accuracy")]
    (found,) = problems(finished(entries))
    assert "entry 'e': selection_metric eval_accuracy is not measured on validation images" in found


@pytest.mark.parametrize(
    ("overrides", "test", "metric", "count"),
    [
        ({}, "welch", "eval_accuracy", 1),
        ({}, "welch", "eval_accuracy_last_quarter", 0),
        ({}, "paired", "eval_accuracy", 0),  # planned before this rule
        ({"validation_fraction": 0.1}, "welch", "eval_accuracy", 0),
    ],
)
def test_runs_without_validation_are_compared_by_their_last_epochs(finished, overrides, test, metric, count):
    source = finished([entry("e", overrides=overrides, test=test)])
    found = problems(source, table(metric=metric))
    assert ["must be eval_accuracy_last_quarter" in text for text in found] == [True] * count


def test_a_table_has_one_planned_test(finished):
    entries = [entry("old", test="paired"), entry("new", SPHERIZED, label="new")]
    row = table()
    row.rows.append(f"{SPHERIZED}-new - {PLAIN}")
    (found,) = problems(finished(entries), row)
    assert "entry 'new': test welch in the table 't' of another test." in found


def test_a_claim_has_at_least_two_seeds(finished):
    claim = Claim("spherization", "x", f"{SPHERIZED} - {PLAIN}")
    found = check_rules([], [claim], finished([entry("e", seeds=1)]))[0]
    assert [text.partition(" has one seed")[0] for text in found] == [f"entry 'e': {SPHERIZED}", f"entry 'e': {PLAIN}"]


def test_the_table_names_the_options_in_which_runs_differ(finished):
    entries = [entry("a", PLAIN), entry("b", SPHERIZED, overrides={"validation_fraction": 0.1, "weight_decay": 0.5})]
    (found,) = problems(finished(entries))
    assert f"entry 'b': {SPHERIZED} differs from {PLAIN} in weight_decay; name them in the key differs" in found
    assert problems(finished(entries), table(differs=[*DIFFERS, "weight_decay"])) == []


def test_an_exception_has_a_reason_and_is_listed(finished):
    entries = [tuning(0.1, 0.2, 0.3), entry("a", PLAIN)]
    entries.append(entry("b", SPHERIZED, tuned_by="tune", exceptions={"settings": "3 against 1"}))
    assert check_rules([table()], [], finished(entries)) == ([], ["b: settings: 3 against 1"])


@pytest.mark.parametrize(
    ("exceptions", "message"),
    [
        ({"setting": "x"}, "entry 'e': there is no rule 'setting'; they are settings, grid"),
        ({"settings": "x"}, "entry 'e': the exception 'settings' is not needed; remove it."),
    ],
)
def test_an_exception_that_means_nothing_is_a_problem(finished, exceptions, message):
    (found,) = problems(finished([entry("e", exceptions=exceptions)]))
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("grid", "value", "expected"),
    [
        ([0.1, 0.2, 0.4], 0.4, 0.8),  # by its ratio
        ([1, 4, 16, 128], 1, 0.25),
        ([0.8, 0.9, 0.95, 0.98], 0.98, 0.992),  # towards 1
        ([0.4, 0.5, 0.6], 0.4, 0.3),  # by its step
        ([2, 3, 4], 4, 5),
        ([0.0, 0.1, 0.2], 0.0, None),  # the end of the range
        ([0.1, 0.2, 0.4], 0.2, None),
        ([0.1], 0.1, None),
        (["softmax", "cosine"], "softmax", None),
    ],
)
def test_the_value_to_add_continues_the_grid(grid, value, expected):
    assert value_beyond(grid, value) == expected
