"""Answer word analogies with language models: configurations chosen on validation questions, accuracies on test ones.

python recipes/evaluate_analogies.py --model_name_or_path bert-base-cased outputs/language/minilm-spherized \
    --benchmarks sat u2 u4 google bats --output_dir outputs/analogies
python recipes/evaluate_analogies.py --model_name_or_path <folder> --scorings perplexity --max_questions 20

The scorings are described in `analogy/README.md`. Templates, weights and aggregations are searched on the validation
questions; the test questions are answered by the best of them, and by the scoring's defaults without any search
(untuned). Beside each accuracy stand its bootstrap interval, what guessing reaches on average (chance) and what 95 of
100 who guess do not exceed (noise); beside that on validation stands what the same search does not exceed if the scores
know nothing.

What is finished is kept in the folder, and so are the scores of sentences: after Ctrl-C the same command goes on, and
further models, benchmarks or scorings may be added to it. Results are in `all_results.json` and `results.csv`, answers
in `predictions.json`, the picture in `analogies.png`.
"""

import csv
import hashlib
import json
import random
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import datasets
import torch
import transformers
from hf_sphere.training.results_folders import holds_same_run
from tqdm.auto import tqdm
from transformers import AutoConfig

from hf_sphere.analogies import (
    SCORINGS,
    TEMPLATES,
    LanguageModel,
    Question,
    ScoreCache,
    load_questions,
    select_configuration,
)
from hf_sphere.analogies.evaluation import AnalogyEvaluation, can_score, report_accuracy, untuned_configuration
from hf_sphere.analogies.prompts import template_text
from hf_sphere.analogies.questions import answers_of
from hf_sphere.analogies.scoring import build_scoring
from hf_sphere.analogies.scoring.relation_embedding import RelationEmbedding
from hf_sphere.training import claim_output_dir
from hf_sphere.training.checkpoints import RESULTS_FILE, RUN_FILE
from hf_sphere.training.command_line import run_recipe
from hf_sphere.utils.arguments import parse_arguments
from hf_sphere.utils.files import write_json
from hf_sphere.visualization import plot_analogy_accuracies

FINISHED_FOLDER = "finished"
SCORES_FILE = "sentence_scores.sqlite"
PICTURE = "analogies.png"

FREE_TO_CHANGE = {
    *("model_name_or_path", "output_dir", "benchmarks", "scorings", "batch_size", "cache_dir"),
    *("overwrite_output_dir", "disable_tqdm"),
}
"""Arguments that may differ between calls that share a folder, since no result depends on them."""

Splits = tuple[list[Question], list[Question]]
"""Validation and test questions."""


