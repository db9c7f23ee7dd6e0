"""Word analogies answered by language models: any masked, causal or embedding model of transformers.

Everything is imported when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_sphere.analogies.language_model import LanguageModel
    from hf_sphere.analogies.prompts import NEGATIVE_PERMUTATIONS, POSITIVE_PERMUTATIONS, TEMPLATES
    from hf_sphere.analogies.questions import Question, chance_level, load_questions, make_questions
    from hf_sphere.analogies.score_cache import ScoreCache
    from hf_sphere.analogies.scoring import SCORINGS, Scores, measure_questions, score_questions
    from hf_sphere.analogies.search import (
        SearchResult,
        Selection,
        join_results,
        search_configurations,
        select_configuration,
    )
    from hf_sphere.analogies.statistics import SelectionNoise, bootstrap_interval, selection_noise

_PLACES = {
    "LanguageModel": "language_model",
    "NEGATIVE_PERMUTATIONS": "prompts",
    "POSITIVE_PERMUTATIONS": "prompts",
    "TEMPLATES": "prompts",
    "Question": "questions",
    "chance_level": "questions",
    "load_questions": "questions",
    "make_questions": "questions",
    "ScoreCache": "score_cache",
    "SCORINGS": "scoring",
    "Scores": "scoring",
    "measure_questions": "scoring",
    "score_questions": "scoring",
    "SearchResult": "search",
    "Selection": "search",
    "join_results": "search",
    "search_configurations": "search",
    "select_configuration": "search",
    "SelectionNoise": "statistics",
    "bootstrap_interval": "statistics",
    "selection_noise": "statistics",
}

__all__ = [
    "NEGATIVE_PERMUTATIONS",
    "POSITIVE_PERMUTATIONS",
    "SCORINGS",
    "TEMPLATES",
    "LanguageModel",
    "Question",
    "ScoreCache",
    "Scores",
    "SearchResult",
    "Selection",
    "SelectionNoise",
    "bootstrap_interval",
    "chance_level",
    "join_results",
    "load_questions",
    "make_questions",
    "measure_questions",
    "score_questions",
    "search_configurations",
    "select_configuration",
    "selection_noise",
]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
