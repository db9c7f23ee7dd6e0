import csv
import io
import math
import re

import numpy as np
import pytest

from hf_sphere.utils.checks import check_choice, check_number
from hf_sphere.utils.texts import printable, write_csv

FORMULAS = ["=1+1", "+A1", "-A1", "@sum", "\t=1", "\n=1", " =1", "=cmd|' /C calc'!A0", "\uff1d1", "-", "--1"]
OTHERS = ["cat", "a=b", "1-2", "", "photos/=1.jpg", -0.5, "-0.5", "+1", "-1e-05", "-inf", "nan", 3, "ä ö", "a\nb", 1e-7]


def written(value: object) -> str:
    file = io.StringIO()
    write_csv([{"file": value, "n": 1}], file)
    return next(csv.DictReader(file.getvalue().splitlines(keepends=True)))["file"]


@pytest.mark.parametrize("cell", FORMULAS)
def test_a_cell_that_begins_like_a_formula_is_a_text(cell):
    assert written(cell) == "'" + printable(cell)


@pytest.mark.parametrize("cell", OTHERS)
def test_numbers_and_other_texts_are_unchanged(cell):
    assert written(cell) == str(cell)


def test_control_characters_are_shown_as_escape_sequences_and_letters_of_all_languages_as_they_are():
    for text in ("a\x1b[31mb", "a\rb", "\x9b", "\u202e", "\udc80"):
        assert printable(text) == written(text) == ascii(text)[1:-1]
    text = "äß 中文 हिन्दी עברית \t\n 👩\u200d👩\u200d👧"
    assert printable(text) == text


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("[0, 1)", (0, 0.5, np.float32(0.25)), (-1e-9, 1, math.nan, "0.5", None, True)),
        ("(0, 1]", (1e-9, 1.0), (0, -0.0, 1.1)),
        ("(0, inf)", (1e-300, 5), (0.0, math.inf, math.nan, -1)),
    ],
)
def test_only_numbers_in_an_interval_are_returned(interval, inside, outside):
    assert all(check_number("rate", value, interval) is value for value in inside)
    for value in outside:
        with pytest.raises(ValueError, match=re.escape(f"rate must be a number in {interval}; got {value!r}.")):
            check_number("rate", value, interval)


def test_only_choices_are_returned():
    assert check_choice("reduction", "sum", ("mean", "sum")) == "sum"
    with pytest.raises(ValueError, match=r"^reduction must be one of mean, sum; got None\.$"):
        check_choice("reduction", None, ("mean", "sum"))
