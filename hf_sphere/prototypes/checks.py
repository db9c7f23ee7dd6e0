"""Checks of numbers that several parts of a placement share."""

import math
import operator
from typing import Any


def check_integer(name: str, value: Any, least: int) -> int:
    """Return a whole number of at least `least` as int (numpy's integers included), or say what is wrong with it."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}; got {value!r}.")
    return number


def check_positive(name: str, value: float) -> None:
    """Refuse a number that is not finite and above 0."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be finite and positive; got {value}.")
