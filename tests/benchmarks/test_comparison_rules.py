import pytest
from reproduction.claims import Claim
from reproduction.entries import Entry
from reproduction.rules import check_rules, value_beyond
from reproduction.tables import Table

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
