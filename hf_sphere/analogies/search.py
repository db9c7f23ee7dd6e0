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
from hf_sphere.analogies.scoring import base
from hf_sphere.analogies.scoring.base import NUM_POSITIVE, Measurements, Scoring, aggregate
from hf_sphere.metrics.checks import check_scores
from hf_sphere.utils.checks import check_seed

NEGATIVE_WEIGHTS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

PUBLISHED_GRID = {"negative_aggregation": base.NEGATIVE_AGGREGATIONS[:15]}
"""Axis in which the grid of Ushio et al., ACL 2021, differs: only the first 12 of the 16 negative permutations."""

TIE = 1e-6
"""Difference of costs, relative to 1 + |cost|, up to which choices tie: rounding errors of a model in float32."""

ROUNDING = 1e-9  # of a mean of values 1/k, which depends on their order

ROWS_AT_A_TIME = 2048  # number of configurations compared with the answers at once: a few tens of MB


def lowest_costs(costs: Tensor) -> Tensor:
    """Return whether choices have the lowest cost of their question, (K, ...), boolean; several if they tie.

    Choices tie if the model cannot distinguish them: repeated ones, and those that differ in unknown words only.
    """
    lowest = costs.amin(dim=0)
    return costs <= lowest + TIE * (1 + lowest.abs())


def probability_correct(lowest: Tensor, answers: Tensor) -> Tensor:
    """Return the probability that Q answers are correct if ties are broken at random, (K, ..., Q) -> (..., Q), float64.

    It is 1/k for k tied choices, one of which is correct; otherwise 0 or 1. `answers` are the correct choices, (Q,).
    """
    correct = lowest.take_along_dim(answers.expand(1, *lowest.shape[1:]), dim=0)[0]
    return correct.double() / lowest.sum(dim=0, dtype=torch.int16)


@dataclass(frozen=True)
class SearchResult:
    """Answers of C configurations to Q questions.

    Attributes:
        columns: C values per option, including `scoring` and `template`; None if a scoring does not have the option.
        lowest: (K, C, Q), whether a choice has the lowest cost; several if they tie.
        answers: (Q,), index of the correct choice.
        num_choices: (Q,), number of choices per question.
        accuracy: (C,), float64; a tie of k choices counts 1/k if one of them is correct.
    """

    columns: dict[str, tuple[Any, ...]] = field(repr=False)
    lowest: Tensor
    answers: Tensor
    num_choices: Tensor
    accuracy: Tensor

    @classmethod
    def of_choices(cls, columns: dict[str, tuple[Any, ...]], lowest: Tensor, questions: Sequence[Question]) -> Self:
        """Compare the choices with the lowest costs, (K, C, Q), with the answers of the questions."""
        answers = answers_of(questions)
        chunks = lowest.split(ROWS_AT_A_TIME, dim=1)
        accuracy = torch.cat([probability_correct(chunk, answers).mean(dim=1) for chunk in chunks])
        return cls(columns, lowest, answers, choice_counts(questions), accuracy)

    @property
    def predictions(self) -> Tensor:
        """Index of the choice with the lowest cost, the first one on a tie, (C, Q), int64."""
        return self.lowest.byte().argmax(dim=0)

    def __len__(self) -> int:
        return self.lowest.shape[1]

    def configuration(self, index: int) -> dict[str, Any]:
        """Return the options of a configuration, as arguments of `score_questions`."""
        values = {name: column[index] for name, column in self.columns.items()}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def most_accurate(self) -> Tensor:
        """Whether a configuration has the highest accuracy, up to rounding, (C,), boolean."""
        return self.accuracy >= self.accuracy.max() - ROUNDING

    def best(self) -> int:
        """Return the number of the most accurate configuration, the first one (the simplest) on a tie."""
        return int(self.most_accurate.byte().argmax())


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
        questions: Q questions with answers, of up to K choices.
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
        what = "all 24 permutations, some of which were not measured"
        raise ValueError(f"a search requires {what} (see measure_questions).")

    products = itertools.product(*(axes[name] for name in scoring.grid))
    settings = [dict(zip(scoring.grid, values, strict=True)) for values in products]
    weights, positives, negatives = (axes[name] for name in axes if name not in scoring.grid)
    shape = (int(counts.max()), len(weights), len(settings), len(positives), len(negatives), len(questions))
    lowest = torch.empty(shape, dtype=torch.bool)
    for setting_index, setting in enumerate(settings):
        costs = dataclasses.replace(scoring, **setting).permutation_costs(measurements.terms)
        positive = torch.stack([aggregate(costs[:, :NUM_POSITIVE], name, 1) for name in positives])
        negative = torch.stack([aggregate(costs[:, NUM_POSITIVE:], name, 1) for name in negatives])
        positive = positive.where(measurements.exists, torch.inf).movedim(-1, 0).unsqueeze(2).contiguous()
        negative = negative.where(measurements.exists, 0.0).movedim(-1, 0).unsqueeze(1).contiguous()
        for weight_index, weight in enumerate(weights):
            lowest[:, weight_index, setting_index] = lowest_costs(positive - weight * negative)
    lowest = lowest.flatten(1, -2)
    fixed = {"scoring": scoring.name, "template": getattr(scoring, "template", None)}
    columns = {name: (value,) * lowest.shape[1] for name, value in fixed.items()}
    columns |= zip(axes, zip(*itertools.product(*axes.values()), strict=True), strict=True)
    return SearchResult.of_choices(columns, lowest, questions)


