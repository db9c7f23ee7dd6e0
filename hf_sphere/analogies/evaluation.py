"""Costs, predictions and accuracies of language models on analogy questions, and the search over configurations.

Configurations are selected on validation questions, and accuracies are reported on test questions.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pandas import DataFrame
from scipy.stats import binom
from torch import Tensor

from hf_sphere.analogies import scoring as scorings
from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.questions import Question, answers_of, chance_level, choice_counts
from hf_sphere.analogies.scoring import NUM_POSITIVE, Engine, Measurements, aggregate, scoring_class
from hf_sphere.utils.files import atomic_file, write_json
from hf_sphere.utils.texts import write_csv

NEGATIVE_WEIGHTS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

PUBLISHED_GRID = {"negative_aggregation": scorings.NEGATIVE_AGGREGATIONS[:15]}
"""Axis in which the grid of Ushio et al., ACL 2021, differs: only the first 12 of the 16 negative permutations."""

TIE = 1e-6
"""Difference of costs, relative to 1 + |cost|, up to which choices tie: rounding errors of a model in float32."""

ROUNDING = 1e-9  # of a mean of values 1/k, which depends on their order

COLUMNS = {
    "accuracy": "eval_accuracy",
    "low": "eval_accuracy_low",
    "high": "eval_accuracy_high",
    "chance": "chance_level",
    "untuned": "untuned_accuracy",
    "validation": "validation_accuracy",
}
"""Columns of the printed table, and the entries of a result that they show."""

LEGEND = """
In percent, on the test questions except for the last column; a tie of k choices counts 1/k. low, high: 95 % bootstrap
interval. chance: expected accuracy of guessing. untuned: without a search. validation: accuracy of the selected
configuration on the validation questions, which is above chance even for random scores.
"""

Splits = tuple[list[Question], list[Question]]
"""Validation questions, to select configurations on, and test questions, to report accuracies on."""

Grid = Literal["full", "published", "none"]
"""Search space besides templates: all weights and aggregations, those of Ushio et al., or none."""


def lowest_costs(costs: Tensor) -> Tensor:
    """Return whether choices have the lowest cost of their question, (K, ...), boolean; several if they tie."""
    lowest = costs.amin(dim=0)
    return costs <= lowest + TIE * (1 + lowest.abs())


def probability_correct(costs: Tensor, answers: Tensor) -> Tensor:
    """Return the probability that answers (Q,) are correct if ties are broken at random, (K, ..., Q) -> (..., Q)."""
    lowest = lowest_costs(costs)
    correct = lowest.take_along_dim(answers.expand(1, *lowest.shape[1:]), dim=0)[0]
    return correct.double() / lowest.sum(dim=0, dtype=torch.int16)


@dataclass(frozen=True)
class Scores:
    """Costs of the choices of questions.

    Attributes:
        costs: (Q, K), float64, lower is better; infinite for choices that a question does not have.
    """

    costs: Tensor

    @property
    def predictions(self) -> Tensor:
        """Index of the choice with the lowest cost, the first one on a tie, (Q,), int64."""
        return lowest_costs(self.costs.T).byte().argmax(dim=0)

    def correct(self, questions: Sequence[Question]) -> Tensor:
        """Whether answers are correct, (Q,), float64: 1/k for a tie of k choices with the correct one."""
        if (counts := self.costs.isfinite().sum(1).tolist()) != (asked := choice_counts(questions).tolist()):
            what = f"the costs are of {len(counts)} questions with {sum(counts)} choices in all"
            raise ValueError(f"{what}, not of these {len(asked)} with {sum(asked)}, or their order differs.")
        return probability_correct(self.costs.T, answers_of(questions))

    def accuracy(self, questions: Sequence[Question]) -> float:
        """Mean of `correct`."""
        return float(self.correct(questions).mean())

    def by_question(self) -> list[list[float]]:
        """Return one list of costs per question, with one cost per choice."""
        return [costs[costs.isfinite()].tolist() for costs in self.costs]


def score_questions(
    questions: Sequence[Question],
    language_model: LanguageModel,
    scoring: str = "perplexity",
    *,
    batch_size: int | None = None,
    **options: Any,
) -> Scores:
    """Answer questions with a model.

    Args:
        questions: Q questions of up to K choices each.
        language_model: The model.
        scoring: One of `scoring_names()`.
        batch_size: Sequences per batch; chosen for speed by default.
        **options: Options of the scoring, such as `template`, `positive_aggregation`, `negative_aggregation`,
            `negative_weight`, `weight_head`, `weight_tail`, `alpha`, `pmi_aggregation`; see its class.

    Returns:
        The costs of the choices and the predictions.

    Raises:
        TypeError: If the scoring does not have an option.
        ValueError: If the scoring or a value is unknown or not supported by the model.

    Example:
        >>> model = LanguageModel.load("bert-base-cased")  # doctest: +SKIP
        >>> questions = load_questions(config="sat")  # doctest: +SKIP
        >>> scores = score_questions(questions, model, "marginal_bias", weight_head=0.2)  # doctest: +SKIP
        >>> scores.accuracy(questions), chance_level(questions)  # doctest: +SKIP
    """
    return Scores(_build(scoring, **options).costs(questions, Engine(language_model, batch_size)))


def measure_questions(
    questions: Sequence[Question],
    language_model: LanguageModel,
    scoring: str = "perplexity",
    *,
    template: str | None = None,
    batch_size: int | None = None,
) -> Measurements:
    """Run a model once for all weights and aggregations of a scoring, as input of `search_configurations`.

    For arguments and errors, see `score_questions`; the default `template` is the one of the scoring.

    Example:
        >>> measurements = measure_questions(questions, language_model, "marginal_bias")  # doctest: +SKIP
    """
    return _build(**_configuration(scoring, template)).measure(questions, Engine(language_model, batch_size))


@dataclass(frozen=True)
class SearchResult:
    """Accuracies of C configurations.

    Attributes:
        configurations: Their options, as arguments of `score_questions`.
        accuracy: (C,), float64; a tie of k choices counts 1/k if one of them is correct.
    """

    configurations: Sequence[dict[str, Any]] = field(repr=False)
    accuracy: Tensor

    def __len__(self) -> int:
        return len(self.configurations)


@dataclass(frozen=True)
class Selection:
    """The configuration with the highest accuracy on validation questions.

    Attributes:
        configuration: Its options, as arguments of `score_questions`.
        accuracy: Its accuracy on the validation questions, which is biased upwards.
        tied: Number of configurations with this accuracy; the first one is selected.
    """

    configuration: dict[str, Any]
    accuracy: float
    tied: int


def search_configurations(
    measurements: Measurements, *, grid: Mapping[str, Sequence[Any]] | None = None
) -> SearchResult:
    """Answer questions with every configuration of a grid.

    The axes are `negative_weight`, the options of the scoring (`weight_head` and `weight_tail`, or `alpha` and
    `pmi_aggregation`), `positive_aggregation` and `negative_aggregation`. The configurations are their product in this
    order; the last axis varies fastest. Each axis starts with its simplest value, so that the simplest of equally
    accurate configurations comes first. Without a negative weight the negative aggregation makes no difference; such
    configurations are kept, as in the published grid.

    Args:
        measurements: Measurements of questions with answers by `measure_questions`.
        grid: Values of axes that differ from the default; `PUBLISHED_GRID` is the published one: 24,750 configurations
            of `marginal_bias`; the default has 31,350.

    Raises:
        ValueError: If an answer is missing, or the scoring does not have an option or value of the grid.

    Example:
        >>> search_configurations(measurements).accuracy.max()  # doctest: +SKIP
    """
    scoring, answers = measurements.scoring, answers_of(measurements.questions)
    axes: dict[str, Sequence[Any]] = {
        "negative_weight": NEGATIVE_WEIGHTS,
        **scoring.grid,
        "positive_aggregation": scorings.POSITIVE_AGGREGATIONS,
        "negative_aggregation": scorings.NEGATIVE_AGGREGATIONS,
        **(grid or {}),
    }
    weights, positives, negatives = (axes[name] for name in axes if name not in scoring.grid)
    for name, choices in axes.items():
        for value in choices:
            dataclasses.replace(scoring, **{name: value})  # an error for a value that the scoring does not have
    accuracies: list[Tensor] = []  # (weights, positive aggregations, negative aggregations), by setting
    for values in itertools.product(*(axes[name] for name in scoring.grid)):
        setting = dict(zip(scoring.grid, values, strict=True))
        costs = dataclasses.replace(scoring, **setting).permutation_costs(measurements.terms)
        positive = torch.stack([aggregate(costs[:, :NUM_POSITIVE], name, 1) for name in positives])
        negative = torch.stack([aggregate(costs[:, NUM_POSITIVE:], name, 1) for name in negatives])
        positive = positive.where(measurements.exists, torch.inf).movedim(-1, 0).unsqueeze(2).contiguous()
        negative = negative.where(measurements.exists, 0.0).movedim(-1, 0).unsqueeze(1).contiguous()
        correct = [probability_correct(positive - weight * negative, answers).mean(dim=-1) for weight in weights]
        accuracies.append(torch.stack(correct))
    fixed = _configuration(scoring.name, scoring.template)
    configurations = [fixed | dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return SearchResult(configurations, torch.stack(accuracies, dim=1).flatten())


def select_configuration(validation: SearchResult) -> Selection:
    """Select the most accurate configuration of a search on validation questions, the simplest one on a tie.

    Report only its accuracy on other questions, computed with `score_questions`: the best of many configurations is
    good by chance on the questions of the search. With five choices, where guessing reaches 20 %, the best of the
    31,350 configurations of `marginal_bias` reaches about 27 % on 374 questions and 44 % on 37 with random scores.

    Example:
        >>> selection = select_configuration(search_configurations(measurements))  # doctest: +SKIP
    """
    best = validation.accuracy >= validation.accuracy.max() - ROUNDING
    first = int(best.byte().argmax())
    return Selection(validation.configurations[first], float(validation.accuracy[first]), int(best.sum()))


def search_templates(
    engine: Engine, questions: Sequence[Question], scoring: str, templates: Sequence[str | None], grid: Grid = "full"
) -> SearchResult:
    """Answer questions with every configuration of a scoring and each of its templates, None for its default."""
    configurations = [_configuration(scoring, template) for template in templates]
    if grid == "none":
        scores = [Scores(_build(**one).costs(questions, engine)).accuracy(questions) for one in configurations]
        return SearchResult(configurations, torch.tensor(scores, dtype=torch.float64))
    axes = PUBLISHED_GRID if grid == "published" else None
    results = [search_configurations(_build(**one).measure(questions, engine), grid=axes) for one in configurations]
    every = [configuration for result in results for configuration in result.configurations]
    return SearchResult(every, torch.cat([result.accuracy for result in results]))


def _build(scoring: str, **options: Any) -> scorings.Scoring:
    return scoring_class(scoring)(**options)


def _configuration(scoring: str, template: str | None) -> dict[str, Any]:
    """Return the default configuration of a scoring with a template, None for its default template."""
    return {"scoring": scoring} if template is None else {"scoring": scoring, "template": template}


def evaluate_scoring(
    engine: Engine, splits: Splits, scoring: str, templates: Sequence[str | None], grid: Grid = "full"
) -> dict[str, Any]:
    """Select the best configuration on validation questions, and report its accuracy on test questions."""
    validation, test = splits
    searched = search_templates(engine, validation, scoring, templates, grid)
    selected = select_configuration(searched)
    reported = selected.configuration, _configuration(scoring, templates[0])
    answers, untuned = (Scores(_build(**each).costs(test, engine)) for each in reported)
    accuracy = answers.accuracy(test)
    # Percentile bootstrap (Efron, 1979): the number of correct answers of a resample is binomially distributed.
    low, high = binom.interval(0.95, len(test), accuracy)
    return {
        "eval_accuracy": accuracy,
        "eval_accuracy_low": float(low) / len(test),
        "eval_accuracy_high": float(high) / len(test),
        "chance_level": chance_level(test),
        "untuned_accuracy": untuned.accuracy(test),
        "validation_accuracy": selected.accuracy,
        "num_eval_questions": len(test),
        "num_validation_questions": len(validation),
        "num_configurations": len(searched),
        "num_tied": selected.tied,
        "configuration": selected.configuration,
        "predictions": answers.predictions.tolist(),
    }


def evaluate_model(
    engine: Engine, benchmarks: Mapping[str, Splits], templates: Mapping[str, Sequence[str | None]], grid: Grid = "full"
) -> list[dict[str, Any]]:
    """Evaluate a model with several scorings, by name with their templates, where it supports them; print a table."""
    model = engine.language_model
    print(f"\n{model.name}: {type(model.model).__name__}, {model.kind}, on {model.device} in {model.model.dtype}")
    supported = [scoring for scoring in templates if model.kind in scoring_class(scoring).kinds]
    skipped = ", ".join(scoring for scoring in templates if scoring not in supported)
    if not supported:
        raise ValueError(f"{model.name} has kind {model.kind!r}, which supports none of: {skipped}.")
    if skipped:
        print(f"skipped, not supported by models of kind {model.kind!r}: {skipped}")
    print(f"\n{'benchmark':<11}{'scoring':<21}{''.join(f'{name:>11}' for name in COLUMNS)}", flush=True)
    results = []
    for (name, splits), scoring in itertools.product(benchmarks.items(), supported):
        result = evaluate_scoring(engine, splits, scoring, templates[scoring], grid)
        results.append({"model": model.name, "benchmark": name, "scoring": scoring} | result)
        print(table_line(results[-1]), flush=True)
    for average in averages(results):
        print(table_line(average), flush=True)
    return results


def averages(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Average results over benchmarks per model and scoring, if there are several, with equal weights."""
    groups = DataFrame(results).groupby(["model", "scoring"], sort=False)
    means = groups[["eval_accuracy", "chance_level", "untuned_accuracy", "validation_accuracy"]].mean()
    return [{"benchmark": "average"} | row for row in means[groups.size() > 1].reset_index().to_dict("records")]


