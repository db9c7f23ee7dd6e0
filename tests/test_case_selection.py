"""Do the cases that run by default contain every setting, and every function?"""

from types import SimpleNamespace

import pytest
import torch
from case_selection import choose, covering, settings_of, some_rows
from hypothesis import given, strategies as st


@given(st.lists(st.sets(st.tuples(st.sampled_from("abc"), st.integers(0, 5))), min_size=1, max_size=30))
def test_every_setting_of_all_cases_occurs_in_the_chosen_ones(cases):
    chosen = covering(cases)
    assert set().union(*(cases[index] for index in chosen)) == set().union(*cases)
    assert 1 <= len(chosen) <= max(1, len(set().union(*cases)))
    assert len(set(chosen)) == len(chosen)


def test_values_that_are_no_settings_need_one_case_and_one_can_show_values_of_several_settings():
    assert covering([set(), set(), set()]) == [0]
    cases = [{("head", "vmf")}, {("head", "vmf"), ("dtype", 1)}, {("head", "cosine"), ("dtype", 2)}]
    assert covering(cases) == [1, 2]


def case(function, index: int, *marks: pytest.Mark, **values: object) -> SimpleNamespace:
    return SimpleNamespace(
        nodeid=f"test.py::{function.__name__}[{index}]",
        function=function,
        callspec=SimpleNamespace(params=values),
        iter_markers=lambda name: [mark for mark in marks if mark.name == name],
    )


def test_dtypes_classes_functions_and_names_are_settings_but_sizes_and_runs_are_not():
    values = {"dtype": torch.float16, "kind": dict, "check": max, "head": "vmf", "size": 3, "run": "mnist-vmf"}
    assert {name for name, _ in settings_of(case(max, 0, **values))} == {"dtype", "kind", "check", "head"}


def test_a_name_stands_for_the_settings_that_its_mark_returns():
    mark = pytest.mark.settings(run=lambda run: {"head": run.split("-")[1]}).mark
    assert settings_of(case(max, 0, mark, run="mnist-vmf")) == {("run.head", "vmf")}


@pytest.mark.parametrize(("size", "marks", "chosen"), [(1, [], [0, 1, 2]), ("vmf", [], [0]), (1, ["size"], [0])])
def test_every_row_of_a_table_runs_unless_it_has_a_setting_or_a_mark_says_otherwise(size, marks, chosen):
    marks = [pytest.mark.parametrize(("size", "expected"), []).mark, *(some_rows(name).mark for name in marks)]
    rows = [case(max, number, *marks, size=size, expected=number) for number in range(300, 303)]
    assert covering([settings_of(row) for row in rows]) == chosen


def a_comparison(size):
    assert size


def a_table_of_bad_input(size):
    with pytest.raises(ValueError, match="size"):
        raise ValueError("size")


def refusal(size):
    return str(size)


def a_table_of_refused_words(size):
    assert refusal(size)


def a_table_of_messages(message):
    assert message


def test_a_table_of_bad_input_stays_whole_and_other_functions_keep_one_case_per_setting():
    functions = (a_comparison, a_table_of_bad_input, a_table_of_refused_words)
    items = [case(function, size, size=size) for function in functions for size in range(3)]
    items += [case(a_table_of_messages, number, message=str(number)) for number in range(3)]
    kept, left_out = choose(items)
    assert [item.nodeid for item in kept] == ["test.py::a_comparison[0]", *(item.nodeid for item in items[3:])]
    assert left_out == items[1:3]
