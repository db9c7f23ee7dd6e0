"""What every scoring has in common: questions and a model in, a cost of each choice out."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hf_sphere.analogies.prompts import NEGATIVE_PERMUTATIONS, PERMUTATIONS, POSITIVE_PERMUTATIONS
from hf_sphere.analogies.questions import Question, choice_counts

if TYPE_CHECKING:
    from hf_sphere.analogies.language_model import LanguageModel

NUM_POSITIVE, NUM_NEGATIVE = len(POSITIVE_PERMUTATIONS), len(NEGATIVE_PERMUTATIONS)

POSITIVE_AGGREGATIONS = ("mean", "max", "min", *(f"index_{number}" for number in range(NUM_POSITIVE)))
"""How the costs of the orders in which an analogy holds become one."""

NEGATIVE_AGGREGATIONS = ("mean", "max", "min", *(f"index_{number}" for number in range(NUM_NEGATIVE)))
"""How those of the orders in which it does not hold become one."""

WEIGHTS = (0.0, 0.2, -0.2, 0.4, -0.4)
"""Weights of the published grid for what is taken from a cost, the simplest first."""

_REDUCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}


def aggregate(costs: Tensor, name: str, dim: int) -> Tensor:
    """Make one of several costs, by `mean`, `max`, `min` or `index_<i>`; the dimension goes."""
    return _REDUCTIONS[name](costs, dim) if name in _REDUCTIONS else costs.select(dim, int(name.removeprefix("index_")))


def check_choice(option: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuse a value that is not among those of an option."""
    if value not in allowed:
        raise ValueError(f"{option} must be one of {', '.join(allowed)}; got {value!r}.")


def check_weight(option: str, value: Any) -> None:
    """Refuse a weight that is no finite number."""
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{option} must be a finite number, 0 to leave out what it weighs; got {value!r}.")


@dataclass(frozen=True)
class Measurements:
    """What a model says of questions, before any weight of a scoring is chosen.

    Attributes:
        scoring: The scoring they were made for.
        values: (Q, 24, K, ...), float64, in the order of `PERMUTATIONS`; NaN for what was not measured and for the
            choices that a question does not have.
        num_choices: (Q,), how many of the K choices each question has.
    """

    scoring: "PermutedScoring"
    values: Tensor
    num_choices: Tensor

    @property
    def exists(self) -> Tensor:
        """Whether a question has a choice, (Q, K), boolean."""
        return torch.arange(self.values.shape[2]) < self.num_choices[:, None]


@dataclass(frozen=True, kw_only=True)
class Scoring(ABC):
    """From questions to the costs of their choices. The fields of a subclass are its options.

    Attributes:
        name: Unique name, by which `score_questions` finds it.
        remark: Why it lacks an option that others have, for messages.
    """

    name: ClassVar[str] = ""
    remark: ClassVar[str] = ""

    @abstractmethod
    def costs(self, questions: Sequence[Question], language_model: "LanguageModel", **engine: Any) -> Tensor:
        """Costs of the choices, the lowest wins.

        Args:
            questions: Q questions of up to K choices, checked.
            language_model: The model.
            **engine: How the model is run: `batch_size`, `cache`, `progress`.

        Returns:
            (Q, K), float64; infinite for the choices that a question does not have.
        """


