"""Analogy questions: which pair of words has the same relation as the stem pair?"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_sphere.utils.checks import check_seed
from hf_sphere.utils.loading import load_dataset

Pair = tuple[str, str]  # two words in a relation


@dataclass(frozen=True)
class Question:
    """An analogy question: for which pair (c, d) is a to b what c is to d?

    Attributes:
        stem: The pair (a, b).
        choices: The candidate pairs (c, d), at least one.
        answer: Index of the correct choice; None if it is unknown.

    Raises:
        ValueError: If the stem or a choice is not a pair or has an empty word, there are no choices, or the answer is
            not the index of a choice.
    """

    stem: Pair
    choices: tuple[Pair, ...]
    answer: int | None = None

    def __post_init__(self) -> None:
        pairs = (self.stem, *self.choices)
        if not self.choices or not all(
            isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(word, str) and word.strip() for word in pair)
            for pair in pairs
        ):
            raise ValueError(f"a question needs pairs of two words and at least one choice; got {pairs!r:.200}.")
        if self.answer is not None and self.answer not in range(len(self.choices)):
            allowed = f"0 to {len(self.choices) - 1}"
            raise ValueError(f"the question {self.stem} has the answer {self.answer!r}; allowed are {allowed}.")


def load_questions(
    name: str = "relbert/analogy_questions", config: str = "sat", split: str = "test", *, revision: str | None = None
) -> list[Question]:
    """Load the questions of a dataset with the columns `stem`, `choice` and `answer`.

    The five sets of Ushio et al., "BERT is to NLP what AlexNet is to CV", ACL 2021, are the configurations `sat`, `u2`,
    `u4`, `google` and `bats` of `relbert/analogy_questions`, with the splits `validation` and `test`.

    Args:
        name: Hub id or folder; in a folder, each configuration is a subfolder with parquet files.
        config: Configuration of the dataset, one set of questions.
        split: Split; configurations of a scoring are selected on `validation` and reported on `test`.
        revision: Revision on the Hub. If `datasets` refuses a dataset because it is a script, the branch
            `refs/convert/parquet` has the same data as parquet files.

    Raises:
        FileNotFoundError: If the folder has no such configuration.
        ValueError: If a question is invalid.

    Example:
        >>> load_questions("relbert/analogy_questions", "sat", "test")  # doctest: +SKIP
    """
    if Path(name).is_dir():
        rows = load_dataset(str(Path(name, config)), split=split)
    else:
        rows = load_dataset(name, config, split=split, revision=revision)
    return make_questions(rows["stem"][:], rows["choice"][:], rows["answer"][:])


def make_questions(
    stems: Sequence[Sequence[str]],
    choices: Sequence[Sequence[Sequence[str]]],
    answers: Sequence[int | None] | None = None,
) -> list[Question]:
    """Build questions from columns with one entry per question.

    Args:
        stems: The pairs (a, b).
        choices: Lists of pairs (c, d); their lengths may differ.
        answers: Index of the correct choice of each question.

    Raises:
        ValueError: If the columns differ in length, or a question is invalid.

    Example:
        >>> questions = make_questions([("dog", "puppy")], [[("cat", "kitten"), ("cat", "tail")]], answers=[0])
        >>> questions[0].stem
        ('dog', 'puppy')
    """
    answers = [None] * len(stems) if answers is None else answers
    return [
        Question(_frozen(stem), _frozen([_frozen(pair) for pair in pairs]), answer)
        for stem, pairs, answer in zip(stems, choices, answers, strict=True)
    ]


def _frozen(values: Any) -> Any:
    """Convert a list to a tuple, but not a string, so that "ab" does not become a pair."""
    return tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else values


def choice_counts(questions: Sequence[Question]) -> Tensor:
    """Return the number of choices of each question, (Q,), int64."""
    return torch.tensor([len(question.choices) for question in questions])


def answers_of(questions: Sequence[Question]) -> Tensor:
    """Return the indices of the correct choices, (Q,), int64; raise a ValueError if one is unknown."""
    for index, question in enumerate(questions):
        if question.answer is None:
            raise ValueError(f"question {index}, {question.stem}, has no answer; give the index of the correct choice.")
    return torch.tensor([question.answer for question in questions])


def chance_level(questions: Sequence[Question]) -> float:
    """Return the expected accuracy of guessing: the mean of one over the number of choices.

    Example:
        >>> questions = make_questions([("dog", "puppy")], [[("cat", "kitten"), ("cat", "tail")]], answers=[0])
        >>> chance_level(questions)
        0.5
    """
    return float((1.0 / choice_counts(questions).double()).mean())


def sample_questions(questions: Sequence[Question], count: int | None, *, seed: int = 0) -> list[Question]:
    """Sample at most `count` questions, keeping their order; None for all."""
    if count is None or count >= len(questions):
        return list(questions)
    return [questions[index] for index in sorted(random.Random(check_seed(seed)).sample(range(len(questions)), count))]
