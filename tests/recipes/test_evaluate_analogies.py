import csv
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from hf_sphere.analogies import (
    TEMPLATES,
    LanguageModel,
    evaluation,
    load_questions,
    score_questions,
    scoring_names,
)

RECIPE = "analogies"

PAIRS = [("cat", "dog"), ("red", "sea"), ("man", "king"), ("in", "out"), ("eat", "food"), ("one", "two")]
PAIRS += [("sun", "day")]
OTHER_PAIRS = [("he", "his"), ("do", "did"), ("old", "new"), ("up", "down")]
ALL = ["--scorings", *scoring_names()]
QUICK = ["--templates", "is-to-what", "--disable_tqdm", "true"]

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def tiny(root) -> Path:
    return root / "tests" / "golden" / "analogy" / "tiny-bert"


def write_split(
    folder: Path, split: str, counts: Sequence[int], answers: Sequence[int | None], pairs: Sequence = PAIRS
) -> None:
    """Write questions with the given numbers of choices."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = [[pairs[(row + place) % len(pairs)] for place in range(count + 1)] for row, count in enumerate(counts)]
    columns = {"stem": [one[0] for one in asked], "choice": [one[1:] for one in asked], "answer": list(answers)}
    Dataset.from_dict(columns).to_parquet(folder / f"{split}-00000-of-00001.parquet")


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    """Two small benchmarks."""
    folder = tmp_path_factory.mktemp("questions")
    write_split(folder / "easy", "validation", (3, 2), (0, 1))
    write_split(folder / "easy", "test", (2, 3, 2), (1, 2, 0))
    write_split(folder / "hard", "validation", (3, 2), (2, 1), OTHER_PAIRS)
    write_split(folder / "hard", "test", (2, 2), (0, 1), OTHER_PAIRS)
    return folder


@pytest.fixture(scope="module")
def evaluate(recipe, run_main, tiny, questions) -> Run:
    """Run the recipe into a folder."""

    def run(folder: Path, *words: object, model: Path = tiny, data: Path = questions) -> Path:
        given = ["--model_name_or_path", model, "--dataset_name", data, "--output_dir", folder]
        run_main(recipe, [*map(str, given), *QUICK, *map(str, words)])
        return folder

    return run


@pytest.fixture(scope="module")
def finished(evaluate, tmp_path_factory) -> Path:
    """A run with all outputs."""
    templates = ["--templates", "is-to-what", "is-to-as"]
    return evaluate(tmp_path_factory.mktemp("run"), "--benchmarks", "easy", "hard", *templates, *ALL)


@pytest.fixture(scope="module")
def entries(finished) -> list[dict]:
    return json.loads((finished / "all_results.json").read_text())["results"]


@pytest.fixture(scope="module")
def model(tiny) -> LanguageModel:
    return LanguageModel.load(tiny)


def results_by_scoring(folder: Path) -> dict[str, dict]:
    return {entry["scoring"]: entry for entry in json.loads((folder / "all_results.json").read_text())["results"]}


# Metrics


def test_every_result_has_the_accuracies_of_the_chosen_and_the_default_configuration(entries, model, questions):
    expected = [(benchmark, scoring) for benchmark in ("easy", "hard") for scoring in scoring_names()]
    assert [(entry["benchmark"], entry["scoring"]) for entry in entries] == expected
    for entry in entries:
        for split in ("test", "validation"):
            asked = load_questions(str(questions), entry["benchmark"], split)
            reached = score_questions(asked, model, **entry["configuration"]).accuracy(asked)
            assert entry["eval_accuracy" if split == "test" else "validation_accuracy"] == pytest.approx(reached)
        asked = load_questions(str(questions), entry["benchmark"], "test")
        assert entry["untuned_accuracy"] == score_questions(asked, model, entry["scoring"]).accuracy(asked)


def test_averages_are_over_the_benchmarks_and_answers_table_and_figure_are_written(finished, entries, tiny):
    for average in json.loads((finished / "all_results.json").read_text())["averages"]:
        own = [entry for entry in entries if entry["scoring"] == average["scoring"]]
        for name in ("eval_accuracy", "chance_level", "untuned_accuracy"):
            assert average[name] == pytest.approx(sum(entry[name] for entry in own) / 2)
    answered = json.loads((finished / "predictions.json").read_text())
    for entry in entries:
        rows = answered[entry["benchmark"]]
        right = [row["predictions"][str(tiny)][entry["scoring"]] == row["answer"] for row in rows]
        assert sum(right) / len(rows) == pytest.approx(entry["eval_accuracy"])
    with (finished / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["eval_accuracy"]) for row in rows] == [entry["eval_accuracy"] for entry in entries]
    assert [json.loads(row["configuration"]) for row in rows] == [entry["configuration"] for entry in entries]
    assert (finished / "analogies.png").read_bytes().startswith(b"\x89PNG")


# Search


def test_the_default_scorings_are_the_best_and_a_cheap_one(evaluate, tmp_path):
    words = ["--benchmarks", "easy", "--grid", "none", "--max_questions", "1"]
    results = results_by_scoring(evaluate(tmp_path / "run", *words))
    assert list(results) == ["marginal_bias", "embedding_similarity"]
    words_alone = {"scoring": "embedding_similarity"}  # without a template
    assert results["embedding_similarity"]["configuration"] == words_alone
    counts = [(entry["num_eval_questions"], entry["num_validation_questions"]) for entry in results.values()]
    assert counts == [(1, 1)] * 2


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        (
            ["--grid", "none", "--templates", *TEMPLATES, *ALL],
            dict.fromkeys(("perplexity", "pmi", "marginal_bias", "hypothesis_bias"), 6) | {"embedding_similarity": 1},
        ),
        (["--grid", "published", "--scorings", "marginal_bias"], {"marginal_bias": 24_750}),
    ],
    ids=["no grid", "published grid"],
)
def test_templates_and_grids_are_searched(evaluate, tmp_path, words, counts):
    results = results_by_scoring(evaluate(tmp_path / "run", "--benchmarks", "easy", *words))
    assert {name: entry["num_configurations"] for name, entry in results.items()} == counts


# Supported models


def test_scorings_that_a_model_does_not_support_are_skipped(evaluate, tiny, tmp_path, capsys):
    AutoModel.from_pretrained(tiny, add_pooling_layer=False).save_pretrained(tmp_path / "model")
    shutil.copy(tiny / "tokenizer.json", tmp_path / "model")
    shutil.copy(tiny / "tokenizer_config.json", tmp_path / "model")
    folder = evaluate(tmp_path / "run", "--benchmarks", "easy", "--grid", "none", *ALL, model=tmp_path / "model")
    assert list(results_by_scoring(folder)) == ["embedding_similarity"]
    skipped = "by models of kind 'embedding': hypothesis_bias, marginal_bias, perplexity, pmi"
    assert skipped in capsys.readouterr().out
    with pytest.raises(ValueError, match="has kind 'embedding', which supports none of: perplexity"):
        evaluate(tmp_path / "no", "--benchmarks", "easy", "--scorings", "perplexity", model=tmp_path / "model")


def test_several_models_are_compared_in_one_run(evaluate, tiny, tmp_path, capsys):
    shutil.copytree(tiny, tmp_path / "other")
    changed = {name: 0.5 * tensor for name, tensor in load_file(tiny / "model.safetensors").items()}
    save_file(changed, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    words = ["--model_name_or_path", tiny, tmp_path / "other", "--scorings", "perplexity", "--grid", "none"]
    folder = evaluate(tmp_path / "run", "--benchmarks", "easy", *words)
    results = json.loads((folder / "all_results.json").read_text())["results"]
    assert [entry["model"] for entry in results] == [str(tiny), str(tmp_path / "other")]
    assert "other: BertForMaskedLM, masked, on cpu" in capsys.readouterr().out


# Printed output


def test_the_table_shows_chance_for_each_accuracy_and_the_figure_needs_matplotlib(
    evaluate, tmp_path, monkeypatch, capsys
):
    missing = Mock(side_effect=ImportError("pictures need matplotlib"))
    monkeypatch.setattr("hf_sphere.visualization.plot_analogy_accuracies", missing)
    folder = evaluate(tmp_path / "run", "--benchmarks", "easy", "--scorings", "perplexity", "--grid", "none")
    entry, printed = results_by_scoring(folder)["perplexity"], capsys.readouterr().out
    header, line = printed.split("\n\n")[1].splitlines()[:2]
    assert header.split() == ["benchmark", "scoring", *evaluation.COLUMNS]
    names = ("eval_accuracy", "eval_accuracy_low", "eval_accuracy_high", "chance_level")
    assert line.split()[2:6] == [f"{100 * entry[name]:.1f}" for name in names]
    assert (folder / "results.csv").is_file()
    assert "no plot: pictures need matplotlib" in printed


# Errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scorings", "guess"], "'guess' .choose from 'embedding_similarity'"),
        (["--templates", "a is b"], "'a is b' is not a template"),
        (["--benchmarks", "sat"], "sat"),
        (["--max_questions", "0"], "max_questions must be at least 1"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_written(evaluate, tmp_path, capsys, words, message):
    with pytest.raises((ValueError, OSError, SystemExit)) as caught:
        evaluate(tmp_path / "run", *words)
    assert re.search(message, f"{caught.value} {capsys.readouterr().err}")
    assert not (tmp_path / "run").exists()


def test_questions_without_answers_a_missing_model_and_earlier_results_are_refused(evaluate, tiny, tmp_path, finished):
    with pytest.raises(FileExistsError, match="already contains results"):
        evaluate(finished, "--benchmarks", "easy")
    with pytest.raises(OSError, match="no-such-model"):
        evaluate(tmp_path / "run", "--benchmarks", "easy", "--model_name_or_path", tiny, tmp_path / "no-such-model")
    write_split(tmp_path / "data" / "open", "validation", (2, 2), (None, 0))
    write_split(tmp_path / "data" / "open", "test", (2,), (1,))
    with pytest.raises(ValueError, match="has no answer"):
        evaluate(tmp_path / "run", "--benchmarks", "open", data=tmp_path / "data")
