"""Analogy questions: which pair of words has the same relation as the stem pair?"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_sphere.utils.checks import check_not_text, check_seed
from hf_sphere.utils.loading import load_dataset

Pair = tuple[str, str]  # two words in a relation
COLUMNS = ("stem", "choice", "answer")
"""Required columns of a dataset of questions; `prefix`, the group of a question, is optional."""


@dataclass(frozen=True)
class Question:
    """An analogy question: for which pair (c, d) is a to b what c is to d?

    Attributes:
        stem: The pair (a, b).
        choices: The candidate pairs (c, d).
        answer: Index of the correct choice; None if it is unknown.
        group: Kind of relation or level of difficulty; empty if it is unknown.
    """

    stem: Pair
    choices: tuple[Pair, ...]
    answer: int | None = None
    group: str = ""


def load_questions(
    name: str = "relbert/analogy_questions", config: str = "sat", split: str = "test", *, revision: str | None = None
) -> list[Question]:
    """Load the questions of a dataset.

    The five sets of Ushio et al., "BERT is to NLP what AlexNet is to CV", ACL 2021, are the configurations `sat`, `u2`,
    `u4`, `google` and `bats` of `relbert/analogy_questions`, with the splits `validation` and `test`.

    Args:
        name: Hub id or folder; in a folder, each configuration is a subfolder with parquet files.
        config: Configuration of the dataset, one set of questions.
        split: Split; configurations of a scoring are selected on `validation` and reported on `test`.
        revision: Revision on the Hub. If `datasets` refuses a dataset because it is a script, the branch
            `refs/convert/parquet` has the same data as parquet files.

    Raises:
        ValueError: If the folder has no such configuration, a column is missing, or a question is invalid.

    Example:
        >>> load_questions("relbert/analogy_questions", "sat", "test")  # doctest: +SKIP
    """
    if Path(name).is_dir():
        folder = Path(name, config)
        if not folder.is_dir():
            existing = sorted(path.name for path in Path(name).iterdir() if path.is_dir())
            raise ValueError(f"no configuration {config!r} in {name}; it has: {', '.join(existing) or 'none'}.")
        rows = load_dataset(str(folder), split=split)
    else:
        rows = load_dataset(name, config, split=split, revision=revision)
    if any(column not in rows.column_names for column in COLUMNS):
        columns = ", ".join(COLUMNS)
        raise ValueError(f"questions have the columns {columns}; {name} has {', '.join(rows.column_names)}. Rename.")
    groups = rows["prefix"][:] if "prefix" in rows.column_names else None
    return make_questions(rows["stem"][:], rows["choice"][:], rows["answer"][:], groups)


def make_questions(
    stems: Sequence[Sequence[str]],
    choices: Sequence[Sequence[Sequence[str]]],
    answers: Sequence[int | None] | None = None,
    groups: Sequence[str | None] | None = None,
) -> list[Question]:
    """Build questions from columns with one entry per question.

    Args:
        stems: The pairs (a, b).
        choices: Lists of pairs (c, d); their lengths may differ.
        answers: Index of the correct choice of each question.
        groups: Kind of relation of each question.

    Raises:
        ValueError: If the columns differ in length, or a question is invalid (see `check_questions`).

    Example:
        >>> questions = make_questions([("dog", "puppy")], [[("cat", "kitten"), ("cat", "tail")]], answers=[0])
        >>> questions[0].stem
        ('dog', 'puppy')
    """
    check_not_text("groups", groups)
    answers = [None] * len(stems) if answers is None else answers
    groups = [None] * len(stems) if groups is None else groups
    if not len(stems) == len(choices) == len(answers) == len(groups):
        counts = f"{len(stems)} stems, {len(choices)} lists of choices, {len(answers)} answers and {len(groups)} groups"
        raise ValueError(f"got {counts}; give one of each per question.")
    questions = [
        Question(_frozen(stem), _frozen([_frozen(pair) for pair in pairs]), answer, group or "")
        for stem, pairs, answer, group in zip(stems, choices, answers, groups, strict=True)
    ]
    check_questions(questions)
    return questions


def check_questions(questions: Sequence[Question], *, answered: bool = False) -> None:
    """Check that questions are valid, and that their answers are known if they must be `answered`.

    The error names the question whose stem or choice is not a pair, which has an empty word or no choices, or whose
    answer is not the index of a choice. No questions are an error too.
    """
    if not questions:
        raise ValueError("there are no questions; give at least one.")
    for index, question in enumerate(questions):
        problem = _problem(question)
        if problem is None and answered and question.answer is None:
            problem = "has no answer; give the index of the correct choice, from 0"
        if problem is not None:
            raise ValueError(f"question {index}, {question.stem} to {question.choices}, {problem}.")


def _problem(question: Question) -> str | None:
    if not question.choices or isinstance(question.choices, str):
        return "has no choices; give at least one pair"
    for pair in (question.stem, *question.choices):
        if not isinstance(pair, tuple) or len(pair) != 2:
            return f"has {pair!r} instead of a pair of two words"
        for word in pair:
            if not isinstance(word, str) or not word.strip():
                return f"has {word!r} instead of a word"
    answer = question.answer
    if answer is not None and not (isinstance(answer, Integral) and 0 <= answer < len(question.choices)):
        return f"has the answer {answer!r}; allowed are 0 to {len(question.choices) - 1}"
    return None


def _frozen(values: Any) -> Any:
    """Convert a list to a tuple, but not a string, so that "ab" does not become a pair."""
    return tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else values


def choice_counts(questions: Sequence[Question]) -> Tensor:
    """Return the number of choices of each question, (Q,), int64."""
    return torch.tensor([len(question.choices) for question in questions])


def answers_of(questions: Sequence[Question]) -> Tensor:
    """Return the indices of the correct choices, (Q,), int64; raise a ValueError if one is invalid or has none."""
    check_questions(questions, answered=True)
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
