"""Accuracy of a model: configurations are searched on validation questions, and the best one is tested."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.questions import Question, answers_of, chance_level, check_questions, choice_counts
from hf_sphere.analogies.scoring import build_scoring, scoring_class
from hf_sphere.analogies.scoring.base import Engine, PermutedScoring
from hf_sphere.analogies.search import (
    PUBLISHED_GRID,
    SearchResult,
    join_results,
    search_configurations,
    select_configuration,
)
from hf_sphere.analogies.statistics import bootstrap_interval, guessing_quantile, selection_noise


def can_score(language_model: LanguageModel, scoring: str) -> bool:
    """Return whether a scoring supports a model: sentences require likelihoods, hidden words require mask tokens."""
    return language_model.kind in scoring_class(scoring).kinds


@dataclass(frozen=True)
class AnalogyEvaluation:
    """Searches configurations for one model, and answers questions with one configuration.

    Attributes:
        engine: The model.
        grid: Search space besides templates: `full`, all weights and aggregations; `published`, those of Ushio et al.;
            `none`, templates only.
    """

    engine: Engine
    grid: Literal["full", "published", "none"] = "full"

    def search(self, questions: Sequence[Question], scoring: str, templates: Sequence[str | None]) -> SearchResult:
        """Answer questions with every configuration of a scoring and each of the templates.

        Args:
            questions: Questions with answers.
            scoring: One of `scoring_names()`. One without aggregations has one configuration per template.
            templates: One or more templates of the scoring; None for its default.
        """
        answers_of(questions)  # raises an error if one is missing
        configurations = [untuned_configuration(scoring, template) for template in templates]
        built = [build_scoring(**configuration) for configuration in configurations]
        if self.grid == "none" or not issubclass(scoring_class(scoring), PermutedScoring):
            columns = {"scoring": (scoring,) * len(templates), "template": tuple(templates)}
            predictions = [self.answer(questions, configuration) for configuration in configurations]
            return SearchResult.of_predictions(columns, torch.stack(predictions), questions)
        grid = PUBLISHED_GRID if self.grid == "published" else None
        measured = (one.measure(questions, self.engine) for one in built if isinstance(one, PermutedScoring))
        return join_results([search_configurations(one, questions, grid=grid) for one in measured])

    def answer(self, questions: Sequence[Question], configuration: Mapping[str, Any]) -> Tensor:
        """Return the choices of Q questions, (Q,) int64, by a configuration like those of `SearchResult`.

        Only the permutations that it needs are scored.
        """
        check_questions(questions)
        return build_scoring(**configuration).costs(questions, self.engine).argmin(dim=1)


def untuned_configuration(scoring: str, template: str | None) -> dict[str, Any]:
    """Return the default configuration of a scoring with a template, None for its default template."""
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
    """Report the accuracy of the selected configuration, with the baselines to compare it with.

    Args:
        validation: Search on validation questions.
        test: Q test questions.
        answers: (Q,), predictions of the configuration that `select_configuration(validation)` selects.
        untuned: (Q,), predictions of the default configuration.
        num_shuffles: Number of searches on shuffled scores, for the noise level on validation questions.
        seed: Seed of the noise level.

    Returns:
        By name: `eval_accuracy` with its confidence interval; `chance_level`, which is also the expected accuracy of
        the selected configuration if the scores are noise; `selection_noise_high`, its 95 % quantile in that case;
        `untuned_accuracy`; `validation_accuracy` and, for shuffled scores, its mean `validation_noise` and 95 %
        quantile `validation_noise_high`; the numbers of questions and configurations; and the options of the selected
        configuration.
    """
    selected = select_configuration(validation)
    noise = selection_noise(validation, num_repeats=num_shuffles, seed=seed)
    references = answers_of(test)
    low, high = bootstrap_interval(answers == references)
    return {
        "eval_accuracy": float((answers == references).double().mean()),
        "eval_accuracy_low": low,
        "eval_accuracy_high": high,
        "chance_level": chance_level(test),
        "selection_noise_high": guessing_quantile(choice_counts(test)),
        "untuned_accuracy": float((untuned == references).double().mean()),
        "validation_accuracy": selected.accuracy,
        "validation_noise": noise.mean,
        "validation_noise_high": noise.quantile,
        "num_eval_questions": len(test),
        "num_validation_questions": len(validation.answers),
        "num_configurations": len(validation),
        "num_tied": selected.tied,
        "configuration": selected.configuration,
    }
