"""Analogy questions: which of some pairs of words is related as the stem pair is?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from torch import Tensor

Pair = tuple[str, str]
"""Two words, of which one is something to the other."""

COLUMNS = ("stem", "choice", "answer")
"""Columns that a data set of questions must have; `prefix`, the group of a question, may be missing."""


@dataclass(frozen=True)
class Question:
    """A question: a is to b what which c is to which d?

    Attributes:
        stem: The pair (a, b).
        choices: The pairs (c, d) to choose from.
        answer: Number of the right one, from 0; None where it is not known.
        group: Kind of relation or level of difficulty; empty where it is not known.
    """

    stem: Pair
    choices: tuple[Pair, ...]
    answer: int | None = None
    group: str = ""


def load_questions(
    name: str = "relbert/analogy_questions", config: str = "sat", split: str = "test", *, revision: str | None = None
) -> list[Question]:
    """Load the questions of a data set.

    The five sets of Ushio et al., "BERT is to NLP what AlexNet is to CV", ACL 2021, are the configurations `sat`, `u2`,
    `u4`, `google` and `bats` of `relbert/analogy_questions`, with the splits `validation` and `test`.

    Args:
        name: Id on the Hub, or a folder; in a folder, each configuration is a folder of its own with parquet files.
        config: Configuration, one set of questions.
        split: Split; configurations of a scoring are chosen on `validation` and reported on `test`.
        revision: Of the data set on the Hub. Where `datasets` refuses a data set because it is a script, the branch
            `refs/convert/parquet` holds the same as parquet.

    Raises:
        ValueError: If the folder has no such configuration, a column is missing, or a question is not sound.
    """
    if Path(name).is_dir():
        folder = Path(name, config)
        if not folder.is_dir():
            existing = sorted(path.name for path in Path(name).iterdir() if path.is_dir())
            raise ValueError(f"no configuration {config!r} in {name}; it has: {', '.join(existing) or 'none'}.")
        rows = load_dataset(str(folder), split=split)
    else:
        rows = load_dataset(name, config, split=split, revision=revision)
    missing = [column for column in COLUMNS if column not in rows.column_names]
    if missing:
        raise ValueError(
            f"questions have the columns {', '.join(COLUMNS)}, and prefix if they are grouped; {name} has "
            f"{', '.join(rows.column_names)}. Rename what is there."
        )
    groups = rows["prefix"][:] if "prefix" in rows.column_names else None
    return make_questions(rows["stem"][:], rows["choice"][:], rows["answer"][:], groups)


def make_questions(
    stems: Sequence[Sequence[str]],
    choices: Sequence[Sequence[Sequence[str]]],
    answers: Sequence[int | None] | None = None,
    groups: Sequence[str | None] | None = None,
) -> list[Question]:
    """Make questions of columns, one entry a question.

    Args:
        stems: The pairs (a, b).
        choices: Lists of pairs (c, d); their lengths may differ.
        answers: Number of the right choice of each.
        groups: Kind of relation of each.

    Raises:
        ValueError: If the columns are not of one length, or a question is not sound (`check_questions`).
    """
    answers = [None] * len(stems) if answers is None else answers
    groups = [None] * len(stems) if groups is None else groups
    if not len(stems) == len(choices) == len(answers) == len(groups):
        raise ValueError(
            f"got {len(stems)} stems, {len(choices)} lists of choices, {len(answers)} answers and {len(groups)} groups;"
            " give one of each a question."
        )
    questions = [
        Question(_frozen(stem), _frozen([_frozen(pair) for pair in pairs]), answer, group or "")
        for stem, pairs, answer, group in zip(stems, choices, answers, groups, strict=True)
    ]
    check_questions(questions)
    return questions


def check_questions(questions: Sequence[Question], *, answered: bool = False) -> None:
    """Say what is wrong with questions, if something is.

    Args:
        questions: Questions.
        answered: Whether the right choice must be known of all.

    Raises:
        ValueError: If there are none; or a stem or a choice is no pair, a word is empty, there are no choices, or the
            answer is not the number of one. The message names the question.
    """
    if not questions:
        raise ValueError("there are no questions; give at least one.")
    for number, question in enumerate(questions):
        problem = _problem(question)
        if problem is None and answered and question.answer is None:
            problem = "has no answer; give the number of the right choice, from 0"
        if problem is not None:
            raise ValueError(f"question {number}, {question.stem} to {question.choices}, {problem}.")


def _problem(question: Question) -> str | None:
    if not question.choices or isinstance(question.choices, str):
        return "has no choices; give one pair or more"
    for pair in (question.stem, *question.choices):
        if not isinstance(pair, tuple) or len(pair) != 2:
            return f"has {pair!r} where a pair of two words is to stand"
        for word in pair:
            if not isinstance(word, str) or not word.strip():
                return f"has {word!r} where a word is to stand"
    answer = question.answer
    if answer is not None and not (isinstance(answer, Integral) and 0 <= answer < len(question.choices)):
        return f"has the answer {answer!r}; allowed are the numbers 0 to {len(question.choices) - 1}"
    return None


def _frozen(values: Any) -> Any:
    """A tuple of a list; a text stays as it is, lest "ab" become a pair."""
    return tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else values


def choice_counts(questions: Sequence[Question]) -> Tensor:
    """Number of choices of each question, (Q,), int64."""
    return torch.tensor([len(question.choices) for question in questions])


def answers_of(questions: Sequence[Question]) -> Tensor:
    """Number of the right choice of each question, (Q,), int64.

    Raises:
        ValueError: If one is not known, or a question is not sound.
    """
    check_questions(questions, answered=True)
    return torch.tensor([question.answer for question in questions])


def chance_level(questions: Sequence[Question]) -> float:
    """Expected accuracy of guessing: the mean of one over the number of choices."""
    return float((1.0 / choice_counts(questions).double()).mean())
