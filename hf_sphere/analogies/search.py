"""Every configuration of a scoring at once: aggregations and weights, as tensor operations."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_sphere.analogies.questions import Question, answers_of, choice_counts
from hf_sphere.analogies.scoring.base import (
    NEGATIVE_AGGREGATIONS,
    NUM_POSITIVE,
    POSITIVE_AGGREGATIONS,
    Measurements,
    PermutedScoring,
    aggregate,
)

NEGATIVE_WEIGHTS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

PUBLISHED_GRID = {"negative_aggregation": NEGATIVE_AGGREGATIONS[:15]}
"""What differs in the grid of Ushio et al., ACL 2021, which has only the first 12 of the 16 negative permutations."""

MOST_CHOICES = torch.iinfo(torch.int8).max


@dataclass(frozen=True)
class SearchResult:
    """What each of C configurations answers to Q questions.

    Attributes:
        columns: Options by name, C values each, among them `scoring` and `template`; None where a scoring has no such
            option.
        predictions: (C, Q), int8, number of the choice.
        answers: (Q,), number of the right one.
        num_choices: (Q,), how many there are.
        accuracy: (C,), float64.
    """

    columns: dict[str, tuple[Any, ...]]
    predictions: Tensor
    answers: Tensor
    num_choices: Tensor
    accuracy: Tensor

    def __len__(self) -> int:
        return len(self.predictions)

    def __str__(self) -> str:
        best = self.best()
        chance = float((1 / self.num_choices.double()).mean())
        chosen = ", ".join(f"{name}={value}" for name, value in self.configuration(best).items())
        return (
            f"{len(self):,} configurations on {len(self.answers):,} questions: accuracy {self.accuracy.min():.3f} to "
            f"{self.accuracy.max():.3f}, chance {chance:.3f}\nbest here: {chosen}"
        )

    def configuration(self, number: int) -> dict[str, Any]:
        """Return the options of a configuration, which are those of `score_questions`."""
        values = {name: column[number] for name, column in self.columns.items()}
        return {name: value for name, value in values.items() if value is not None}

    def best(self, accuracies: Tensor | None = None) -> int:
        """Return the number of the most accurate configuration, the first one on a tie.

        Configurations are in the order of the grid, which begins with the simplest.

        Args:
            accuracies: (C,), for instance the mean over several sets of questions; `accuracy` by default.
        """
        return int((self.accuracy if accuracies is None else accuracies).argmax())


@dataclass(frozen=True)
class Selection:
    """The configuration that answers the validation questions best.

    Attributes:
        configuration: Its options, which are those of `score_questions`, by which it answers other questions.
        accuracy: What it was chosen by, and so too high.
        tied: How many configurations answer as many questions rightly; the first one was taken.
    """

    configuration: dict[str, Any]
    accuracy: float
    tied: int


def search_configurations(
    measurements: Measurements,
    questions: Sequence[Question],
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
) -> SearchResult:
    """Answer questions by every configuration of a grid.

    The axes are `negative_weight`, the options of the scoring (`weight_head` and `weight_tail`, or `alpha` and
    `pmi_aggregation`), `positive_aggregation` and `negative_aggregation`. Configurations are their product in this
    order, the last axis fastest, and each axis begins with its simplest value, so that of configurations that are
    equally good the first is the one with the fewest things switched on. Without a negative weight the negative
    aggregation makes no difference; such configurations are kept, as in the published grid.

    Args:
        measurements: Of these questions, by `measure_questions`.
        questions: Q questions with answers, of up to 127 choices.
        grid: Axes with other values than by default; `PUBLISHED_GRID` is the published one: 24,750 configurations of
            `marginal_bias`, where the default has 31,350.

    Raises:
        ValueError: If the scoring has no such option or value, the questions are others than those that were measured,
            not all permutations were measured, or an answer is not known.
    """
    scoring, counts = measurements.scoring, measurements.num_choices
    axes = _axes(scoring, grid or {})
    answers = answers_of(questions)
    if not torch.equal(choice_counts(questions), counts):
        raise ValueError("the measurements are of other questions; measure those that are searched.")
    if measurements.values.flatten(2)[..., 0].isnan().any():  # the first choice with itself, which all have
        raise ValueError("a search takes all 24 permutations, of which some were not measured; use measure_questions.")
    if int(counts.max()) > MOST_CHOICES:
        raise ValueError(f"a search takes questions of up to {MOST_CHOICES} choices; one has {int(counts.max())}.")

    settings = [dict(zip(scoring.grid, values, strict=True)) for values in _product(axes, scoring.grid)]
    weights, positives, negatives = (
        axes[name] for name in ("negative_weight", "positive_aggregation", "negative_aggregation")
    )
    shape = (len(weights), len(settings), len(positives), len(negatives), len(questions))
    predictions = torch.empty(shape, dtype=torch.int8)
    correct = torch.empty(shape[:-1], dtype=torch.int64)
    terms, exists = scoring.terms(measurements), measurements.exists
    for number, setting in enumerate(settings):
        costs = dataclasses.replace(scoring, **setting).permutation_costs(terms)
        positive = torch.stack([aggregate(costs[:, :NUM_POSITIVE], name, 1) for name in positives])
        negative = torch.stack([aggregate(costs[:, NUM_POSITIVE:], name, 1) for name in negatives])
        positive = positive.where(exists, torch.inf).movedim(-1, 0).unsqueeze(2).contiguous()  # (K, A, 1, Q)
        negative = negative.where(exists, 0.0).movedim(-1, 0).unsqueeze(1).contiguous()  # (K, 1, B, Q)
        for place, weight in enumerate(weights):
            block = predictions[place, number]
            _choose(positive, negative, weight, out=block)
            correct[place, number] = (block == answers).sum(dim=-1)
    columns = dict(zip(axes, zip(*_product(axes, axes), strict=True), strict=True))
    fixed = {"scoring": scoring.name, "template": getattr(scoring, "template", None)}
    size = correct.numel()
    return SearchResult(
        columns={name: (value,) * size for name, value in fixed.items()} | columns,
        predictions=predictions.view(size, -1),
        answers=answers,
        num_choices=counts,
        accuracy=correct.view(size).double() / len(questions),
    )


def join_results(results: Sequence[SearchResult]) -> SearchResult:
    """Put searches on the same questions together, such as those of several templates, to choose among all.

    Args:
        results: One or more, the simplest first.

    Raises:
        ValueError: If they are of different questions.
    """
    first = results[0]
    if not all(torch.equal(first.answers, result.answers) for result in results):
        raise ValueError("the searches are on different questions; join those on the same ones.")
    names = dict.fromkeys(name for result in results for name in result.columns)
    return SearchResult(
        columns={
            name: tuple(
                itertools.chain.from_iterable(result.columns.get(name, (None,) * len(result)) for result in results)
            )
            for name in names
        },
        predictions=torch.cat([result.predictions for result in results]),
        answers=first.answers,
        num_choices=first.num_choices,
        accuracy=torch.cat([result.accuracy for result in results]),
    )


def select_configuration(validation: SearchResult) -> Selection:
    """Choose a configuration; only its accuracy on other questions, which `score_questions` answers, is to be reported.

    `hf_sphere.analogies.statistics.selection_noise` says what the same choice finds where there is nothing to find.

    Args:
        validation: Search on the validation questions.
    """
    number = validation.best()
    best = validation.accuracy[number]
    return Selection(
        configuration=validation.configuration(number),
        accuracy=float(best),
        tied=int((validation.accuracy == best).sum()),
    )


def _axes(scoring: PermutedScoring, given: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    axes: dict[str, tuple[Any, ...]] = {
        "negative_weight": NEGATIVE_WEIGHTS,
        **scoring.grid,
        "positive_aggregation": POSITIVE_AGGREGATIONS,
        "negative_aggregation": NEGATIVE_AGGREGATIONS,
    }
    unknown = [name for name in given if name not in axes]
    if unknown:
        raise ValueError(
            f"scoring {scoring.name!r} has no option {', '.join(unknown)} to search; it has: {', '.join(axes)}."
        )
    axes |= {name: tuple(values) for name, values in given.items()}
    for name, values in axes.items():
        if not values:
            raise ValueError(f"the grid has no value for {name}; give one or more.")
        for value in values:
            dataclasses.replace(scoring, **{name: value})  # says what is wrong with it
    return axes


def _product(axes: Mapping[str, Sequence[Any]], names: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return list(itertools.product(*(axes[name] for name in names)))


def _choose(positive: Tensor, negative: Tensor, weight: float, *, out: Tensor) -> None:
    """Find the first choice of the lowest cost, (K, A, 1, Q) and (K, 1, B, Q) -> (A, B, Q).

    One choice after another: along rows of so few, `argmin` is several times slower.
    """
    out.zero_()
    lowest = positive[0] - weight * negative[0]
    for choice in range(1, len(positive)):
        cost = positive[choice] - weight * negative[choice]
        out.masked_fill_(cost < lowest, choice)
        torch.minimum(lowest, cost, out=lowest)
