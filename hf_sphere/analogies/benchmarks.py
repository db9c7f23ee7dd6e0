"""Evaluation of a model on benchmarks: configurations are selected on validation and reported on test questions."""

import hashlib
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hf_sphere.analogies.evaluation import Grid, Scores, search_templates, untuned_configuration
from hf_sphere.analogies.questions import Question, chance_level, choice_counts
from hf_sphere.analogies.scoring import build_scoring, scoring_class
from hf_sphere.analogies.scoring.base import Engine
from hf_sphere.analogies.search import bootstrap_interval, guessing_quantile, select_configuration
from hf_sphere.utils.files import atomic_file, read_json, write_json
from hf_sphere.utils.progress import progress_bar
from hf_sphere.utils.texts import write_csv

COLUMNS = {
    "accuracy": "eval_accuracy",
    "low": "eval_accuracy_low",
    "high": "eval_accuracy_high",
    "chance": "chance_level",
    "noise": "selection_noise_high",
    "untuned": "untuned_accuracy",
    "validation": "validation_accuracy",
}
"""Columns of the printed table, and the entries of a result that they show."""

LEGEND = """
In percent, on the test questions except for the last column; a tie of k choices counts 1/k. low, high: 95 % bootstrap
interval. chance: expected accuracy of guessing. noise: 95 % quantile of guessing; an accuracy below it is not
significant. untuned: without a search. validation: accuracy of the selected configuration on the validation questions,
which is above chance even for random scores.
"""

Splits = tuple[list[Question], list[Question]]
"""Validation questions, to select configurations on, and test questions, to report accuracies on."""


@dataclass(frozen=True)
class BenchmarkRun:
    """Evaluation of a model on benchmarks, with several scorings. Finished results are kept in a folder."""

    engine: Engine  # the model
    grid: Grid  # see `search_templates`
    benchmarks: Mapping[str, Splits]  # questions by name of the benchmark
    templates: Mapping[str, Sequence[str | None]]  # by scoring, the untuned one first; None for its default
    folder: Path  # folder of finished results
    disable_tqdm: bool = False  # show no progress bars

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the model."""
        return self.engine.language_model.fingerprint

    def result(self, benchmark: str, scoring: str) -> dict[str, Any]:
        """Read a result, or compute and write it; its file is named by a digest of everything that it depends on.

        It has `model`, `benchmark`, `scoring`, the entries of `compute`, and `predictions` for test questions.
        """
        questions = [[asdict(question) for question in split] for split in self.benchmarks[benchmark]]
        basis = [scoring, list(self.templates[scoring]), self.grid, questions, self.fingerprint]
        path = self.folder / f"{hashlib.sha256(json.dumps(basis).encode()).hexdigest()[:32]}.json"
        if not path.is_file():
            write_json(path, self.compute(benchmark, scoring))
        names = {"model": self.engine.language_model.name, "benchmark": benchmark, "scoring": scoring}
        return names | read_json(path)

    def print_results(self) -> list[dict[str, Any]]:
        """Compute or read the results and print them as a table.

        Scorings that the model does not support are skipped; if it supports none of them, this is an error.
        """
        model = self.engine.language_model
        print(f"\n{model.name}: {type(model.model).__name__}, {model.kind}, on {model.device} in {model.model.dtype}")
        supported = [scoring for scoring in self.templates if model.kind in scoring_class(scoring).kinds]
        skipped = ", ".join(scoring for scoring in self.templates if scoring not in supported)
        if not supported:
            raise ValueError(f"{model.name} has kind {model.kind!r}, which supports none of: {skipped}.")
        if skipped:
            print(f"skipped, not supported by models of kind {model.kind!r}: {skipped}")
        print(f"\n{'benchmark':<11}{'scoring':<21}{''.join(f'{name:>11}' for name in COLUMNS)}", flush=True)
        results = []
        for benchmark, scoring in itertools.product(self.benchmarks, supported):
            results.append(self.result(benchmark, scoring))
            print(table_line(results[-1]), flush=True)
        for average in averages(results):
            print(table_line(average), flush=True)
        return results

    def compute(self, benchmark: str, scoring: str) -> dict[str, Any]:
        """Select the best configuration on validation questions, and report its accuracy on test questions.

        The baselines are the accuracy without a search, that of guessing (`chance_level`) and its 95 % quantile
        (`selection_noise_high`), above which it is significant.
        """
        validation, test = self.benchmarks[benchmark]
        templates = self.templates[scoring]
        total = len(templates) * len(validation) + 2 * len(test)
        with progress_bar(total=total, desc=f"{benchmark} {scoring}", leave=False, disable=self.disable_tqdm) as bar:
            engine = replace(self.engine, progress=bar.update)
            searched = search_templates(engine, validation, scoring, templates, self.grid)
            selected = select_configuration(searched)
            answers, untuned = (
                Scores(build_scoring(**configuration).costs(test, engine), choice_counts(test))
                for configuration in (selected.configuration, untuned_configuration(scoring, templates[0]))
            )
        low, high = bootstrap_interval(answers.correct(test))
        return {
            "eval_accuracy": answers.accuracy(test),
            "eval_accuracy_low": low,
            "eval_accuracy_high": high,
            "chance_level": chance_level(test),
            "selection_noise_high": guessing_quantile(choice_counts(test)),
            "untuned_accuracy": untuned.accuracy(test),
            "validation_accuracy": selected.accuracy,
            "num_eval_questions": len(test),
            "num_validation_questions": len(validation),
            "num_configurations": len(searched),
            "num_tied": selected.tied,
            "configuration": selected.configuration,
            "predictions": answers.predictions.tolist(),
        }


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
    """Write accuracies as JSON to `path`, and `results.csv` and `predictions.json` to the same folder.

    The metrics of a single result are also at the top level.
    """
    tests = {name: map(asdict, test) for name, (_, test) in benchmarks.items()}
    questions = {name: [question | {"predictions": {}} for question in test] for name, test in tests.items()}
    for result in results:
        for question, prediction in zip(questions[result["benchmark"]], result["predictions"], strict=True):
            question["predictions"].setdefault(result["model"], {})[result["scoring"]] = prediction
    write_json(path.with_name("predictions.json"), questions)
    entries = [{name: value for name, value in result.items() if name != "predictions"} for result in results]
    single = entries[0] if len(entries) == 1 else {}
    top = {name: value for name, value in single.items() if name.startswith("eval_")}
    write_json(path, {**top, "results": entries, "averages": averages(entries)})
    table = path.with_name("results.csv")
    with atomic_file(table) as unfinished, unfinished.open("w", newline="", encoding="utf-8") as file:
        write_csv([entry | {"configuration": json.dumps(entry["configuration"])} for entry in entries], file)


def table_line(result: Mapping[str, Any]) -> str:
    """Format a result, or an average, as a line of the table; see `LEGEND`."""
    cells = (f"{100 * result[name]:.1f}" if name in result else "" for name in COLUMNS.values())
    return f"{result['benchmark']:<11}{result['scoring']:<21}{''.join(f'{cell:>11}' for cell in cells)}".rstrip()


def short_names(models: Sequence[str]) -> dict[str, str]:
    """Return the last path components of models, or their full names if these are not unique."""
    last = [Path(name).resolve().name if Path(name).exists() else name.rsplit("/", 1)[-1] for name in models]
    return dict(zip(models, last if len(set(last)) == len(last) else models, strict=True))
