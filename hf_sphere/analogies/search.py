"""Evaluation of all configurations of a scoring (aggregations and weights), and the significance of accuracies."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from scipy.stats import binom
from torch import Tensor

from hf_sphere.analogies.questions import Question, answers_of, choice_counts
from hf_sphere.analogies.scoring.base import (
    NEGATIVE_AGGREGATIONS,
    NUM_POSITIVE,
    POSITIVE_AGGREGATIONS,
    Measurements,
    Scoring,
    aggregate,
)
from hf_sphere.metrics.checks import check_correct

NEGATIVE_WEIGHTS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

PUBLISHED_GRID = {"negative_aggregation": NEGATIVE_AGGREGATIONS[:15]}
"""Axis in which the grid of Ushio et al., ACL 2021, differs: only the first 12 of the 16 negative permutations."""

MOST_CHOICES = torch.iinfo(torch.int8).max

ROWS_AT_A_TIME = 2048  # number of configurations compared with the answers at once: a few tens of MB


@dataclass(frozen=True)
class SearchResult:
    """Predictions of C configurations for Q questions.

    Attributes:
        columns: C values per option, including `scoring` and `template`; None if a scoring does not have the option.
        predictions: (C, Q), int8, index of the predicted choice.
        answers: (Q,), index of the correct choice.
        num_choices: (Q,), number of choices per question.
        accuracy: (C,), float64.
    """

    columns: dict[str, tuple[Any, ...]] = field(repr=False)
    predictions: Tensor
    answers: Tensor
    num_choices: Tensor
    accuracy: Tensor

    @classmethod
    def of_predictions(
        cls, columns: dict[str, tuple[Any, ...]], predictions: Tensor, questions: Sequence[Question]
    ) -> Self:
        """Compare predictions, (C, Q), with the answers of the questions."""
        answers = answers_of(questions)
        accuracy = (predictions == answers).sum(dim=1).double() / len(questions)
        return cls(columns, predictions.to(torch.int8), answers, choice_counts(questions), accuracy)

    def __len__(self) -> int:
        return len(self.predictions)

    def configuration(self, number: int) -> dict[str, Any]:
        """Return the options of a configuration, as arguments of `score_questions`."""
        values = {name: column[number] for name, column in self.columns.items()}
        return {name: value for name, value in values.items() if value is not None}

    def best(self) -> int:
        """Return the number of the most accurate configuration, the first one (the simplest) on a tie."""
        return int(self.accuracy.argmax())


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
    measurements: Measurements, questions: Sequence[Question], *, grid: Mapping[str, Sequence[Any]] | None = None
) -> SearchResult:
    """Answer questions with every configuration of a grid.

    The axes are `negative_weight`, the options of the scoring (`weight_head` and `weight_tail`, or `alpha` and
    `pmi_aggregation`), `positive_aggregation` and `negative_aggregation`. The configurations are their product in this
    order; the last axis varies fastest. Each axis starts with its simplest value, so that the simplest of equally
    accurate configurations comes first. Without a negative weight the negative aggregation makes no difference; such
    configurations are kept, as in the published grid.

    Args:
        measurements: Measurements of these questions by `measure_questions`.
        questions: Q questions with answers, of up to 127 choices.
        grid: Values of axes that differ from the default; `PUBLISHED_GRID` is the published one: 24,750 configurations
            of `marginal_bias`; the default has 31,350.

    Raises:
        ValueError: If the scoring does not have an option or value, the measurements belong to other questions or lack
            permutations, or an answer is missing.

    Example:
        >>> search_configurations(measurements, questions).accuracy.max()  # doctest: +SKIP
    """
    scoring, counts = measurements.scoring, measurements.num_choices
    axes = _axes(scoring, grid or {})
    if not torch.equal(choice_counts(questions), counts):
        raise ValueError("the measurements belong to other questions; measure the questions to search on.")
    if measurements.terms[..., 0].isnan().any():  # every question has a first choice
        raise ValueError(
            "a search requires all 24 permutations, some of which were not measured (see measure_questions)."
        )
    if int(counts.max()) > MOST_CHOICES:
        raise ValueError(f"a search supports questions with up to {MOST_CHOICES} choices; one has {int(counts.max())}.")

    settings = [
        dict(zip(scoring.grid, values, strict=True))
        for values in itertools.product(*(axes[name] for name in scoring.grid))
    ]
    weights, positives, negatives = (
        axes[name] for name in ("negative_weight", "positive_aggregation", "negative_aggregation")
    )
    shape = (len(weights), len(settings), len(positives), len(negatives), len(questions))
    predictions = torch.empty(shape, dtype=torch.int8)
    for number, setting in enumerate(settings):
        costs = dataclasses.replace(scoring, **setting).permutation_costs(measurements.terms)
        positive = torch.stack([aggregate(costs[:, :NUM_POSITIVE], name, 1) for name in positives])
        negative = torch.stack([aggregate(costs[:, NUM_POSITIVE:], name, 1) for name in negatives])
        positive = positive.where(measurements.exists, torch.inf).movedim(-1, 0).unsqueeze(2).contiguous()
        negative = negative.where(measurements.exists, 0.0).movedim(-1, 0).unsqueeze(1).contiguous()
        for place, weight in enumerate(weights):
            _choose(positive, negative, weight, out=predictions[place, number])
    predictions = predictions.flatten(0, -2)
    fixed = {"scoring": scoring.name, "template": getattr(scoring, "template", None)}
    columns = {name: (value,) * len(predictions) for name, value in fixed.items()}
    columns |= zip(axes, zip(*itertools.product(*axes.values()), strict=True), strict=True)
    return SearchResult.of_predictions(columns, predictions, questions)


def join_results(results: Sequence[SearchResult]) -> SearchResult:
    """Concatenate searches on the same questions, such as those of several templates.

    Args:
        results: One or more, the simplest first.

    Raises:
        ValueError: If they are on different questions.

    Example:
        >>> join_results([search_configurations(measured, questions) for measured in by_template])  # doctest: +SKIP
    """
    first = results[0]
    if not all(torch.equal(first.answers, result.answers) for result in results):
        raise ValueError("the searches are on different questions; join searches on the same ones.")
    names = dict.fromkeys(name for result in results for name in result.columns)
    columns = {name: [result.columns.get(name, (None,) * len(result)) for result in results] for name in names}
    return dataclasses.replace(
        first,
        columns={name: tuple(itertools.chain.from_iterable(parts)) for name, parts in columns.items()},
        predictions=torch.cat([result.predictions for result in results]),
        accuracy=torch.cat([result.accuracy for result in results]),
    )


def select_configuration(validation: SearchResult) -> Selection:
    """Select the most accurate configuration.

    Report only its accuracy on other questions, computed with `score_questions`.
    `hf_sphere.analogies.search.selection_noise` estimates the accuracy that the same selection reaches by chance.

    Args:
        validation: Search on the validation questions.

    Example:
        >>> selection = select_configuration(search_configurations(measurements, questions))  # doctest: +SKIP
    """
    number = validation.best()
    best = validation.accuracy[number]
    return Selection(validation.configuration(number), float(best), int((validation.accuracy == best).sum()))


def _axes(scoring: Scoring, given: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """Validate the grid and return the values of every axis."""
    axes: dict[str, tuple[Any, ...]] = {
        "negative_weight": NEGATIVE_WEIGHTS,
        **scoring.grid,
        "positive_aggregation": POSITIVE_AGGREGATIONS,
        "negative_aggregation": NEGATIVE_AGGREGATIONS,
    }
    unknown = [name for name in given if name not in axes]
    if unknown:
        raise ValueError(f"scoring {scoring.name!r} has no option {unknown[0]} to search; it has: {', '.join(axes)}.")
    for name, values in given.items():
        if not values:
            raise ValueError(f"the grid has no value for {name}; give one or more.")
        for value in values:
            dataclasses.replace(scoring, **{name: value})  # raises an error if it is invalid
    return axes | {name: tuple(values) for name, values in given.items()}


def _choose(positive: Tensor, negative: Tensor, weight: float, *, out: Tensor) -> None:
    """Find the first choice with the lowest cost, (K, A, 1, Q) and (K, 1, B, Q) -> (A, B, Q).

    Loops over the choices, because `argmin` along such a short dimension is several times slower.
    """
    out.zero_()
    lowest = positive[0] - weight * negative[0]
    for choice in range(1, len(positive)):
        cost = positive[choice] - weight * negative[choice]
        out.masked_fill_(cost < lowest, choice)
        torch.minimum(lowest, cost, out=lowest)


def bootstrap_interval(correct: Tensor) -> tuple[float, float]:
    """Compute the 95 % confidence interval of an accuracy by the percentile bootstrap (Efron, 1979).

    The number of correct answers in a resample of N answers is binomially distributed, so no resamples are drawn.

    Args:
        correct: (N,), whether each answer is correct; boolean, or 0 and 1.

    Returns:
        Lower and upper bound.

    Raises:
        ValueError: If `correct` is not of the shape (N,) with N >= 1 or has values other than 0 and 1.

    Example:
        >>> low, high = bootstrap_interval(torch.tensor([True] * 60 + [False] * 40))
        >>> low < 0.6 < high
        True
    """
    correct = check_correct(correct)
    low, high = binom.interval(0.95, len(correct), correct.mean().item())
    return float(low) / len(correct), float(high) / len(correct)


def guessing_quantile(num_choices: Tensor) -> float:
    """Compute the 95 % quantile of the accuracy of guessing from the numbers of choices (Q,).

    It is also the quantile for a configuration that was selected on other questions, if its scores are noise: each of
    its answers is then correct with probability 1 / (number of choices), independently of the other questions and of
    the selection. So neither scores nor repeated searches are needed: the number of correct answers follows a Poisson
    binomial distribution, whose quantile is exact: the lowest accuracy that is exceeded with a probability of at most
    5 %.

    Raises:
        ValueError: If a number of choices is below 1 or there are none.
    """
    num_choices = torch.as_tensor(num_choices).detach().cpu()
    if num_choices.ndim != 1 or len(num_choices) == 0 or num_choices.min() < 1:
        raise ValueError(f"num_choices must be at least 1, of the shape (Q,) with Q >= 1; got {num_choices}.")
    probabilities = torch.zeros(len(num_choices) + 1, dtype=torch.float64)  # of each number of correct answers
    probabilities[0] = 1
    for count in num_choices.tolist():
        right = probabilities / count
        probabilities -= right
        probabilities[1:] += right[:-1]
    return int((probabilities.cumsum(0) < 0.95).sum()) / len(num_choices)


@dataclass(frozen=True)
class SelectionNoise:
    """Highest accuracy of a search on its own questions, if the scores are noise.

    Attributes:
        mean: Mean over the repeats.
        quantile: 95 % quantile over the repeats.
    """

    mean: float
    quantile: float


def selection_noise(result: SearchResult, *, num_repeats: int = 200, seed: int = 0) -> SelectionNoise:
    """Repeat a search with random answers, to measure how much the selection inflates its accuracy.

    The best of thousands of configurations is good by chance: with five choices, where guessing reaches 20 %, the best
    of the 31,350 configurations of `marginal_bias` reaches about 27 % on 374 questions and 44 % on 37 with random
    scores, and more if templates and scorings are searched too. Compare an accuracy on the questions of the search with
    the result of this function, and an accuracy on other questions with `guessing_quantile`.

    Each repeat samples the correct answer of each question uniformly among its choices. This is equivalent to shuffling
    the scores of the choices, and keeps the correlation between configurations.

    Args:
        result: The search.
        num_repeats: Number of repeats.
        seed: Seed of the answers.

    Raises:
        ValueError: If there are no repeats.

    Example:
        >>> selection_noise(search_configurations(measurements, questions))  # doctest: +SKIP
    """
    if num_repeats < 1:
        raise ValueError(f"num_repeats must be at least 1; got {num_repeats}.")
    generator, num_questions = torch.Generator().manual_seed(seed), len(result.num_choices)
    uniform = torch.rand(num_repeats, num_questions, generator=generator, dtype=torch.float64)
    size = int(result.num_choices.max())
    # Correct answers are counted by a product of one-hot matrices, which is exact in float32.
    targets = _one_hot((uniform * result.num_choices).long(), size).T
    counts = [(_one_hot(rows, size) @ targets).amax(dim=0) for rows in result.predictions.split(ROWS_AT_A_TIME)]
    best = torch.stack(counts).amax(dim=0).double() / num_questions
    return SelectionNoise(mean=float(best.mean()), quantile=float(best.quantile(0.95)))


def _one_hot(choices: Tensor, num_choices: int) -> Tensor:
    return (choices[..., None] == torch.arange(num_choices, dtype=torch.int8)).flatten(1).float()
