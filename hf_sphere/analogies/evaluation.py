"""Evaluation of a model: costs and predictions, accuracies of searched configurations, and results on benchmarks."""

import hashlib
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hf_sphere.analogies import search
from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.likelihoods import ScoreCache
from hf_sphere.analogies.questions import Question, answers_of, chance_level, check_questions, choice_counts
from hf_sphere.analogies.scoring import build_scoring, scoring_class
from hf_sphere.analogies.scoring.base import Engine, Measurements, Scoring
from hf_sphere.analogies.scoring.sentences import SentenceScoring
from hf_sphere.analogies.search import SearchResult, lowest_costs, probability_correct, select_configuration
from hf_sphere.utils.files import atomic_file, read_json, write_json
from hf_sphere.utils.progress import progress_bar
from hf_sphere.utils.texts import write_csv

HEADER = (
    f"\n{'benchmark':<11}{'scoring':<21}{'accuracy':>9}{'interval':>16}{'chance':>8}{'noise':>7}{'untuned':>9}"
    f"{'val. accuracy':>16}{'val. noise':>11}"
)
"""Header of the table whose lines `table_line` formats."""

LEGEND = """
In percent, on the test questions except for the last two columns; a tie of k choices counts 1/k. interval: 95 %
bootstrap interval. chance: expected accuracy of guessing. noise: 95 % quantile of guessing; an accuracy below it is not
significant. untuned: without a search. val. accuracy: accuracy of the selected configuration on the validation
questions. val. noise: 95 % quantile of the same search on shuffled scores.
"""

Splits = tuple[list[Question], list[Question]]
"""Validation questions, to select configurations on, and test questions, to report accuracies on."""

Grid = Literal["full", "published", "none"]
"""Search space besides templates: all weights and aggregations, those of Ushio et al., or none."""


@dataclass(frozen=True)
class Scores:
    """Costs of the choices of questions.

    Attributes:
        costs: (Q, K), float64, lower is better; infinite for choices that a question does not have.
        num_choices: (Q,), number of choices per question.
    """

    costs: Tensor
    num_choices: Tensor

    @property
    def predictions(self) -> Tensor:
        """Index of the choice with the lowest cost, the first one on a tie, (Q,), int64."""
        return lowest_costs(self.costs.T).byte().argmax(dim=0)

    def correct(self, questions: Sequence[Question]) -> Tensor:
        """Whether answers are correct, (Q,), float64: 1/k for a tie of k choices, one of which is correct."""
        return probability_correct(lowest_costs(self.costs.T), answers_of(questions))

    def accuracy(self, questions: Sequence[Question]) -> float:
        """Mean of `correct`."""
        return float(self.correct(questions).mean())

    def by_question(self) -> list[list[float]]:
        """Return one list of costs per question, with one cost per choice."""
        return [costs[:count] for costs, count in zip(self.costs.tolist(), self.num_choices.tolist(), strict=True)]


def score_questions(
    questions: Sequence[Question],
    language_model: LanguageModel,
    scoring: str = "perplexity",
    *,
    batch_size: int | None = None,
    cache: ScoreCache | None = None,
    progress: bool = False,
    **options: Any,
) -> Scores:
    """Answer questions with a model.

    Args:
        questions: Q questions of up to K choices each.
        language_model: The model.
        scoring: One of `scoring_names()`.
        batch_size: Sequences per batch; chosen for speed by default.
        cache: Cache of perplexities, for scorings of sentences.
        progress: Show a progress bar.
        **options: Options of the scoring, such as `template`, `positive_aggregation`, `negative_aggregation`,
            `negative_weight`, `weight_head`, `weight_tail`, `alpha`, `pmi_aggregation`; see its class.

    Returns:
        The costs of the choices and the predictions.

    Raises:
        ValueError: If a question is invalid, or the scoring, an option or a value is unknown or not supported by the
            model.

    Example:
        >>> model = LanguageModel.load("bert-base-cased")  # doctest: +SKIP
        >>> questions = load_questions(config="sat")  # doctest: +SKIP
        >>> scores = score_questions(questions, model, "marginal_bias", weight_head=0.2)  # doctest: +SKIP
        >>> scores.accuracy(questions), chance_level(questions)  # doctest: +SKIP
    """
    built = build_scoring(scoring, **options)
    _check(built, questions, cache)
    with progress_bar(total=len(questions), unit="question", disable=not progress) as bar:
        costs = built.costs(questions, Engine(language_model, batch_size, cache, bar.update))
    return Scores(costs, choice_counts(questions))


def measure_questions(
    questions: Sequence[Question],
    language_model: LanguageModel,
    scoring: str = "perplexity",
    *,
    template: str | None = None,
    batch_size: int | None = None,
    cache: ScoreCache | None = None,
    progress: bool = False,
) -> Measurements:
    """Run a model once for all weights and aggregations of a scoring, as input of `search_configurations`.

    Arguments and errors are those of `score_questions`; without a `template`, that of the scoring is used.

    Example:
        >>> measurements = measure_questions(questions, language_model, "marginal_bias")  # doctest: +SKIP
    """
    built = build_scoring(scoring, **({} if template is None else {"template": template}))
    _check(built, questions, cache)
    with progress_bar(total=len(questions), unit="question", disable=not progress) as bar:
        return built.measure(questions, Engine(language_model, batch_size, cache, bar.update))