def join_results(results: Sequence[SearchResult]) -> SearchResult:
    """Concatenate searches, which must be on the same questions, such as those of several templates, simplest first."""
    first = results[0]
    if not all(torch.equal(first.answers, result.answers) for result in results):
        raise ValueError("the searches are on different questions; join searches on the same ones.")
    names = dict.fromkeys(name for result in results for name in result.columns)
    columns = {name: [result.columns.get(name, (None,) * len(result)) for result in results] for name in names}
    return dataclasses.replace(
        first,
        columns={name: tuple(itertools.chain.from_iterable(values)) for name, values in columns.items()},
        lowest=torch.cat([result.lowest for result in results], dim=1),
        accuracy=torch.cat([result.accuracy for result in results]),
    )


def select_configuration(validation: SearchResult) -> Selection:
    """Select the most accurate configuration of a search on validation questions.

    Report only its accuracy on other questions, computed with `score_questions`.
    `hf_sphere.analogies.search.selection_noise` estimates the accuracy that the same selection reaches by chance.

    Example:
        >>> selection = select_configuration(search_configurations(measurements, questions))  # doctest: +SKIP
    """
    best, tied = validation.best(), int(validation.most_accurate.sum())
    return Selection(validation.configuration(best), float(validation.accuracy[best]), tied)


def _axes(scoring: Scoring, grid: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """Validate the grid and return the values of every axis."""
    axes: dict[str, tuple[Any, ...]] = {
        "negative_weight": NEGATIVE_WEIGHTS,
        **scoring.grid,
        "positive_aggregation": base.POSITIVE_AGGREGATIONS,
        "negative_aggregation": base.NEGATIVE_AGGREGATIONS,
    }
    if unknown := [name for name in grid if name not in axes]:
        raise ValueError(f"scoring {scoring.name!r} has no option {unknown[0]} to search; it has: {', '.join(axes)}.")
    for name, values in grid.items():
        if not values:
            raise ValueError(f"the grid has no value for {name}; give one or more.")
        for value in values:
            dataclasses.replace(scoring, **{name: value})  # raises an error if it is invalid
    return axes | {name: tuple(values) for name, values in grid.items()}


def bootstrap_interval(correct: Tensor) -> tuple[float, float]:
    """Compute the 95 % confidence interval of an accuracy by the percentile bootstrap (Efron, 1979).

    The number of correct answers in a resample of N answers is binomially distributed, so no resamples are drawn. Ties
    are broken at random in each resample.

    `correct` (N,), N >= 1, is whether each answer is correct: boolean, or 0 and 1, and 1/k for a tie of k choices.
    """
    correct = check_scores("correct", correct)
    if not ((correct >= 0) & (correct <= 1)).all():
        raise ValueError("correct must be boolean, or between 0 and 1; got others. Compute predictions == answers.")
    low, high = binom.interval(0.95, len(correct), correct.mean().item())
    return float(low) / len(correct), float(high) / len(correct)


def guessing_quantile(num_choices: Tensor) -> float:
    """Compute the 95 % quantile of the accuracy of guessing from the numbers of choices (Q,), which are at least 1.

    It is also the quantile for a configuration that was selected on other questions, if its scores are noise: each of
    its answers is then correct with probability 1 / (number of choices), independently of the other questions and of
    the selection. So neither scores nor repeated searches are needed: the number of correct answers follows a Poisson
    binomial distribution, whose quantile is exact: the lowest accuracy that is exceeded with a probability of at most
    5 %.
    """
    num_choices = torch.as_tensor(num_choices).detach().cpu()
    if num_choices.ndim != 1 or len(num_choices) == 0 or num_choices.min() < 1:
        raise ValueError(f"num_choices must be at least 1, of the shape (Q,) with Q >= 1; got {num_choices}.")
    probabilities = torch.zeros(len(num_choices) + 1, dtype=torch.float64)  # of each number of correct answers
    probabilities[0] = 1
    # Add one question after another: P(k) = P(k) (1 - 1/n) + P(k - 1) / n, with n choices.
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

    Each of the repeats, at least one, samples the correct answer of each question uniformly among its choices. This is
    equivalent to shuffling the scores of the choices, and keeps the correlation between configurations.

    Example:
        >>> selection_noise(search_configurations(measurements, questions))  # doctest: +SKIP
    """
    if num_repeats < 1:
        raise ValueError(f"num_repeats must be at least 1; got {num_repeats}.")
    generator, num_questions = torch.Generator().manual_seed(check_seed(seed)), len(result.num_choices)
    uniform = torch.rand(num_repeats, num_questions, generator=generator, dtype=torch.float64)
    size = int(result.num_choices.max())
    # Correct answers are counted by a product of matrices, with one-hot rows where no choices tie.
    choices = torch.arange(size)[:, None, None]
    targets = ((uniform * result.num_choices).long() == choices).float().movedim(0, 1).flatten(1).T
    counts = []
    for lowest in result.lowest.split(ROWS_AT_A_TIME, dim=1):
        credits = (lowest / lowest.sum(dim=0, dtype=torch.int16)).movedim(0, 1).flatten(1)
        counts.append((credits @ targets).amax(dim=0))
    best = torch.stack(counts).amax(dim=0).double() / num_questions
    return SelectionNoise(mean=float(best.mean()), quantile=float(best.quantile(0.95)))
