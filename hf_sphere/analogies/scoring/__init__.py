"""Scorings of word analogies: one file per scoring, found by its name.

To add a scoring, add a file with a subclass of `Scoring` whose `name` is the name of the file. This module imports
neither torch nor the scorings until one is used.
"""

import dataclasses
import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_sphere.analogies.scoring.base import Scoring

__all__ = ["build_scoring", "scoring_class", "scoring_names"]


def scoring_names() -> list[str]:
    """Return the names of all scorings, sorted: those of the files in this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def scoring_class(name: str) -> type["Scoring"]:
    """Return the class of a scoring, one of `scoring_names()`.

    Raises:
        ValueError: If there is no such scoring; the message lists the valid names.
        TypeError: If the file of that name defines no scoring of that name.
    """
    if name not in scoring_names():
        raise ValueError(f"unknown scoring {name!r}; the scorings are: {', '.join(scoring_names())}.")
    module = importlib.import_module(f"{__name__}.{name}")
    for value in vars(module).values():
        if isinstance(value, type) and getattr(value, "name", None) == name:
            return value
    raise TypeError(f"{module.__file__} must define a subclass of Scoring with name = {name!r}.")


def build_scoring(scoring: str, **options: Any) -> "Scoring":
    """Build a scoring by its name, with its options.

    Raises:
        ValueError: If the name, an option or a value is unknown; the message lists the valid ones.
    """
    found = scoring_class(scoring)
    valid = [field.name for field in dataclasses.fields(found)]
    unknown = [option for option in options if option not in valid]
    if unknown:
        raise ValueError(
            f"scoring {scoring!r} has no option {', '.join(unknown)}; its options are: {', '.join(valid)}. "
            f"{found.remark}".rstrip()
        )
    return found(**options)
