"""Accuracy of a model: configurations searched on questions, chosen on validation ones, reported on test ones."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.analogies.encoding import encode
from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.prompts import PERMUTATIONS, Sentence
from hf_sphere.analogies.questions import Question, answers_of, choice_counts
from hf_sphere.analogies.rows import Rows
from hf_sphere.analogies.score_cache import ScoreCache, SentenceKey
from hf_sphere.analogies.scoring import (
    SCORINGS,
    Measurements,
    PermutedScoring,
    build_scoring,
    measure_questions,
    score_questions,
)
from hf_sphere.analogies.scoring.sentences import SentenceScoring
from hf_sphere.analogies.search import (
    PUBLISHED_GRID,
    SearchResult,
    join_results,
    search_configurations,
    select_configuration,
)
from hf_sphere.analogies.statistics import bootstrap_interval, selection_noise

Grid = Literal["full", "published", "none"]
"""What is searched beside templates: all weights and aggregations, those of the publication, or nothing."""

SAMPLED_QUESTIONS = 2
"""Questions by which the work to be done is estimated: each has hundreds of sentences to be tokenized."""


def can_score(language_model: LanguageModel, scoring: str) -> bool:
    """Whether a scoring goes with a model: sentences need likelihoods, hidden words need masks."""
    if scoring == "hypothesis_bias":
        return language_model.kind == "masked"
    return language_model.kind != "embedding" or not issubclass(SCORINGS[scoring], SentenceScoring)


class AnalogyEvaluation:
    """Searches configurations for one model.

    Args:
        language_model: The model.
        grid: What is searched beside templates.
        cache: Where scores of sentences are kept.
        batch_size: Rows of a batch; by default as many as are fast.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        *,
        grid: Grid = "full",
        cache: ScoreCache | None = None,
        batch_size: int | None = None,
    ) -> None:
        self.language_model = language_model
        self.grid = grid
        self.cache = cache
        self.batch_size = batch_size

    def search(
        self,
        questions: Sequence[Question],
        scoring: str,
        templates: Sequence[str | None],
        tell: Callable[[int], Any] = lambda number: None,
    ) -> SearchResult:
        """Answer questions by every configuration of a scoring with any of some templates.

        The questions go through the model in pieces, so that memory does not grow with their number.

        Args:
            questions: Questions with answers.
            scoring: A key of `SCORINGS`. One without aggregations has one configuration a template.
            templates: Templates of the scoring, one or more; None for its default.
            tell: Called with a number of questions each time that so many are answered with one template.
        """
        return join_results([self._search_template(questions, scoring, template, tell) for template in templates])

    def estimate_work(
        self, questions: Sequence[Question], scorings: Sequence[str], templates: Sequence[str]
    ) -> tuple[float, float]:
        """Sentences that are to be scored, and sequences that the model must see for them.

        What the cache has does not count. Both are extrapolated from a few questions if there are more.

        Args:
            questions: The questions.
            scorings: Keys of `SCORINGS`; those that score no sentences do not count.
            templates: Templates of the sentences.
        """
        sample = questions[:: -(-len(questions) // SAMPLED_QUESTIONS)]
        mask = self.language_model.tokenizer.mask_token_id if self.language_model.kind == "masked" else None
        num_sentences = num_rows = 0
        for template in templates:
            new = self._new_sentences(sample, scorings, template)
            num_sentences += len(new)
            num_rows += len(Rows(encode(self.language_model, new), mask)) if new else 0
        scale = len(questions) / len(sample)
        return scale * num_sentences, scale * num_rows

    @property
    def _permutations(self) -> range:
        return range(1 if self.grid == "none" else len(PERMUTATIONS))

    def _search_template(
        self, questions: Sequence[Question], scoring: str, template: str | None, tell: Callable[[int], Any]
    ) -> SearchResult:
        engine: dict[str, Any] = {"template": template, "batch_size": self.batch_size}
        if issubclass(SCORINGS[scoring], SentenceScoring):
            engine["cache"] = self.cache
        pieces = self._pieces(questions, scoring, tell)
        if self.grid == "none" or not issubclass(SCORINGS[scoring], PermutedScoring):
            scores = [score_questions(piece, self.language_model, scoring, **engine) for piece in pieces]
            return _one_configuration(questions, scoring, template, torch.cat([one.predictions for one in scores]))
        measured = [measure_questions(piece, self.language_model, scoring, **engine) for piece in pieces]
        grid = PUBLISHED_GRID if self.grid == "published" else None
        return search_configurations(_join_measurements(measured), questions, grid=grid)

    def _pieces(
        self, questions: Sequence[Question], scoring: str, tell: Callable[[int], Any]
    ) -> Iterator[Sequence[Question]]:
        """Divide questions so that each piece has as many texts as a batch of the model has tokens.

        That is many batches, as most texts are several rows of several tokens, and still only seconds of work.
        """
        sides, rest = _layout(SCORINGS[scoring])
        choices = max(len(question.choices) for question in questions)
        size = -(-self.language_model.batch_tokens // (len(self._permutations) * choices**sides * max(1, rest)))
        for start in range(0, len(questions), size):
            piece = questions[start : start + size]
            yield piece
            tell(len(piece))

    def _new_sentences(self, questions: Sequence[Question], scorings: Sequence[str], template: str) -> list[Sentence]:
        """Distinct sentences that scorings need and the cache does not have."""
        kinds = [name for name in scorings if issubclass(SCORINGS[name], SentenceScoring)]
        built = [build_scoring(name, template=template) for name in kinds]
        keys = {
            SentenceKey(sentence.text, tuple(sorted(sentence.spans[word] for word in sentence.hidden))): sentence
            for scoring in built
            if isinstance(scoring, SentenceScoring)  # for the type checker; they all are
            for question in questions
            for number in self._permutations
            for sentence in scoring.sentences(question, PERMUTATIONS[number])
        }
        known = {} if self.cache is None else self.cache.read(self.language_model.fingerprint, list(keys))
        return [sentence for key, sentence in keys.items() if key not in known]


def report_accuracy(
    validation: SearchResult,
    test: SearchResult,
    *,
    num_shuffles: int = 200,
    seed: int = 0,
) -> tuple[dict[str, Any], Tensor]:
    """Choose a configuration on the validation questions, and say what its accuracy on test questions is worth.

    Args:
        validation: Search on validation questions.
        test: The same search on test questions.
        num_shuffles: Searches on shuffled scores, for the noise level.
        seed: Of the interval and the noise.

    Returns:
        By name: `eval_accuracy` with both ends of its interval; `chance_level`; the accuracies that the search reaches
        on shuffled scores, their mean `selection_noise` and their 95 % quantile `selection_noise_high`; the accuracy of
        the scoring's defaults with the first template, `untuned_accuracy`; the same on validation; the numbers of
        questions and configurations; and the options of the chosen one. And its answers to the test questions, (Q,).
    """
    chosen = select_configuration(validation, test)
    noise = selection_noise(validation, test, num_repeats=num_shuffles, seed=seed)
    answers = test.predictions[chosen.number]
    low, high = bootstrap_interval(answers == test.answers, seed=seed)
    report = {
        "eval_accuracy": chosen.test_accuracy,
        "eval_accuracy_low": low,
        "eval_accuracy_high": high,
        "chance_level": float((1 / test.num_choices.double()).mean()),
        "selection_noise": noise.test_mean,
        "selection_noise_high": noise.test_quantile,
        "untuned_accuracy": float(test.accuracy[_untuned_number(test)]),
        "validation_accuracy": chosen.validation_accuracy,
        "validation_noise": noise.validation_mean,
        "validation_noise_high": noise.validation_quantile,
        "num_eval_questions": len(test.answers),
        "num_validation_questions": len(validation.answers),
        "num_configurations": len(test),
        "num_tied": chosen.tied,
        "configuration": chosen.configuration,
    }
    return report, answers


def _one_configuration(
    questions: Sequence[Question], scoring: str, template: str | None, predictions: Tensor
) -> SearchResult:
    """Answers by the defaults of a scoring, as the smallest of searches."""
    answers = answers_of(questions)
    return SearchResult(
        columns={"scoring": (scoring,), "template": (template,)},
        predictions=predictions[None].to(torch.int8),
        answers=answers,
        num_choices=choice_counts(questions),
        accuracy=(predictions == answers).double().mean()[None],
    )


def _layout(kind: type) -> tuple[int, int]:
    """How many dimensions of the measurements are choices, and the length of the one after them, if there is one."""
    return (kind.sides, kind.rest) if issubclass(kind, SentenceScoring) else (1, 0)


def _join_measurements(parts: Sequence[Measurements]) -> Measurements:
    """Put the measurements of pieces together, as wide as the questions with most choices need."""
    scoring = parts[0].scoring
    sides, rest = _layout(type(scoring))
    most = max(part.values.shape[2] for part in parts)
    wide = []
    for part in parts:
        grown = (0, most - part.values.shape[2]) * sides
        wide.append(F.pad(part.values, (0, 0, *grown) if rest else grown, value=torch.nan))
    return Measurements(scoring, torch.cat(wide), torch.cat([part.num_choices for part in parts]))


def _untuned_number(result: SearchResult) -> int:
    """Find the first configuration that has the defaults of the scoring."""
    defaults = {option.name: option.default for option in dataclasses.fields(SCORINGS[result.columns["scoring"][0]])}
    columns = [
        (values, defaults[name]) for name, values in result.columns.items() if name not in ("scoring", "template")
    ]
    return next(number for number in range(len(result)) if all(values[number] == value for values, value in columns))
