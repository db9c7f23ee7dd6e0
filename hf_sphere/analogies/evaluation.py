"""Costs, predictions and accuracies of a model on analogy questions, and the search over configurations."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.questions import Question, answers_of, choice_counts
from hf_sphere.analogies.scoring import base, build_scoring
from hf_sphere.analogies.scoring.base import NUM_POSITIVE, Engine, Measurements, aggregate
from hf_sphere.utils.progress import progress_bar

NEGATIVE_WEIGHTS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

PUBLISHED_GRID = {"negative_aggregation": base.NEGATIVE_AGGREGATIONS[:15]}
"""Axis in which the grid of Ushio et al., ACL 2021, differs: only the first 12 of the 16 negative permutations."""

TIE = 1e-6
"""Difference of costs, relative to 1 + |cost|, up to which choices tie: rounding errors of a model in float32."""

ROUNDING = 1e-9  # of a mean of values 1/k, which depends on their order


def lowest_costs(costs: Tensor) -> Tensor:
    """Return whether choices have the lowest cost of their question, (K, ...), boolean; several if they tie."""
    lowest = costs.amin(dim=0)
    return costs <= lowest + TIE * (1 + lowest.abs())


def probability_correct(costs: Tensor, answers: Tensor) -> Tensor:
    """Return the probability that answers (Q,) are correct if ties are broken at random, (K, ..., Q) -> (..., Q)."""
    lowest = lowest_costs(costs)
    correct = lowest.take_along_dim(answers.expand(1, *lowest.shape[1:]), dim=0)[0]
    return correct.double() / lowest.sum(dim=0, dtype=torch.int16)


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
        TypeError: If the scoring does not have an option.
        ValueError: If the scoring or a value is unknown or not supported by the model.

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
    built = build_scoring(scoring, **({} if template is None else {"template": template}))
    with progress_bar(total=len(questions), unit="question", disable=not progress) as bar:
        return built.measure(questions, Engine(language_model, batch_size, bar.update))


@dataclass(frozen=True)
class SearchResult:
    """Accuracies of C configurations.

    Attributes:
        configurations: Their options, as arguments of `score_questions`.
        accuracy: (C,), float64; a tie of k choices counts 1/k if one of them is correct.
    """

    configurations: Sequence[dict[str, Any]] = field(repr=False)
    accuracy: Tensor

    def __len__(self) -> int:
        return len(self.configurations)


@dataclass(frozen=True)
class Selection:
    """The configuration with the highest accuracy on validation questions.

    Attributes:
        configuration: Its options, as arguments of `score_questions`.
        accuracy: Its accuracy on the validation questions, which is biased upwards.
        tied: Number of configurations with this accuracy; the first one is selected.
    """

    configuration: dict[str, Any]
    accuracy: float
    tied: int


def search_configurations(
    measurements: Measurements, *, grid: Mapping[str, Sequence[Any]] | None = None
) -> SearchResult:
    """Answer questions with every configuration of a grid.

    The axes are `negative_weight`, the options of the scoring (`weight_head` and `weight_tail`, or `alpha` and
    `pmi_aggregation`), `positive_aggregation` and `negative_aggregation`. The configurations are their product in this
    order; the last axis varies fastest. Each axis starts with its simplest value, so that the simplest of equally
    accurate configurations comes first. Without a negative weight the negative aggregation makes no difference; such
    configurations are kept, as in the published grid.

    Args:
        measurements: Measurements of questions with answers by `measure_questions`.
        grid: Values of axes that differ from the default; `PUBLISHED_GRID` is the published one: 24,750 configurations
            of `marginal_bias`; the default has 31,350.

    Raises:
        ValueError: If an answer is missing, or the scoring does not have an option or value of the grid.

    Example:
        >>> search_configurations(measurements).accuracy.max()  # doctest: +SKIP
    """
    scoring, answers = measurements.scoring, answers_of(measurements.questions)
    axes: dict[str, Sequence[Any]] = {
        "negative_weight": NEGATIVE_WEIGHTS,
        **scoring.grid,
        "positive_aggregation": base.POSITIVE_AGGREGATIONS,
        "negative_aggregation": base.NEGATIVE_AGGREGATIONS,
        **(grid or {}),
    }
    weights, positives, negatives = (axes[name] for name in axes if name not in scoring.grid)
    products = itertools.product(*(axes[name] for name in scoring.grid))
    settings = [dict(zip(scoring.grid, values, strict=True)) for values in products]
    accuracy = torch.empty(len(weights), len(settings), len(positives), len(negatives), dtype=torch.float64)
    for setting_index, setting in enumerate(settings):
        costs = dataclasses.replace(scoring, **setting).permutation_costs(measurements.terms)
        positive = torch.stack([aggregate(costs[:, :NUM_POSITIVE], name, 1) for name in positives])
        negative = torch.stack([aggregate(costs[:, NUM_POSITIVE:], name, 1) for name in negatives])
        positive = positive.where(measurements.exists, torch.inf).movedim(-1, 0).unsqueeze(2).contiguous()
        negative = negative.where(measurements.exists, 0.0).movedim(-1, 0).unsqueeze(1).contiguous()
        for weight_index, weight in enumerate(weights):
            correct = probability_correct(positive - weight * negative, answers)
            accuracy[weight_index, setting_index] = correct.mean(dim=-1)
    fixed = {"scoring": scoring.name}
    if (template := getattr(scoring, "template", None)) is not None:
        fixed["template"] = template
    configurations = [fixed | dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return SearchResult(configurations, accuracy.flatten())


def select_configuration(validation: SearchResult) -> Selection:
    """Select the most accurate configuration of a search on validation questions, the simplest one on a tie.

    Report only its accuracy on other questions, computed with `score_questions`: the best of many configurations is
    good by chance on the questions of the search. With five choices, where guessing reaches 20 %, the best of the
    31,350 configurations of `marginal_bias` reaches about 27 % on 374 questions and 44 % on 37 with random scores.

    Example:
        >>> selection = select_configuration(search_configurations(measurements))  # doctest: +SKIP
    """
    best = validation.accuracy >= validation.accuracy.max() - ROUNDING
    first = int(best.byte().argmax())
    return Selection(validation.configurations[first], float(validation.accuracy[first]), int(best.sum()))