@dataclass(frozen=True, kw_only=True)
class PermutedScoring(Scoring):
    """A scoring of the 24 orders of the words of a question.

    cost = aggregate over the 8 orders in which the analogy holds - negative_weight * aggregate over the 16 others.

    Only the orders that count are measured: with `index_0` and no negative weight, which is the default, the question
    as it is asked.

    Attributes:
        grid: Which values a search tries for the options of the subclass, the simplest first.
    """

    grid: ClassVar[dict[str, tuple[Any, ...]]] = {}

    positive_aggregation: str = "index_0"
    negative_aggregation: str = "index_0"
    negative_weight: float = 0.0

    def __post_init__(self) -> None:
        check_choice("positive_aggregation", self.positive_aggregation, POSITIVE_AGGREGATIONS)
        check_choice("negative_aggregation", self.negative_aggregation, NEGATIVE_AGGREGATIONS)
        for option in dataclasses.fields(self):
            if isinstance(option.default, float):
                check_weight(option.name, getattr(self, option.name))

    @abstractmethod
    def measure(
        self,
        questions: Sequence[Question],
        language_model: "LanguageModel",
        permutations: Iterable[int] = range(len(PERMUTATIONS)),
        **engine: Any,
    ) -> Measurements:
        """Measure what the costs are made of, by one call of the model's engine.

        Args:
            questions: Q questions of up to K choices, checked.
            language_model: The model.
            permutations: Which of the `PERMUTATIONS` to measure.
            **engine: See `costs`.
        """

    def terms(self, measurements: Measurements) -> Tensor:
        """Return what the costs are a function of once the weights are known, (T, Q, 24, K), float64."""
        return measurements.values[None]

    def permutation_costs(self, terms: Tensor) -> Tensor:
        """Costs of each order of the words, (T, Q, 24, K) -> (Q, 24, K)."""
        return terms[0]

    def costs(self, questions: Sequence[Question], language_model: "LanguageModel", **engine: Any) -> Tensor:
        """See `Scoring.costs`."""
        measurements = self.measure(questions, language_model, self._permutations(), **engine)
        costs = self.permutation_costs(self.terms(measurements))
        positive = aggregate(costs[:, :NUM_POSITIVE], self.positive_aggregation, 1)
        if self.negative_weight:
            negative = aggregate(costs[:, NUM_POSITIVE:], self.negative_aggregation, 1)
            positive = positive - self.negative_weight * negative
        return positive.where(measurements.exists, torch.inf)

    def _permutations(self) -> list[int]:
        """Return the orders that count."""
        positive = _numbers(self.positive_aggregation, NUM_POSITIVE)
        negative = _numbers(self.negative_aggregation, NUM_NEGATIVE) if self.negative_weight else []
        return [*positive, *(NUM_POSITIVE + number for number in negative)]


def _numbers(aggregation: str, count: int) -> list[int]:
    return list(range(count)) if aggregation in _REDUCTIONS else [int(aggregation.removeprefix("index_"))]


def check_finite(values: Tensor, question: Question) -> None:
    """Refuse what a model says of a question if it is no number."""
    if not values.isfinite().all():
        raise ValueError(
            f"the model's value of the question {question.stem} to {question.choices} is infinite or not a number. "
            "Are its weights finite, and is its dtype wide enough?"
        )


def gather(
    questions: Sequence[Question], permutations: Sequence[int], values: Iterable[Tensor], *, sides: int, rest: int = 0
) -> tuple[Tensor, Tensor]:
    """Put the values of each question where they belong among those of all.

    Args:
        questions: Q questions of up to K choices.
        permutations: The P orders that were measured.
        values: For each question (P, k) for its k choices, or (P, k, k), or (P, k, rest).
        sides: How many dimensions are choices: 1 or 2.
        rest: Length of the last dimension, if it is not choices.

    Returns:
        (Q, 24, K), or (Q, 24, K, K), or (Q, 24, K, rest), float64; NaN elsewhere. And the number of choices (Q,).

    Raises:
        ValueError: If a value is not finite.
    """
    counts = choice_counts(questions)
    most = int(counts.max())
    shape = (len(questions), len(PERMUTATIONS), *([most] * sides), *([rest] if rest else []))
    gathered = torch.full(shape, torch.nan, dtype=torch.float64)
    for question, place, count, found in zip(questions, gathered, counts.tolist(), values, strict=True):
        check_finite(found, question)
        inside = place[:, :count] if sides == 1 else place[:, :count, :count]
        inside[list(permutations)] = found.to(gathered)
    return gathered, counts
