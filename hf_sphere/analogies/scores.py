"""Costs of the choices of analogy questions, and the resulting predictions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.questions import Question, answers_of, check_questions, choice_counts
from hf_sphere.analogies.score_cache import ScoreCache
from hf_sphere.analogies.scoring import build_scoring, scoring_class, scoring_names
from hf_sphere.analogies.scoring.base import Engine, Measurements, PermutedScoring, Scoring, SentenceScoring


@dataclass(frozen=True)
class Scores:
    """Costs of the choices of questions.

    Attributes:
        costs: (Q, K), float64, lower is better; infinite for choices that a question does not have.
        num_choices: (Q,), number of choices per question.
    """

    costs: Tensor
    num_choices: Tensor

    @property
    def predictions(self) -> Tensor:
        """Index of the choice with the lowest cost, the first one on a tie, (Q,), int64."""
        return self.costs.argmin(dim=1)

    def accuracy(self, questions: Sequence[Question]) -> float:
        """Share of correct predictions."""
        return float((self.predictions == answers_of(questions)).double().mean())

    def by_question(self) -> list[list[float]]:
        """Return one list of costs per question, with one cost per choice."""
        return [costs[:count] for costs, count in zip(self.costs.tolist(), self.num_choices.tolist(), strict=True)]


def score_questions(
    questions: Sequence[Question],
    language_model: LanguageModel,
    scoring: str = "perplexity",
    *,
    batch_size: int | None = None,
    cache: ScoreCache | None = None,
    progress: bool = False,
    **options: Any,
) -> Scores:
    """Answer questions with a model.

    Args:
        questions: Q questions of up to K choices each.
        language_model: The model.
        scoring: One of `scoring_names()`.
        batch_size: Sequences per batch; chosen for speed by default.
        cache: Cache of perplexities, for scorings of sentences.
        progress: Show a progress bar.
        **options: Options of the scoring, such as `template`, `positive_aggregation`, `negative_aggregation`,
            `negative_weight`, `weight_head`, `weight_tail`, `alpha`, `pmi_aggregation`; see its class.

    Returns:
        The costs of the choices and the predictions.

    Raises:
        ValueError: If a question is invalid, or the scoring, an option or a value is unknown or not supported by the
            model.

    Example:
        >>> model = LanguageModel.load("bert-base-cased")
        >>> questions = load_questions(config="sat")
        >>> scores = score_questions(questions, model, "marginal_bias", weight_head=0.2, weight_tail=0.2)
        >>> scores.accuracy(questions), chance_level(questions)
    """
    built = build_scoring(scoring, **options)
    _check(built, questions, cache)
    with tqdm(total=len(questions), unit="question", disable=not progress) as bar:
        costs = built.costs(questions, Engine(language_model, batch_size, cache, bar.update))
    return Scores(costs, choice_counts(questions))


def measure_questions(
    questions: Sequence[Question],
    language_model: LanguageModel,
    scoring: str = "perplexity",
    *,
    template: str | None = None,
    batch_size: int | None = None,
    cache: ScoreCache | None = None,
    progress: bool = False,
) -> Measurements:
    """Run a model once for all weights and aggregations of a scoring, as input of `search_configurations`.

    Args:
        questions: Q questions of up to K choices each.
        language_model: The model.
        scoring: A scoring that has aggregations: any but `relation_embedding`.
        template: Template of the scoring; None for its default.
        batch_size: See `score_questions`.
        cache: See `score_questions`.
        progress: See `score_questions`.

    Raises:
        ValueError: See `score_questions`; also if the scoring has no aggregations.
    """
    built = build_scoring(scoring, **({} if template is None else {"template": template}))
    if not isinstance(built, PermutedScoring):
        names = (name for name in scoring_names() if issubclass(scoring_class(name), PermutedScoring))
        raise ValueError(
            f"scoring {scoring!r} has no aggregations to search; scorings with aggregations: {', '.join(names)}."
        )
    _check(built, questions, cache)
    with tqdm(total=len(questions), unit="question", disable=not progress) as bar:
        return built.measure(questions, Engine(language_model, batch_size, cache, bar.update))


def _check(scoring: Scoring, questions: Sequence[Question], cache: ScoreCache | None) -> None:
    check_questions(questions)
    if cache is not None and not isinstance(scoring, SentenceScoring):
        raise ValueError(f"scoring {scoring.name!r} has no perplexities to cache; omit `cache`.")