def _check(scoring: Scoring, questions: Sequence[Question], cache: ScoreCache | None) -> None:
    check_questions(questions)
    if cache is not None and not isinstance(scoring, SentenceScoring):
        raise ValueError(f"scoring {scoring.name!r} has no perplexities to cache; omit `cache`.")


def search_templates(
    engine: Engine, questions: Sequence[Question], scoring: str, templates: Sequence[str | None], grid: Grid = "full"
) -> SearchResult:
    """Answer questions with every configuration of a scoring and each of its templates, None for its default."""
    answers_of(questions)  # raises an error if one is missing
    configurations = [untuned_configuration(scoring, template) for template in templates]
    if grid == "none":
        columns = {"scoring": (scoring,) * len(templates), "template": tuple(templates)}
        costs = [answer_questions(engine, questions, configuration).costs.T for configuration in configurations]
        return SearchResult.of_choices(columns, lowest_costs(torch.stack(costs, dim=1)), questions)
    axes = search.PUBLISHED_GRID if grid == "published" else None
    measured = (build_scoring(**configuration).measure(questions, engine) for configuration in configurations)
    results = [search.search_configurations(measurements, questions, grid=axes) for measurements in measured]
    return search.join_results(results)


def answer_questions(engine: Engine, questions: Sequence[Question], configuration: Mapping[str, Any]) -> Scores:
    """Answer questions with a configuration like those of `SearchResult`; only the permutations it needs are scored."""
    check_questions(questions)
    return Scores(build_scoring(**configuration).costs(questions, engine), choice_counts(questions))


def untuned_configuration(scoring: str, template: str | None) -> dict[str, Any]:
    """Return the default configuration of a scoring with a template, None for its default template."""
    return {"scoring": scoring} if template is None else {"scoring": scoring, "template": template}


def report_accuracy(
    validation: SearchResult, test: Sequence[Question], answers: Scores, untuned: Scores, **shuffling: int
) -> dict[str, Any]:
    """Report the accuracy of the selected configuration, with the baselines to compare it with.

    `answers` are the scores of the test questions with the configuration that `select_configuration(validation)`
    selects, and `untuned` those with the default configuration. The noise levels are the expected accuracy
    (`chance_level`, `validation_noise`) and its 95 % quantile (`selection_noise_high`, `validation_noise_high`) if the
    scores are noise, on validation questions by searches on shuffled scores, with the options of `selection_noise`.
    """
    selected = select_configuration(validation)
    noise = search.selection_noise(validation, **shuffling)
    low, high = search.bootstrap_interval(answers.correct(test))
    return {
        "eval_accuracy": answers.accuracy(test),
        "eval_accuracy_low": low,
        "eval_accuracy_high": high,
        "chance_level": chance_level(test),
        "selection_noise_high": search.guessing_quantile(choice_counts(test)),
        "untuned_accuracy": untuned.accuracy(test),
        "validation_accuracy": selected.accuracy,
        "validation_noise": noise.mean,
        "validation_noise_high": noise.quantile,
        "num_eval_questions": len(test),
        "num_validation_questions": len(validation.answers),
        "num_configurations": len(validation),
        "num_tied": selected.tied,
        "configuration": selected.configuration,
    }


@dataclass(frozen=True)
class BenchmarkRun:
    """Evaluation of a model on benchmarks, with several scorings. Finished results are kept in a folder."""

    engine: Engine  # the model
    grid: Grid  # see `search_templates`
    benchmarks: Mapping[str, Splits]  # questions by name of the benchmark
    templates: Mapping[str, Sequence[str | None]]  # by scoring, the untuned one first; None for its default
    folder: Path  # folder of finished results
    num_shuffles: int = 200  # see `report_accuracy`
    seed: int = 0  # see `report_accuracy`
    disable_tqdm: bool = False  # show no progress bars

    def path(self, benchmark: str, scoring: str) -> Path:
        """Return the file of a result, named by a digest of everything that the result depends on."""
        settings = {"grid": self.grid, "num_shuffles": self.num_shuffles, "seed": self.seed, "ties": "1/k"}
        questions = [[asdict(question) for question in split] for split in self.benchmarks[benchmark]]
        fingerprint = self.engine.language_model.fingerprint
        basis = [scoring, list(self.templates[scoring]), settings, questions, fingerprint]
        return self.folder / f"{hashlib.sha256(json.dumps(basis).encode()).hexdigest()[:32]}.json"

    def result(self, benchmark: str, scoring: str) -> dict[str, Any]:
        """Read a result, or compute and write it.

        It has `model`, `benchmark`, `scoring`, the entries of `report_accuracy`, and `predictions` for test questions.
        """
        path = self.path(benchmark, scoring)
        if not path.is_file():
            write_json(path, self._compute(benchmark, scoring))
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
        with progress_bar(total=total, desc=f"{benchmark} {scoring}", leave=False, disable=self.disable_tqdm) as bar:
            engine = replace(self.engine, progress=bar.update)
            searched = search_templates(engine, validation, scoring, templates, self.grid)
            selected = select_configuration(searched).configuration
            answers = answer_questions(engine, test, selected)
            baseline = answers if selected == untuned else answer_questions(engine, test, untuned)
        report = report_accuracy(searched, test, answers, baseline, num_repeats=self.num_shuffles, seed=self.seed)
        return report | {"predictions": answers.predictions.tolist()}


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
