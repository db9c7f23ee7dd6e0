"""Evaluation of a model on benchmarks: configurations are selected on validation and reported on test questions."""

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from scipy.stats import binom

from hf_sphere.analogies.evaluation import (
    PUBLISHED_GRID,
    Scores,
    SearchResult,
    probability_correct,
    search_configurations,
    select_configuration,
)
from hf_sphere.analogies.questions import Question, answers_of, chance_level, choice_counts
from hf_sphere.analogies.scoring import build_scoring, scoring_class
from hf_sphere.analogies.scoring.base import Engine
from hf_sphere.utils.files import atomic_file, write_json
from hf_sphere.utils.progress import progress_bar
from hf_sphere.utils.texts import write_csv

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


def search_templates(
    engine: Engine, questions: Sequence[Question], scoring: str, templates: Sequence[str | None], grid: Grid = "full"
) -> SearchResult:
    """Answer questions with every configuration of a scoring and each of its templates, None for its default."""
    configurations = [untuned_configuration(scoring, template) for template in templates]
    scorings = [build_scoring(**configuration) for configuration in configurations]
    if grid == "none":
        costs = torch.stack([one.costs(questions, engine).T for one in scorings], dim=1)
        return SearchResult(configurations, probability_correct(costs, answers_of(questions)).mean(dim=-1))
    axes = PUBLISHED_GRID if grid == "published" else None
    results = [search_configurations(one.measure(questions, engine), grid=axes) for one in scorings]
    every = [configuration for result in results for configuration in result.configurations]
    return SearchResult(every, torch.cat([result.accuracy for result in results]))


def untuned_configuration(scoring: str, template: str | None) -> dict[str, Any]:
    """Return the default configuration of a scoring with a template, None for its default template."""
    return {"scoring": scoring} if template is None else {"scoring": scoring, "template": template}


def evaluate_scoring(
    engine: Engine, splits: Splits, scoring: str, templates: Sequence[str | None], grid: Grid = "full"
) -> dict[str, Any]:
    """Select the best configuration on validation questions, and report its accuracy on test questions."""
    validation, test = splits
    searched = search_templates(engine, validation, scoring, templates, grid)
    selected = select_configuration(searched)
    answers, untuned = (
        Scores(build_scoring(**configuration).costs(test, engine), choice_counts(test))
        for configuration in (selected.configuration, untuned_configuration(scoring, templates[0]))
    )
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
    engine: Engine,
    benchmarks: Mapping[str, Splits],
    templates: Mapping[str, Sequence[str | None]],
    grid: Grid = "full",
    *,
    disable_tqdm: bool = False,
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
    for (name, (validation, test)), scoring in itertools.product(benchmarks.items(), supported):
        total = len(templates[scoring]) * len(validation) + 2 * len(test)
        with progress_bar(total=total, desc=f"{name} {scoring}", leave=False, disable=disable_tqdm) as bar:
            counted = replace(engine, progress=bar.update)
            result = evaluate_scoring(counted, (validation, test), scoring, templates[scoring], grid)
        results.append({"model": model.name, "benchmark": name, "scoring": scoring} | result)
        print(table_line(results[-1]), flush=True)
    for average in averages(results):
        print(table_line(average), flush=True)
    return results


def averages(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Average results over benchmarks per model and scoring, if there are several, with equal weights."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["model"], result["scoring"]), []).append(result)
    names = ("eval_accuracy", "chance_level", "untuned_accuracy", "validation_accuracy")
    return [
        {"model": model, "benchmark": "average", "scoring": scoring}
        | {name: statistics.mean(result[name] for result in group) for name in names}
        for (model, scoring), group in groups.items()
        if len(group) > 1
    ]


def write_results(path: Path, results: Sequence[Mapping[str, Any]], benchmarks: Mapping[str, Splits]) -> None:
    """Write accuracies as JSON to `path`, and `results.csv` and `predictions.json` to the same folder."""
    questions = {
        name: [asdict(question) | {"predictions": {}} for question in test] for name, (_, test) in benchmarks.items()
    }
    for result in results:
        for question, prediction in zip(questions[result["benchmark"]], result["predictions"], strict=True):
            question["predictions"].setdefault(result["model"], {})[result["scoring"]] = prediction
    write_json(path.with_name("predictions.json"), questions)
    entries = [{name: value for name, value in result.items() if name != "predictions"} for result in results]
    single = entries[0] if len(entries) == 1 else {}
    top = {name: value for name, value in single.items() if name.startswith("eval_")}
    write_json(path, {**top, "results": entries, "averages": averages(entries)})
    with atomic_file(path.with_name("results.csv")) as table, table.open("w", newline="", encoding="utf-8") as file:
        write_csv([entry | {"configuration": json.dumps(entry["configuration"])} for entry in entries], file)


def table_line(result: Mapping[str, Any]) -> str:
    """Format a result, or an average, as a line of the table; see `LEGEND`."""
    cells = (f"{100 * result[name]:.1f}" if name in result else "" for name in COLUMNS.values())
    return f"{result['benchmark']:<11}{result['scoring']:<21}{''.join(f'{cell:>11}' for cell in cells)}".rstrip()
