import math
import re

import numpy as np
import pytest

from hf_sphere.utils.checks import check_choice, check_number


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
