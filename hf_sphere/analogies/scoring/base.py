"""Base classes of scorings, which compute a cost per choice from questions and a model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_sphere.analogies.encoding import warn_unknown_words
from hf_sphere.analogies.language_model import Kind, LanguageModel
from hf_sphere.analogies.prompts import NEGATIVE_PERMUTATIONS, PERMUTATIONS, POSITIVE_PERMUTATIONS, Permutation
from hf_sphere.analogies.questions import Question, choice_counts
from hf_sphere.utils.checks import check_choice

Questions = Sequence[Question]
Permutations = Sequence[Permutation]

NUM_POSITIVE, NUM_NEGATIVE = len(POSITIVE_PERMUTATIONS), len(NEGATIVE_PERMUTATIONS)

POSITIVE_AGGREGATIONS = ("mean", "max", "min", *(f"index_{number}" for number in range(NUM_POSITIVE)))
"""How the costs of the permutations in which an analogy holds are reduced to one."""

NEGATIVE_AGGREGATIONS = ("mean", "max", "min", *(f"index_{number}" for number in range(NUM_NEGATIVE)))
"""How the costs of the permutations in which the analogy does not hold are reduced to one."""

WEIGHTS = (0.0, 0.2, -0.2, 0.4, -0.4)
"""Weights of the published grid for the terms that are subtracted from a cost, simplest first."""

QUESTIONS_AT_ONCE = 16
"""Questions whose texts, hundreds per question, are scored or embedded together, which limits memory."""

_REDUCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}


def aggregate(costs: Tensor, name: str, dim: int) -> Tensor:
    """Reduce a dimension by `mean`, `max`, `min` or `index_<i>`."""
    index = _index(name)
    return _REDUCTIONS[name](costs, dim) if index is None else costs.select(dim, index)


def _index(aggregation: str) -> int | None:
    return None if aggregation in _REDUCTIONS else int(aggregation.removeprefix("index_"))


@dataclass(frozen=True)
class Engine:
    """A model and the options for running it."""

    language_model: LanguageModel  # the model
    batch_size: int | None = None  # sequences per batch; chosen for speed by default
    progress: Callable[[int], Any] = lambda count: None  # called with the number of newly finished questions


@dataclass(frozen=True)
class Measurements:
    """Everything that a scoring requires from a model, for all weights and aggregations.

    The terms are NaN for permutations that were not measured and for choices that a question does not have.
    """

    scoring: "Scoring"
    questions: Questions  # the Q questions
    terms: Tensor  # (T, Q, 24, K), float64, permutations as in `PERMUTATIONS`

    @property
    def exists(self) -> Tensor:
        """Whether a question has a choice, (Q, K), boolean."""
        return torch.arange(self.terms.shape[-1]) < choice_counts(self.questions)[:, None]


@dataclass(frozen=True, kw_only=True)
class Scoring(ABC):
    """Computes the costs of the choices of questions. The fields of a subclass are its options.

    A cost is computed from the 24 permutations of the four words of a question and a choice:
    cost = aggregate over the 8 permutations in which the analogy holds
    - negative_weight * aggregate over the 16 others.

    Only the permutations that are needed are measured: with `index_0` and no negative weight (the default), only the
    original order of the words.
    """

    name: ClassVar[str] = ""
    kinds: ClassVar[tuple[Kind, ...]] = ("masked", "causal", "embedding")
    grid: ClassVar[dict[str, tuple[Any, ...]]] = {}  # values of its options that a search tries, simplest first

    positive_aggregation: str = "index_0"
    negative_aggregation: str = "index_0"
    negative_weight: float = 0.0

    def __post_init__(self) -> None:
        check_choice("positive_aggregation", self.positive_aggregation, POSITIVE_AGGREGATIONS)
        check_choice("negative_aggregation", self.negative_aggregation, NEGATIVE_AGGREGATIONS)

    @abstractmethod
    def question_terms(self, questions: Questions, permutations: Permutations, engine: Engine) -> Iterable[Tensor]:
        """Compute the terms of each question, (T, P, k) for P permutations and its k choices."""

    def permutation_costs(self, terms: Tensor) -> Tensor:
        """Combine terms into the cost of every permutation, (T, Q, 24, K) -> (Q, 24, K)."""
        return terms[0]

    def measure(
        self, questions: Questions, engine: Engine, permutations: Sequence[int] = range(len(PERMUTATIONS))
    ) -> Measurements:
        """Run the model on Q questions of up to K choices; `permutations` are numbers of `PERMUTATIONS`."""
        if (kind := engine.language_model.kind) not in self.kinds:
            raise ValueError(f"scoring {self.name!r} requires a model of kind {' or '.join(self.kinds)}; got {kind}.")
        warn_unknown_words(engine.language_model, questions)
        orders = [PERMUTATIONS[index] for index in permutations]
        terms_by_question: list[Tensor] = []
        for start in range(0, len(questions), QUESTIONS_AT_ONCE):
            batch = questions[start : start + QUESTIONS_AT_ONCE]
            terms_by_question += self.question_terms(batch, orders, engine)
            engine.progress(len(batch))
        shape = (len(questions), len(PERMUTATIONS), int(choice_counts(questions).max()))
        terms = torch.full((len(terms_by_question[0]), *shape), torch.nan, dtype=torch.float64)
        for row, (question, values) in enumerate(zip(questions, terms_by_question, strict=True)):
            if not values.isfinite().all():
                raise ValueError(
                    f"the model's value of the question {question.stem} to {question.choices} is infinite or not a "
                    "number. Check its weights, dtype and tokens."
                )
            terms[:, row][:, list(permutations), : len(question.choices)] = values.double()
        return Measurements(self, questions, terms)

    def costs(self, questions: Questions, engine: Engine) -> Tensor:
        """Compute the costs of the choices of Q questions, (Q, K), float64; infinity for choices that do not exist."""
        positive, negative = range(NUM_POSITIVE), range(NUM_POSITIVE, len(PERMUTATIONS))
        needed = _needed(positive, self.positive_aggregation)
        needed += _needed(negative, self.negative_aggregation) if self.negative_weight else []
        measurements = self.measure(questions, engine, needed)
        costs = self.permutation_costs(measurements.terms)
        total = aggregate(costs[:, :NUM_POSITIVE], self.positive_aggregation, 1)
        if self.negative_weight:
            total = total - self.negative_weight * aggregate(costs[:, NUM_POSITIVE:], self.negative_aggregation, 1)
        return total.where(measurements.exists, torch.inf)


def _needed(permutations: Sequence[int], aggregation: str) -> list[int]:
    index = _index(aggregation)
    return list(permutations) if index is None else [permutations[index]]