@dataclass
class AnalogyArguments:
    """Which models answer which questions, and how."""

    model_name_or_path: list[str] = field(
        metadata={"help": "Masked, causal or embedding models of transformers: folders or Hub ids."}
    )
    output_dir: str = field(default="outputs/analogies", metadata={"help": "Folder to write."})
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Replace the results in output_dir; scores of sentences are kept."}
    )
    dataset_name: str = field(
        default="relbert/analogy_questions", metadata={"help": "Questions: Id on the Hub, or a folder."}
    )
    dataset_revision: str | None = field(default=None, metadata={"help": "Revision of the data set on the Hub."})
    benchmarks: list[str] = field(
        default_factory=lambda: ["sat", "u2", "u4", "google", "bats"],
        metadata={"help": "Configurations of the data set, each a set of questions."},
    )
    validation_split: str = field(default="validation", metadata={"help": "Split that configurations are chosen on."})
    test_split: str = field(default="test", metadata={"help": "Split that accuracies are reported on."})
    scorings: list[str] = field(
        default_factory=lambda: ["marginal_bias", "embedding_similarity"],
        metadata={
            "help": "How questions are scored: the best of the publication and a cheap one, or any of "
            f"{', '.join(SCORINGS)}. What a model cannot do is left out, and said."
        },
    )
    templates: list[str] = field(
        default_factory=lambda: list(TEMPLATES),
        metadata={
            "help": "Templates to choose among: names, or texts with {a}, {b}, {c} and {d}. The first is untuned."
        },
    )
    relation_templates: list[str] = field(
        default_factory=lambda: [RelationEmbedding.template],
        metadata={"help": "The same for relation_embedding: texts with {a} and {b}, and perhaps {mask}."},
    )
    word_embeddings: Literal["both", "alone", "in_context"] = field(
        default="alone",
        metadata={"help": "Whether embedding_similarity embeds each word alone, in the sentences, or chooses (both)."},
    )
    grid: Literal["full", "published", "none"] = field(
        default="full",
        metadata={
            "help": "What is searched beside templates: all weights and aggregations; those of the publication, with "
            "12 of the 16 negative permutations; or nothing, each scoring has its defaults."
        },
    )
    num_shuffles: int = field(default=200, metadata={"help": "Searches on shuffled scores, for validation's noise."})
    max_questions: int | None = field(
        default=None, metadata={"help": "Use only so many questions of each split, for a quick look."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of intervals, noise levels and the choice of questions."})
    batch_size: int | None = field(default=None, metadata={"help": "Rows of a batch; as many as is fast if not set."})
    dtype: Literal["float32", "bfloat16", "float16"] | None = field(
        default=None, metadata={"help": "Type of the weights; bfloat16 if not set where the GPU computes in it."}
    )
    cache_dir: str | None = field(
        default=None, metadata={"help": "Folder of sentence scores, which runs may share; output_dir if not set."}
    )
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bars."})

    def __post_init__(self) -> None:
        for name in ("model_name_or_path", "benchmarks", "scorings", "templates", "relation_templates"):
            setattr(self, name, list(dict.fromkeys(getattr(self, name))))
            if not getattr(self, name):
                raise ValueError(f"--{name} is given without a value; give one or more, or leave it out.")
        for name, least in (("num_shuffles", 1), ("max_questions", 1), ("batch_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} must be at least {least}; got {value}.")
        for scoring in self.scorings:
            build_scoring(scoring)  # says what is wrong
        for template in self.templates:
            template_text(template)
        for template in self.relation_templates:
            if "{a}" not in template or "{b}" not in template:
                raise ValueError(f"--relation_templates must have {{a}} and {{b}}; got {template!r}.")

    def templates_of(self, scoring: str) -> list[str | None]:
        """Templates to choose among, the untuned one first; None for words alone."""
        if scoring == "relation_embedding":
            return [*self.relation_templates]
        if scoring == "embedding_similarity" and self.word_embeddings != "in_context":
            return [None, *(self.templates if self.word_embeddings == "both" else [])]
        return [*self.templates]


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and do as it says."""
    (args,) = parse_arguments((AnalogyArguments,), argv, "Answer word analogies with language models.")
    transformers.utils.logging.disable_progress_bar()  # loading is quick; the bars of the questions are enough
    datasets.disable_progress_bars()
    try:
        evaluate(args)
    except KeyboardInterrupt:
        print("\nStopped. What is finished is kept: the same command goes on from here.", file=sys.stderr)
        sys.exit(130)


def evaluate(args: AnalogyArguments) -> None:
    """Let every model answer, write the results and draw."""
    output = Path(args.output_dir)
    goes_on = holds_same_run(output, asdict(args), free=FREE_TO_CHANGE, overwrite=args.overwrite_output_dir)
    for name in args.model_name_or_path:
        AutoConfig.from_pretrained(name)  # a wrong name is to be known now, not when its turn comes
    benchmarks = {name: load_splits(args, name) for name in args.benchmarks}
    claim_output_dir(output, overwrite=args.overwrite_output_dir, resume=goes_on)
    if args.overwrite_output_dir:
        shutil.rmtree(output / FINISHED_FOLDER, ignore_errors=True)
    write_json(output / RUN_FILE, asdict(args))
    cache = ScoreCache(Path(args.cache_dir or output) / SCORES_FILE)
    results = [one for name in args.model_name_or_path for one in evaluate_model(args, name, benchmarks, cache)]
    write_results(output, results, benchmarks)
    print(LEGEND)
    print(f"saved {output / RESULTS_FILE}, results.csv and predictions.json")
    try:
        entries = [entry for entry, _ in results]
        names = short_names(args.model_name_or_path)
        drawn = [entry | {"model": names[entry["model"]]} for entry in entries]
        plot_analogy_accuracies(drawn, title="word analogies", path=output / PICTURE)
        print(f"drew  {output / PICTURE}")
    except ImportError as error:
        print(f"no picture: {error}")


def load_splits(args: AnalogyArguments, benchmark: str) -> Splits:
    """Load the questions of a benchmark, or a part of them."""

    def load(split: str) -> list[Question]:
        questions = load_questions(args.dataset_name, benchmark, split, revision=args.dataset_revision)
        answers_of(questions)  # says which one is missing
        if args.max_questions is None or args.max_questions >= len(questions):
            return questions
        chosen = random.Random(args.seed).sample(range(len(questions)), args.max_questions)
        return [questions[number] for number in sorted(chosen)]

    return load(args.validation_split), load(args.test_split)


def evaluate_model(
    args: AnalogyArguments, name: str, benchmarks: Mapping[str, Splits], cache: ScoreCache
) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yield results and test answers of a model, by benchmark and scoring, and print them."""
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    model = LanguageModel.load(name, dtype=dtype)
    print(f"\n{name}: {type(model.model).__name__}, {model.kind}, on {model.device} in {model.model.dtype}", flush=True)
    scorings = [scoring for scoring in args.scorings if can_score(model, scoring)]
    impossible = ", ".join(scoring for scoring in args.scorings if scoring not in scorings)
    if not scorings:
        raise ValueError(f"{name} is a model of the {model.kind} kind, which can do none of: {impossible}.")
    if impossible:
        print(f"left out, since it is of the {model.kind} kind: {impossible}")
    evaluation = AnalogyEvaluation(model, grid=args.grid, cache=cache, batch_size=args.batch_size)
    folder = Path(args.output_dir) / FINISHED_FOLDER
    folder.mkdir(exist_ok=True)
    places = {
        (benchmark, scoring): folder / f"{digest_settings(args, model, splits, scoring)}.json"
        for benchmark, splits in benchmarks.items()
        for scoring in scorings
    }
    missing = {benchmark: [s for s in scorings if not places[benchmark, s].is_file()] for benchmark in benchmarks}
    print_work(evaluation, benchmarks, missing, args.templates)
    print(HEADER, flush=True)
    entries = []
    for (benchmark, scoring), place in places.items():
        if not place.is_file():
            write_json(place, run_scoring(args, evaluation, benchmarks[benchmark], benchmark, scoring))
        found = json.loads(place.read_text(encoding="utf-8"))
        entry = {"model": name, "benchmark": benchmark, "scoring": scoring} | found["result"]
        entries.append(entry)
        print(table_line(entry), flush=True)
        yield entry, found["predictions"]
    for average in averages(entries):
        print(table_line(average), flush=True)


def digest_settings(args: AnalogyArguments, model: LanguageModel, splits: Splits, scoring: str) -> str:
    """Digest of all that a result depends on, by which finished results are found."""
    settings = {name: value for name, value in asdict(args).items() if name in ("grid", "num_shuffles", "seed")}
    questions = [[asdict(question) for question in split] for split in splits]
    basis = [scoring, args.templates_of(scoring), settings, questions, model.fingerprint]
    return hashlib.sha256(json.dumps(basis).encode()).hexdigest()[:32]


def print_work(
    evaluation: AnalogyEvaluation,
    benchmarks: Mapping[str, Splits],
    missing: Mapping[str, Sequence[str]],
    templates: Sequence[str],
) -> None:
    """Say how much there is to do: with a large model it may be days."""
    if not any(missing.values()):
        print("everything is finished already")
        return
    masked = " with one masked token" if evaluation.language_model.kind == "masked" else ""
    steps = (
        ("to choose on validation: about", evaluation.estimate_search),
        ("to answer the test: at most about", evaluation.estimate_answers),
    )
    for split, (purpose, estimate) in enumerate(steps):
        work = [estimate(benchmarks[name][split], scorings, templates) for name, scorings in missing.items()]
        sentences, sequences = map(sum, zip(*work, strict=True))
        if sentences:
            print(f"{purpose} {readable(sentences)} sentences, in {readable(sequences)} sequences{masked}")


def run_scoring(
    args: AnalogyArguments, evaluation: AnalogyEvaluation, splits: Splits, benchmark: str, scoring: str
) -> dict[str, Any]:
    """Let a model answer the questions of a benchmark by one scoring."""
    templates = args.templates_of(scoring)
    validation, test = splits
    options: dict[str, Any] = {"unit": "question", "leave": False, "disable": args.disable_tqdm}
    with tqdm(total=len(templates) * len(validation), desc=f"{benchmark} {scoring}: search", **options) as bar:
        search = evaluation.search(validation, scoring, templates, bar.update)
    chosen = select_configuration(search).configuration
    untuned = untuned_configuration(scoring, templates[0])
    configurations = [chosen] if chosen == untuned else [chosen, untuned]
    with tqdm(total=len(configurations) * len(test), desc=f"{benchmark} {scoring}: test", **options) as bar:
        answers = [evaluation.answer(test, configuration, bar.update) for configuration in configurations]
    result = report_accuracy(search, test, answers[0], answers[-1], num_shuffles=args.num_shuffles, seed=args.seed)
    return {"result": result, "predictions": answers[0].tolist()}


def averages(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over the benchmarks by model and scoring, where there are several; each benchmark counts alike."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for entry in entries:
        groups.setdefault((entry["model"], entry["scoring"]), []).append(entry)
    names = ("eval_accuracy", "chance_level", "untuned_accuracy", "validation_accuracy")
    return [
        {"model": model, "benchmark": "average", "scoring": scoring}
        | {name: statistics.mean(entry[name] for entry in group) for name in names}
        for (model, scoring), group in groups.items()
        if len(group) > 1
    ]


def write_results(
    output: Path, results: Sequence[tuple[dict[str, Any], list[int]]], benchmarks: Mapping[str, Splits]
) -> None:
    """Write accuracies as JSON and CSV, and the answers by question.

    A single result is on the top level as well, as in the files of other recipes.
    """
    entries = [entry for entry, _ in results]
    single = entries[0] if len(entries) == 1 else {}
    top = {name: value for name, value in single.items() if name.startswith("eval_")}
    write_json(output / RESULTS_FILE, {**top, "results": entries, "averages": averages(entries)})
    with (output / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(entries[0]))
        writer.writeheader()
        writer.writerows(entry | {"configuration": json.dumps(entry["configuration"])} for entry in entries)
    answered: dict[str, list[dict[str, Any]]] = {}
    for name, (_, questions) in benchmarks.items():
        answered[name] = [asdict(question) | {"predictions": {}} for question in questions]
    for entry, answers in results:
        for question, answer in zip(answered[entry["benchmark"]], answers, strict=True):
            question["predictions"].setdefault(entry["model"], {})[entry["scoring"]] = answer
    write_json(output / "predictions.json", answered)


HEADER = (
    f"\n{'benchmark':<11}{'scoring':<21}{'accuracy':>9}{'interval':>16}{'chance':>8}{'noise':>7}{'untuned':>9}"
    f"{'on validation':>16}{'its noise':>11}"
)


LEGEND = """
All in percent, on test questions but for the last two. interval: 95 % bootstrap. chance: guessing. noise: what 95 of
100 who guess do not exceed; an accuracy that does not either has shown nothing. untuned: without a search. on
validation: what was chosen by; its noise: what 95 of 100 such searches on shuffled scores do not exceed.
"""


def table_line(entry: Mapping[str, Any]) -> str:
    """Format a result for the table, in percent."""

    def percent(name: str) -> str:
        return f"{100 * entry[name]:.1f}" if name in entry else ""

    interval = f"{percent('eval_accuracy_low')} to {percent('eval_accuracy_high')}" if "configuration" in entry else ""
    return (
        f"{entry['benchmark']:<11}{entry['scoring']:<21}{percent('eval_accuracy'):>9}{interval:>16}"
        f"{percent('chance_level'):>8}{percent('selection_noise_high'):>7}{percent('untuned_accuracy'):>9}"
        f"{percent('validation_accuracy'):>16}{percent('validation_noise_high'):>11}"
    ).rstrip()


def readable(number: float) -> str:
    """Write a number with separators, or in millions."""
    return f"{number / 1e6:,.1f} million" if number >= 1e6 else f"{round(number):,}"


def short_names(models: Sequence[str]) -> dict[str, str]:
    """Last parts of the models' names, where these are not the same."""
    last = [Path(name).resolve().name if Path(name).exists() else name.rsplit("/", 1)[-1] for name in models]
    return dict(zip(models, last if len(set(last)) == len(last) else models, strict=True))


if __name__ == "__main__":
    run_recipe(main)
