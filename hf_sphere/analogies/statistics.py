"""What an accuracy is worth: its interval, what guessing reaches, and what a search finds where nothing is to find."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sphere.analogies.search import SearchResult

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


def guessing_quantile(num_choices: Tensor, *, share: float = 0.95) -> float:
    """Accuracy that a share of all who guess do not exceed.

    It is also what a search finds on other questions than those that it chose by if its scores know nothing. Which
    choice of a question carries which score is then chance: whatever the chosen configuration answers, it is right with
    probability 1 / (number of choices), for each question by itself and whatever it was chosen by. So neither scores
    nor repeated searches are needed: the number of right answers is a sum of independent trials (the Poisson binomial
    distribution), whose quantile is exact.

    Args:
        num_choices: (Q,), how many choices each question has.
        share: Of those who guess.

    Returns:
        The lowest accuracy that is exceeded with a probability of at most 1 - share.

    Raises:
        ValueError: If `num_choices` is not of the shape (Q,) with Q >= 1 and at least 1 everywhere, or the share is not
            between 0 and 1.
    """
    num_choices = torch.as_tensor(num_choices).detach().cpu()
    if num_choices.ndim != 1 or len(num_choices) == 0 or num_choices.min() < 1:
        raise ValueError(
            f"num_choices must have the shape (Q,), Q >= 1, and be at least 1; got the shape {tuple(num_choices.shape)}"
            f" with values from {num_choices.flatten().tolist()[:5]}."
        )
    if not 0 < share < 1:
        raise ValueError(f"share must be between 0 and 1; got {share}.")
    probabilities = torch.zeros(len(num_choices) + 1, dtype=torch.float64)  # of so many right answers
    probabilities[0] = 1
    for count in num_choices.tolist():
        right = probabilities / count
        probabilities -= right
        probabilities[1:] += right[:-1]
    return int((probabilities.cumsum(0) < share).sum()) / len(num_choices)


@dataclass(frozen=True)
class SelectionNoise:
    """Accuracies that a search finds on the questions that it chooses by when the scores know nothing.

    Attributes:
        mean: Mean over the repeats of the best accuracy.
        quantile: 95 % of the repeats are below.
    """

    mean: float
    quantile: float

    def __str__(self) -> str:
        return (
            f"without knowledge the best reaches {self.mean:.3f} on the questions that it is chosen by "
            f"(95 % quantile {self.quantile:.3f})"
        )


def selection_noise(result: SearchResult, *, num_repeats: int = 200, seed: int = 0) -> SelectionNoise:
    """Repeat a search with answers that have nothing to do with the scores.

    The best of thousands of configurations is good by chance: with five choices, where guessing reaches 20 %, the best
    of the 31,350 of `marginal_bias` reaches about 27 % of 374 questions and 44 % of 37 from random scores, and more
    where templates and scorings are chosen too. An accuracy on the questions that were chosen by says something only
    beside that number; one on other questions beside `guessing_quantile`.

    Each repeat draws the right answers anew, uniformly and for each question among its own choices. That is the same as
    to shuffle which choice carries which score; what the configurations have in common is kept.

    Args:
        result: Search on the questions that are chosen by.
        num_repeats: How often.
        seed: Of the answers.

    Raises:
        ValueError: If there are no repeats.
    """
    if num_repeats < 1:
        raise ValueError(f"num_repeats must be at least 1; got {num_repeats}.")
    answers = _draw_answers(result.num_choices, num_repeats, torch.Generator().manual_seed(seed))
    best = _best_accuracies(result.predictions, answers, int(result.num_choices.max()))
    return SelectionNoise(mean=float(best.mean()), quantile=float(best.quantile(0.95)))


def _draw_answers(num_choices: Tensor, num_repeats: int, generator: torch.Generator) -> Tensor:
    """Answers at random, (Q,) -> (R, Q)."""
    uniform = torch.rand(num_repeats, len(num_choices), generator=generator, dtype=torch.float64)
    return (uniform * num_choices).long()


def _best_accuracies(predictions: Tensor, answers: Tensor, num_choices: int) -> Tensor:
    """Highest accuracy of all configurations, (C, Q) and (R, Q) -> (R,).

    Right answers are counted by a product of one-hot matrices, exact in float32.
    """
    targets = _one_hot(answers, num_choices).T
    counts = [
        (_one_hot(predictions[start : start + ROWS_AT_A_TIME], num_choices) @ targets).amax(dim=0)
        for start in range(0, len(predictions), ROWS_AT_A_TIME)
    ]
    return torch.stack(counts).amax(dim=0).double() / answers.shape[1]


def _one_hot(choices: Tensor, num_choices: int) -> Tensor:
    return (choices[..., None] == torch.arange(num_choices, dtype=torch.int8)).flatten(1).float()
