"""Evaluation of a model on benchmarks; results are stored on disk and formatted as tables and files."""

import csv
import hashlib
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hf_sphere.analogies.evaluation import AnalogyEvaluation, can_score, report_accuracy, untuned_configuration
from hf_sphere.analogies.questions import Question
from hf_sphere.analogies.search import select_configuration
from hf_sphere.utils.files import atomic_file, read_json, write_json

HEADER = (
    f"\n{'benchmark':<11}{'scoring':<21}{'accuracy':>9}{'interval':>16}{'chance':>8}{'noise':>7}{'untuned':>9}"
    f"{'val. accuracy':>16}{'val. noise':>11}"
)
"""Header of the table whose lines `table_line` formats."""

LEGEND = """
In percent, on the test questions except for the last two columns. interval: 95 % bootstrap interval. chance: expected
accuracy of guessing. noise: 95 % quantile of guessing; an accuracy below it is not significant. untuned: without a
search. val. accuracy: accuracy of the selected configuration on the validation questions. val. noise: 95 % quantile of
the same search on shuffled scores.
"""

Splits = tuple[list[Question], list[Question]]
"""Validation questions, to select configurations on, and test questions, to report accuracies on."""


@dataclass(frozen=True)
class BenchmarkRun:
    """Evaluation of a model on benchmarks, with several scorings. Finished results are kept in a folder."""

    evaluation: AnalogyEvaluation  # the model
    benchmarks: Mapping[str, Splits]  # questions by name of the benchmark
    templates: Mapping[str, Sequence[str | None]]  # by scoring, the untuned one first; None for its default
    folder: Path  # folder of finished results
    num_shuffles: int = 200  # see `report_accuracy`
    seed: int = 0  # see `report_accuracy`
    disable_tqdm: bool = False  # show no progress bars

    def path(self, benchmark: str, scoring: str) -> Path:
        """Return the file of a result, named by a digest of everything that the result depends on."""
        settings = {"grid": self.evaluation.grid, "num_shuffles": self.num_shuffles, "seed": self.seed}
        questions = [[asdict(question) for question in split] for split in self.benchmarks[benchmark]]
        fingerprint = self.evaluation.engine.language_model.fingerprint
        basis = [scoring, list(self.templates[scoring]), settings, questions, fingerprint]
        return self.folder / f"{hashlib.sha256(json.dumps(basis).encode()).hexdigest()[:32]}.json"

    def result(self, benchmark: str, scoring: str) -> dict[str, Any]:
        """Read a result, or compute and write it.

        Returns:
            `model`, `benchmark`, `scoring`, the entries of `report_accuracy`, and `predictions` for the test questions.
        """
        path = self.path(benchmark, scoring)
        if not path.is_file():
            write_json(path, self._compute(benchmark, scoring))
        names = {"model": self.evaluation.engine.language_model.name, "benchmark": benchmark, "scoring": scoring}
        return names | read_json(path)

    def print_results(self) -> list[dict[str, Any]]:
        """Compute or read the results and print them as a table; scorings that the model does not support are skipped.

        Raises:
            ValueError: If the model supports none of the scorings.
        """
        model = self.evaluation.engine.language_model
        print(f"\n{model.name}: {type(model.model).__name__}, {model.kind}, on {model.device} in {model.model.dtype}")
        supported = {scoring: names for scoring, names in self.templates.items() if can_score(model, scoring)}
        skipped = ", ".join(scoring for scoring in self.templates if scoring not in supported)
        if not supported:
            raise ValueError(f"{model.name} has kind {model.kind!r}, which supports none of: {skipped}.")
        if skipped:
            print(f"skipped, not supported by models of kind {model.kind!r}: {skipped}")
        print(HEADER, flush=True)
        results = []
        for benchmark, scoring in itertools.product(self.benchmarks, supported):
            results.append(self.result(benchmark, scoring))
            print(table_line(results[-1]), flush=True)
        for average in averages(results):
            print(table_line(average), flush=True)
        return results

    def _compute(self, benchmark: str, scoring: str) -> dict[str, Any]:
        validation, test = self.benchmarks[benchmark]
        templates = self.templates[scoring]
        untuned = untuned_configuration(scoring, templates[0])
        total = len(templates) * len(validation) + 2 * len(test)
        with tqdm(total=total, desc=f"{benchmark} {scoring}", leave=False, disable=self.disable_tqdm) as bar:
            engine = replace(self.evaluation.engine, progress=bar.update)
            evaluation = replace(self.evaluation, engine=engine)
            search = evaluation.search(validation, scoring, templates)
            selected = select_configuration(search).configuration
            answers = evaluation.answer(test, selected)
            baseline = answers if selected == untuned else evaluation.answer(test, untuned)
        settings = {"num_shuffles": self.num_shuffles, "seed": self.seed}
        return report_accuracy(search, test, answers, baseline, **settings) | {"predictions": answers.tolist()}


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
    with (
        atomic_file(path.with_name("results.csv")) as unfinished,
        open(unfinished, "w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, list(entries[0]))
        writer.writeheader()
        writer.writerows(entry | {"configuration": json.dumps(entry["configuration"])} for entry in entries)


def table_line(result: Mapping[str, Any]) -> str:
    """Format a result, or an average, as a line of the table; see `LEGEND`."""

    def percent(name: str) -> str:
        return f"{100 * result[name]:.1f}" if name in result else ""

    interval = f"{percent('eval_accuracy_low')} to {percent('eval_accuracy_high')}" if "configuration" in result else ""
    return (
        f"{result['benchmark']:<11}{result['scoring']:<21}{percent('eval_accuracy'):>9}{interval:>16}"
        f"{percent('chance_level'):>8}{percent('selection_noise_high'):>7}{percent('untuned_accuracy'):>9}"
        f"{percent('validation_accuracy'):>16}{percent('validation_noise_high'):>11}"
    ).rstrip()


def short_names(models: Sequence[str]) -> dict[str, str]:
    """Return the last path components of models, or their full names if these are not unique."""
    last = [Path(name).resolve().name if Path(name).exists() else name.rsplit("/", 1)[-1] for name in models]
    return dict(zip(models, last if len(set(last)) == len(last) else models, strict=True))
