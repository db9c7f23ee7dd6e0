"""What an accuracy is worth: its interval, and what a search finds where there is nothing to find."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sphere.analogies.search import SearchResult, check_same_search

ROWS_AT_A_TIME = 2048
"""Configurations whose answers are compared at once: a few tens of MB."""


def bootstrap_interval(
    correct: Tensor, *, confidence: float = 0.95, num_resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Interval of an accuracy, by the percentiles of the bootstrap (Efron, 1979).

    Of N answers drawn again with replacement the number of right ones is binomial, and is drawn as such.

    Args:
        correct: (N,), whether each answer is right; boolean, or 0 and 1.
        confidence: Share of the resamples within the interval.
        num_resamples: How many there are.
        seed: Of the resamples.

    Returns:
        Lower and upper end.

    Raises:
        ValueError: If `correct` is not of the shape (N,) with N >= 1 or has other values than 0 and 1, the confidence
            is not between 0 and 1, or there are no resamples.
    """
    correct = torch.as_tensor(correct).detach().cpu().double()
    if correct.ndim != 1 or len(correct) == 0 or not ((correct == 0) | (correct == 1)).all():
        raise ValueError(
            f"correct must have the shape (N,), N >= 1, and be boolean or 0 and 1; got the shape {tuple(correct.shape)}"
            f" with values from {correct.tolist()[:5]}. Compare predictions and answers by ==."
        )
    if not 0 < confidence < 1 or num_resamples < 1:
        raise ValueError(
            f"confidence must be between 0 and 1 and num_resamples at least 1; got {confidence} and {num_resamples}."
        )
    count = torch.full((num_resamples,), float(len(correct)), dtype=torch.float64)
    drawn = torch.binomial(count, correct.mean().expand_as(count), generator=torch.Generator().manual_seed(seed))
    tail = (1 - confidence) / 2
    low, high = (drawn / len(correct)).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


@dataclass(frozen=True)
class SelectionNoise:
    """Accuracies that a search finds when the scores know nothing.

    Attributes:
        validation_mean: Mean over the repeats of the best validation accuracy.
        validation_quantile: 95 % of the repeats are below.
        test_mean: Mean of the test accuracy of the configuration that was best on validation.
        test_quantile: 95 % of the repeats are below; a test accuracy beyond it is no luck.
    """

    validation_mean: float
    validation_quantile: float
    test_mean: float
    test_quantile: float

    def __str__(self) -> str:
        return (
            f"without knowledge the best on validation reaches {self.validation_mean:.3f} there (95 % quantile "
            f"{self.validation_quantile:.3f}) and {self.test_mean:.3f} on test ({self.test_quantile:.3f})"
        )


def selection_noise(
    validation: SearchResult, test: SearchResult, *, num_repeats: int = 200, seed: int = 0
) -> SelectionNoise:
    """Repeat a search with answers that have nothing to do with the scores.

    The best of thousands of configurations is good by chance: with five choices, where guessing reaches 20 %, the best
    of the 31,350 of `marginal_bias` reaches about 27 % of 374 questions and 44 % of 37 from
    random scores, and more where templates and scorings are chosen too. A chosen accuracy says something only beside
    that number. On other questions the chosen configuration falls back to guessing, with the
    spread of so many questions.

    Each repeat draws the right answers anew, uniformly and for each question among its own choices. That is the same as
    to shuffle which choice carries which score; what the configurations have in common is kept.

    Args:
        validation: Search on the validation questions.
        test: The same search on the test questions. With `validation` itself, what choosing on the questions that
            are reported would find.
        num_repeats: How often.
        seed: Of the answers.

    Raises:
        ValueError: If the configurations are not the same, or there are no repeats.
    """
    check_same_search(validation, test)
    if num_repeats < 1:
        raise ValueError(f"num_repeats must be at least 1; got {num_repeats}.")
    generator = torch.Generator().manual_seed(seed)
    answers = _draw_answers(validation.num_choices, num_repeats, generator)
    best, chosen = _best(validation.predictions, answers, int(validation.num_choices.max()))
    if test is not validation:
        answers = _draw_answers(test.num_choices, num_repeats, generator)
    reached = (test.predictions[chosen] == answers).double().mean(dim=1)
    return SelectionNoise(
        validation_mean=float(best.mean()),
        validation_quantile=float(best.quantile(0.95)),
        test_mean=float(reached.mean()),
        test_quantile=float(reached.quantile(0.95)),
    )


def _draw_answers(num_choices: Tensor, num_repeats: int, generator: torch.Generator) -> Tensor:
    """Answers at random, (Q,) -> (R, Q)."""
    uniform = torch.rand(num_repeats, len(num_choices), generator=generator, dtype=torch.float64)
    return (uniform * num_choices).long()


def _best(predictions: Tensor, answers: Tensor, num_choices: int) -> tuple[Tensor, Tensor]:
    """Highest accuracy of all configurations and the first that reaches it, (C, Q) and (R, Q) -> (R,) and (R,).

    Right answers are counted by a product of one-hot matrices, exact in float32.
    """
    targets = _one_hot(answers, num_choices).T
    most = torch.full((len(answers),), -1.0)
    chosen = torch.zeros(len(answers), dtype=torch.int64)
    for start in range(0, len(predictions), ROWS_AT_A_TIME):
        counts, rows = (_one_hot(predictions[start : start + ROWS_AT_A_TIME], num_choices) @ targets).max(dim=0)
        chosen = torch.where(counts > most, rows + start, chosen)
        most = torch.maximum(most, counts)
    return most.double() / answers.shape[1], chosen


def _one_hot(choices: Tensor, num_choices: int) -> Tensor:
    return (choices[..., None] == torch.arange(num_choices, dtype=torch.int8)).flatten(1).float()
