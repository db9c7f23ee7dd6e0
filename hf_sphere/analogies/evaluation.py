"""Costs, predictions and accuracies of a model on analogy questions, and the search over configurations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.questions import Question, answers_of, choice_counts
from hf_sphere.analogies.scoring import build_scoring
from hf_sphere.analogies.scoring.base import Engine, Measurements
from hf_sphere.analogies.search import (
    PUBLISHED_GRID,
    SearchResult,
    lowest_costs,
    probability_correct,
    search_configurations,
)
from hf_sphere.utils.progress import progress_bar

Grid = Literal["full", "published", "none"]
"""Search space besides templates: all weights and aggregations, those of Ushio et al., or none."""


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
        return lowest_costs(self.costs.T).byte().argmax(dim=0)

    def correct(self, questions: Sequence[Question]) -> Tensor:
        """Whether answers are correct, (Q,), float64: 1/k for a tie of k choices with the correct one."""
        return probability_correct(self.costs.T, answers_of(questions))

    def accuracy(self, questions: Sequence[Question]) -> float:
        """Mean of `correct`."""
        return float(self.correct(questions).mean())

    def by_question(self) -> list[list[float]]:
        """Return one list of costs per question, with one cost per choice."""
        return [costs[:count] for costs, count in zip(self.costs.tolist(), self.num_choices.tolist(), strict=True)]


def score_questions(
    questions: Sequence[Question],
    language_model: LanguageModel,
    scoring: str = "perplexity",
    *,
    batch_size: int | None = None,
    progress: bool = False,
    **options: Any,
) -> Scores:
    """Answer questions with a model.

    Args:
        questions: Q questions of up to K choices each.
        language_model: The model.
        scoring: One of `scoring_names()`.
        batch_size: Sequences per batch; chosen for speed by default.
        progress: Show a progress bar.
        **options: Options of the scoring, such as `template`, `positive_aggregation`, `negative_aggregation`,
            `negative_weight`, `weight_head`, `weight_tail`, `alpha`, `pmi_aggregation`; see its class.

    Returns:
        The costs of the choices and the predictions.

    Raises:
        ValueError: If the scoring, an option or a value is unknown or not supported by the model.

    Example:
        >>> model = LanguageModel.load("bert-base-cased")  # doctest: +SKIP
        >>> questions = load_questions(config="sat")  # doctest: +SKIP
        >>> scores = score_questions(questions, model, "marginal_bias", weight_head=0.2)  # doctest: +SKIP
        >>> scores.accuracy(questions), chance_level(questions)  # doctest: +SKIP
    """
    with progress_bar(total=len(questions), unit="question", disable=not progress) as bar:
        engine = Engine(language_model, batch_size, bar.update)
        return Scores(build_scoring(scoring, **options).costs(questions, engine), choice_counts(questions))


def measure_questions(
    questions: Sequence[Question],
    language_model: LanguageModel,
    scoring: str = "perplexity",
    *,
    template: str | None = None,
    batch_size: int | None = None,
    progress: bool = False,
) -> Measurements:
    """Run a model once for all weights and aggregations of a scoring, as input of `search_configurations`.

    For arguments and errors, see `score_questions`; the default `template` is the one of the scoring.

    Example:
        >>> measurements = measure_questions(questions, language_model, "marginal_bias")  # doctest: +SKIP
    """
    built = build_scoring(**untuned_configuration(scoring, template))
    with progress_bar(total=len(questions), unit="question", disable=not progress) as bar:
        return built.measure(questions, Engine(language_model, batch_size, bar.update))


def untuned_configuration(scoring: str, template: str | None) -> dict[str, Any]:
    """Return the default configuration of a scoring with a template, None for its default template."""
    return {"scoring": scoring} if template is None else {"scoring": scoring, "template": template}


def search_templates(
    engine: Engine, questions: Sequence[Question], scoring: str, templates: Sequence[str | None], grid: Grid = "full"
) -> SearchResult:
    """Answer questions with every configuration of a scoring and each of its templates, None for its default."""
    configurations = [untuned_configuration(scoring, template) for template in templates]
    if grid == "none":
        costs = torch.stack([build_scoring(**one).costs(questions, engine).T for one in configurations], dim=1)
        return SearchResult(configurations, probability_correct(costs, answers_of(questions)).mean(dim=-1))
    axes = PUBLISHED_GRID if grid == "published" else None
    measured = (build_scoring(**configuration).measure(questions, engine) for configuration in configurations)
    results = [search_configurations(measurements, grid=axes) for measurements in measured]
    every = [configuration for result in results for configuration in result.configurations]
    return SearchResult(every, torch.cat([result.accuracy for result in results]))
