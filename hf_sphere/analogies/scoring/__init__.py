"""Scorings of word analogies by name. This module imports neither torch nor the scorings until one is used."""

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_sphere.analogies.scoring.base import Scoring

__all__ = ["build_scoring", "scoring_class", "scoring_names"]

MODULES = {
    **dict.fromkeys(("hypothesis_bias", "marginal_bias", "perplexity", "pmi"), f"{__name__}.sentences"),
    "embedding_similarity": f"{__name__}.embeddings",
}
"""Modules of the scorings by name. To add a scoring, add a subclass of `Scoring` that sets `name`, and a row here."""


def scoring_names() -> list[str]:
    """Return the names of all scorings, sorted.

    Example:
        >>> scoring_names()
        ['embedding_similarity', 'hypothesis_bias', 'marginal_bias', 'perplexity', 'pmi']
    """
    return sorted(MODULES)


def scoring_class(name: str) -> type["Scoring"]:
    """Return the class of a scoring, one of `scoring_names()`.

    Raises:
        ValueError: If there is no such scoring; the message lists the valid names.
    """
    if name not in MODULES:
        raise ValueError(f"unknown scoring {name!r}; the scorings are: {', '.join(scoring_names())}.")
    module = importlib.import_module(MODULES[name])
    return next(value for value in vars(module).values() if getattr(value, "name", None) == name)


def build_scoring(scoring: str, **options: Any) -> "Scoring":
    """Build a scoring by its name, with its options.

    Raises:
        ValueError: If the name, an option or a value is unknown; the message lists the valid ones.
    """
    cls = scoring_class(scoring)
    valid = [field.name for field in dataclasses.fields(cls)]
    if unknown := [option for option in options if option not in valid]:
        names, allowed = ", ".join(unknown), ", ".join(valid)
        raise ValueError(f"scoring {scoring!r} has no option {names}; its options are: {allowed}.")
    return cls(**options)
