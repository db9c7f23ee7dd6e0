"""Scorings of word analogies: one file each, found by name. A new one is a new file with a subclass of `Scoring`."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_sphere.analogies.questions import Question, answers_of, check_questions, choice_counts
from hf_sphere.analogies.scoring.base import (
    NEGATIVE_AGGREGATIONS,
    POSITIVE_AGGREGATIONS,
    Measurements,
    PermutedScoring,
    Scoring,
)
from hf_sphere.analogies.scoring.sentences import SentenceScoring

if TYPE_CHECKING:
    from hf_sphere.analogies.language_model import LanguageModel
    from hf_sphere.analogies.score_cache import ScoreCache

__all__ = [
    "NEGATIVE_AGGREGATIONS",
    "POSITIVE_AGGREGATIONS",
    "SCORINGS",
    "Measurements",
    "PermutedScoring",
    "Scores",
    "Scoring",
    "build_scoring",
    "measure_questions",
    "score_questions",
]

for _module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
    importlib.import_module(_module.name)


def _named(parent: type[Scoring]) -> dict[str, type[Scoring]]:
    found = {parent.name: parent} if vars(parent).get("name") else {}
    for child in parent.__subclasses__():
        found |= _named(child)
    return found


SCORINGS: dict[str, type[Scoring]] = dict(sorted(_named(Scoring).items()))  # type: ignore[type-abstract]
"""Scorings by name."""


@dataclass(frozen=True)
class Scores:
    """Costs of the choices of questions.

    Attributes:
        costs: (Q, K), float64, the lowest wins; infinite for the choices that a question does not have.
        num_choices: (Q,), how many it has.
    """

    costs: Tensor
    num_choices: Tensor

    @property
    def predictions(self) -> Tensor:
        """Number of the choice of the lowest cost, the first one on a tie, (Q,), int64."""
        return self.costs.argmin(dim=1)

    def accuracy(self, questions: Sequence[Question]) -> float:
        """Share of the questions that are answered rightly."""
        return float((self.predictions == answers_of(questions)).double().mean())

    def by_question(self) -> list[list[float]]:
        """Costs as a list a question, of as many as it has choices."""
        return [costs[:count] for costs, count in zip(self.costs.tolist(), self.num_choices.tolist(), strict=True)]


def build_scoring(name: str, **options: Any) -> Scoring:
    """Build a scoring by its name.

    Args:
        name: A key of `SCORINGS`.
        **options: Options of the scoring.

    Raises:
        ValueError: If the name, an option or a value is unknown; the message lists the valid ones.
    """
    if name not in SCORINGS:
        raise ValueError(f"unknown scoring {name!r}; the scorings are: {', '.join(SCORINGS)}.")
    valid = [field.name for field in dataclasses.fields(SCORINGS[name])]
    unknown = [option for option in options if option not in valid]
    if unknown:
        remark = f" {SCORINGS[name].remark}" if SCORINGS[name].remark else ""
        raise ValueError(
            f"scoring {name!r} has no option {', '.join(unknown)}; its options are: {', '.join(valid)}.{remark}"
        )
    return SCORINGS[name](**options)


def score_questions(
    questions: Sequence[Question],
    language_model: "LanguageModel",
    scoring: str = "perplexity",
    *,
    batch_size: int | None = None,
    cache: "ScoreCache | None" = None,
    progress: bool = False,
    **options: Any,
) -> Scores:
    """Answer questions by a model.

    Args:
        questions: Q questions of up to K choices each.
        language_model: The model.
        scoring: A key of `SCORINGS`.
        batch_size: Sentences at a time; by default as many as is fast.
        cache: Where perplexities are kept, for scorings of sentences.
        progress: Whether to show a bar.
        **options: Options of the scoring, such as `template`, `positive_aggregation`, `negative_aggregation`,
            `negative_weight`, `weight_head`, `weight_tail`, `alpha`, `pmi_aggregation`; its class describes them.

    Returns:
        The costs of the choices, and with them the predictions.

    Raises:
        ValueError: If a question is not sound, or the scoring, an option or a value is unknown or does not go with the
            model.

    Example:
        >>> model = LanguageModel.load("bert-base-cased")
        >>> questions = load_questions(config="sat")
        >>> scores = score_questions(questions, model, "marginal_bias", weight_head=0.2, weight_tail=0.2)
        >>> scores.accuracy(questions), chance_level(questions)
    """
    built = build_scoring(scoring, **options)
    check_questions(questions)
    costs = built.costs(questions, language_model, **_engine(built, batch_size, cache, progress))
    return Scores(costs, choice_counts(questions))


def measure_questions(
    questions: Sequence[Question],
    language_model: "LanguageModel",
    scoring: str = "perplexity",
    *,
    template: str | None = None,
    batch_size: int | None = None,
    cache: "ScoreCache | None" = None,
    progress: bool = False,
) -> Measurements:
    """Measure once what all weights and aggregations of a scoring are computed from, for `search_configurations`.

    Args:
        questions: Q questions of up to K choices each.
        language_model: The model.
        scoring: A key of `SCORINGS` that has aggregations: all but `relation_embedding`.
        template: Of the scoring; None for its default.
        batch_size: See `score_questions`.
        cache: See `score_questions`.
        progress: See `score_questions`.

    Raises:
        ValueError: As `score_questions` does; and if the scoring has no aggregations.
    """
    built = build_scoring(scoring, **({} if template is None else {"template": template}))
    if not isinstance(built, PermutedScoring):
        names = (name for name, found in SCORINGS.items() if issubclass(found, PermutedScoring))
        raise ValueError(f"scoring {scoring!r} has no aggregations to search; those that have: {', '.join(names)}.")
    check_questions(questions)
    return built.measure(questions, language_model, **_engine(built, batch_size, cache, progress))


def _engine(scoring: Scoring, batch_size: int | None, cache: "ScoreCache | None", progress: bool) -> dict[str, Any]:
    """Arguments of the model's engine; only those that the scoring's takes."""
    arguments = {"batch_size": batch_size, "progress": progress}
    if isinstance(scoring, SentenceScoring):
        return arguments | {"cache": cache}
    if cache is not None:
        raise ValueError(f"scoring {scoring.name!r} has no perplexities to keep in a cache; leave `cache` out.")
    return arguments
