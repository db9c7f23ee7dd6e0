"""Accuracies of all configurations of a scoring (aggregations and weights), and the significance of accuracies."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from scipy.stats import binom
from torch import Tensor

from hf_sphere.analogies.questions import answers_of
from hf_sphere.analogies.scoring import base
from hf_sphere.analogies.scoring.base import NUM_POSITIVE, Measurements, aggregate

NEGATIVE_WEIGHTS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

PUBLISHED_GRID = {"negative_aggregation": base.NEGATIVE_AGGREGATIONS[:15]}
"""Axis in which the grid of Ushio et al., ACL 2021, differs: only the first 12 of the 16 negative permutations."""

TIE = 1e-6
"""Difference of costs, relative to 1 + |cost|, up to which choices tie: rounding errors of a model in float32."""

ROUNDING = 1e-9  # of a mean of values 1/k, which depends on their order


def lowest_costs(costs: Tensor) -> Tensor:
    """Return whether choices have the lowest cost of their question, (K, ...), boolean; several if they tie.

    Choices tie if the model cannot distinguish them: repeated ones, and those that differ in unknown words only.
    """
    lowest = costs.amin(dim=0)
    return costs <= lowest + TIE * (1 + lowest.abs())


def probability_correct(costs: Tensor, answers: Tensor) -> Tensor:
    """Return the probability that Q answers are correct if ties are broken at random, (K, ..., Q) -> (..., Q), float64.

    It is 1/k for k tied choices, one of which is correct; otherwise 0 or 1. `answers` are the correct choices, (Q,).
    """
    lowest = lowest_costs(costs)
    correct = lowest.take_along_dim(answers.expand(1, *lowest.shape[1:]), dim=0)[0]
    return correct.double() / lowest.sum(dim=0, dtype=torch.int16)


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


def bootstrap_interval(correct: Tensor) -> tuple[float, float]:
    """Compute the 95 % confidence interval of an accuracy by the percentile bootstrap (Efron, 1979).

    The number of correct answers in a resample of N answers is binomially distributed, so no resamples are drawn. Ties
    are broken at random in each resample.

    `correct` (N,), N >= 1, is whether each answer is correct: boolean, or 0 and 1, and 1/k for a tie of k choices.
    """
    low, high = binom.interval(0.95, len(correct), correct.double().mean().item())
    return float(low) / len(correct), float(high) / len(correct)


def guessing_quantile(num_choices: Tensor) -> float:
    """Compute the 95 % quantile of the accuracy of guessing from the numbers of choices (Q,), which are at least 1.

    It is also the quantile for a configuration that was selected on other questions, if its scores are noise: each of
    its answers is then correct with probability 1 / (number of choices), independently of the other questions and of
    the selection. So neither scores nor repeated searches are needed: the number of correct answers follows a Poisson
    binomial distribution, whose quantile is exact: the lowest accuracy that is exceeded with a probability of at most
    5 %.
    """
    probabilities = torch.zeros(len(num_choices) + 1, dtype=torch.float64)  # of each number of correct answers
    probabilities[0] = 1
    # Add one question after another: P(k) = P(k) (1 - 1/n) + P(k - 1) / n, with n choices.
    for count in num_choices.tolist():
        right = probabilities / count
        probabilities -= right
        probabilities[1:] += right[:-1]
    return int((probabilities.cumsum(0) < 0.95).sum()) / len(num_choices)
