"""Accuracy of a model: configurations searched on validation questions, and only the chosen one on test questions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.analogies.encoding import encode
from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.prompts import PERMUTATIONS, Sentence
from hf_sphere.analogies.questions import Question, answers_of, chance_level, choice_counts
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
from hf_sphere.analogies.statistics import bootstrap_interval, guessing_quantile, selection_noise

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
    """Searches configurations for one model, and answers by one of them.

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

    def answer(
        self,
        questions: Sequence[Question],
        configuration: Mapping[str, Any],
        tell: Callable[[int], Any] = lambda number: None,
    ) -> Tensor:
        """Answer questions by one configuration; only the orders of the words that it needs are scored.

        Args:
            questions: The questions.
            configuration: `scoring` and options of it, as `SearchResult.configuration` returns them; what is left out
                has its default.
            tell: See `search`.

        Returns:
            (Q,), int64, number of the choice.
        """
        engine = self._engine(configuration["scoring"])
        scores = [
            score_questions(piece, self.language_model, **engine, **configuration)
            for piece in self._pieces(questions, configuration["scoring"], tell)
        ]
        return torch.cat([one.predictions for one in scores])

    def estimate_search(
        self, questions: Sequence[Question], scorings: Sequence[str], templates: Sequence[str]
    ) -> tuple[float, float]:
        """Sentences that a search has to score, and sequences that the model must see for them.

        What the cache has does not count. Both are extrapolated from a few questions if there are more.

        Args:
            questions: The questions.
            scorings: Keys of `SCORINGS`; those that score no sentences do not count.
            templates: Templates of the sentences.
        """
        orders = self._orders
        return _total(self._estimate(questions, scorings, template, orders) for template in templates)

    def estimate_answers(
        self, questions: Sequence[Question], scorings: Sequence[str], templates: Sequence[str]
    ) -> tuple[float, float]:
        """Like `estimate_search`, for answers by the chosen configuration of each scoring and by the untuned one.

        What will be chosen is not known yet, so this is the most: all orders of the words in the last template, and for
        the untuned one the words as they stand in the first template. What is chosen may need as few as one order.
        """
        wanted = [(templates[-1], self._orders)]
        if len(templates) > 1:
            wanted.append((templates[0], range(1)))
        return _total(
            self._estimate(questions, [scoring], template, orders)
            for scoring in scorings
            for template, orders in wanted
        )

    def _estimate(
        self, questions: Sequence[Question], scorings: Sequence[str], template: str, orders: range
    ) -> tuple[float, float]:
        sample = questions[:: -(-len(questions) // SAMPLED_QUESTIONS)]
        new = self._new_sentences(sample, scorings, template, orders)
        mask = self.language_model.tokenizer.mask_token_id if self.language_model.kind == "masked" else None
        rows = len(Rows(encode(self.language_model, new), mask)) if new else 0
        scale = len(questions) / len(sample)
        return scale * len(new), scale * rows

    @property
    def _orders(self) -> range:
        """Numbers of the `PERMUTATIONS` that a configuration may need."""
        return range(1 if self.grid == "none" else len(PERMUTATIONS))

    def _engine(self, scoring: str) -> dict[str, Any]:
        cache = {"cache": self.cache} if issubclass(SCORINGS[scoring], SentenceScoring) else {}
        return {"batch_size": self.batch_size, **cache}

    def _search_template(
        self, questions: Sequence[Question], scoring: str, template: str | None, tell: Callable[[int], Any]
    ) -> SearchResult:
        if self.grid == "none" or not issubclass(SCORINGS[scoring], PermutedScoring):
            answers = self.answer(questions, untuned_configuration(scoring, template), tell)
            return _one_configuration(questions, scoring, template, answers)
        engine = self._engine(scoring)
        measured = [
            measure_questions(piece, self.language_model, scoring, template=template, **engine)
            for piece in self._pieces(questions, scoring, tell)
        ]
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
        size = -(-self.language_model.batch_tokens // (len(self._orders) * choices**sides * max(1, rest)))
        for start in range(0, len(questions), size):
            piece = questions[start : start + size]
            yield piece
            tell(len(piece))

    def _new_sentences(
        self, questions: Sequence[Question], scorings: Sequence[str], template: str, orders: range
    ) -> list[Sentence]:
        """Distinct sentences that scorings need and the cache does not have."""
        kinds = [name for name in scorings if issubclass(SCORINGS[name], SentenceScoring)]
        built = [build_scoring(name, template=template) for name in kinds]
        keys = {
            SentenceKey(sentence.text, tuple(sorted(sentence.spans[word] for word in sentence.hidden))): sentence
            for scoring in built
            if isinstance(scoring, SentenceScoring)  # for the type checker; they all are
            for question in questions
            for number in orders
            for sentence in scoring.sentences(question, PERMUTATIONS[number])
        }
        known = {} if self.cache is None else self.cache.read(self.language_model.fingerprint, list(keys))
        return [sentence for key, sentence in keys.items() if key not in known]


def untuned_configuration(scoring: str, template: str | None) -> dict[str, Any]:
    """Defaults of a scoring with a template, None for its own, in the form of `SearchResult.configuration`."""
    return {"scoring": scoring} if template is None else {"scoring": scoring, "template": template}


def report_accuracy(
    validation: SearchResult,
    test: Sequence[Question],
    answers: Tensor,
    untuned: Tensor,
    *,
    num_shuffles: int = 200,
    seed: int = 0,
) -> dict[str, Any]:
    """Say what the accuracy of the configuration that was chosen on validation questions is worth.

    Args:
        validation: Search on validation questions.
        test: Q test questions.
        answers: (Q,), those of the configuration that `select_configuration(validation)` chooses.
        untuned: (Q,), those of the scoring's defaults.
        num_shuffles: Searches on shuffled scores, for the noise level on validation.
        seed: Of the interval and the noise.

    Returns:
        By name: `eval_accuracy` with both ends of its interval; `chance_level`, which is also what the chosen
        configuration reaches on average if the scores know nothing; `selection_noise_high`, what it then stays within
        with probability 95 %; `untuned_accuracy`; `validation_accuracy` and, for shuffled scores, its mean
        `validation_noise` and 95 % quantile `validation_noise_high`; the numbers of questions and configurations; and
        the options of the chosen one.
    """
    chosen = select_configuration(validation)
    noise = selection_noise(validation, num_repeats=num_shuffles, seed=seed)
    right = answers_of(test)
    low, high = bootstrap_interval(answers == right, seed=seed)
    return {
        "eval_accuracy": float((answers == right).double().mean()),
        "eval_accuracy_low": low,
        "eval_accuracy_high": high,
        "chance_level": chance_level(test),
        "selection_noise_high": guessing_quantile(choice_counts(test)),
        "untuned_accuracy": float((untuned == right).double().mean()),
        "validation_accuracy": chosen.accuracy,
        "validation_noise": noise.mean,
        "validation_noise_high": noise.quantile,
        "num_eval_questions": len(test),
        "num_validation_questions": len(validation.answers),
        "num_configurations": len(validation),
        "num_tied": chosen.tied,
        "configuration": chosen.configuration,
    }


def _total(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    first, second = zip((0.0, 0.0), *pairs, strict=True)
    return sum(first), sum(second)


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