def write_results(path: Path, results: Sequence[Mapping[str, Any]], benchmarks: Mapping[str, Splits]) -> None:
    """Write accuracies as JSON to `path`, and `results.csv` and `predictions.json` to the same folder."""
    asked = {name: [dataclasses.asdict(question) for question in test] for name, (_, test) in benchmarks.items()}
    for result in results:
        for question, prediction in zip(asked[result["benchmark"]], result["predictions"], strict=True):
            of_models = question.setdefault("predictions", {})
            of_models.setdefault(result["model"], {})[result["scoring"]] = prediction
    write_json(path.with_name("predictions.json"), asked)
    entries = [{name: value for name, value in result.items() if name != "predictions"} for result in results]
    write_json(path, {"results": entries, "averages": averages(entries)})
    with atomic_file(path.with_name("results.csv")) as table, table.open("w", newline="", encoding="utf-8") as file:
        write_csv([entry | {"configuration": json.dumps(entry["configuration"])} for entry in entries], file)


def table_line(result: Mapping[str, Any]) -> str:
    """Format a result, or an average, as a line of the table; see `LEGEND`."""
    cells = (f"{100 * result[name]:.1f}" if name in result else "" for name in COLUMNS.values())
    return f"{result['benchmark']:<11}{result['scoring']:<21}{''.join(f'{cell:>11}' for cell in cells)}".rstrip()
