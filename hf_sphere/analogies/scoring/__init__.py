"""Scorings of word analogies by name. This module imports neither torch nor the scorings until one is used."""

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
    """Return the class of a scoring, one of `scoring_names()`."""
    if name not in MODULES:
        raise ValueError(f"unknown scoring {name!r}; the scorings are: {', '.join(scoring_names())}.")
    module = importlib.import_module(MODULES[name])
    return next(value for value in vars(module).values() if getattr(value, "name", None) == name)


def build_scoring(scoring: str, **options: Any) -> "Scoring":
    """Build a scoring by its name, with the fields of its class as options."""
    return scoring_class(scoring)(**options)
