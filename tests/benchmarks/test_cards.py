import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from case_selection import each
from datasets import load_dataset
from fresh_python import run_fresh
from huggingface_hub import ModelCard, parse_eval_result_entries
from reproduction.cards import CARDS, Limit, Paper, find_groups, find_weights, render_cards
from reproduction.entries import ROOT, Entry, plan, read_queue
from reproduction.results import Results
from reproduction.tables import Source
from store_weights import evaluate
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification, pipeline

from hf_sphere import SphereVisionForImageClassification
from hf_sphere.export import load_saved
from hf_sphere.utils.texts import hide_private

PLAIN = "spherization/mnist-lenet5-plain"
ENTRY = Entry("mnist", 1, "classification", [PLAIN], 1.0, seeds=3)
PAPERS = [Paper("@article{one}", tables=["spherization"]), Paper("@article{two}", heads=["vmf"])]
LIMITS = ROOT / "results" / "limits.yaml"
WRITTEN = sorted(CARDS.glob("*/README.md"))
WEIGHTS = find_weights()
FOLDERS = [CARDS / name for name in WEIGHTS]
FILES = {"README.md", "config.json", "preprocessor_config.json", "model.safetensors", ".eval_results/results.yaml"}
VALUES = {"mnist-lenet5-plain": {0: 0.99, 1: 0.98, 2: 0.985}}


@each("path")
@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.parent.name)
def test_a_written_card_is_valid(path):
    card = ModelCard.load(path)
    main = "mean_absolute_error" if "regression" in path.parent.name else "accuracy"
    results = [result for result in card.data.eval_results if result.metric_type == main]
    assert len(results) == 1 + (path.parent.name in WEIGHTS)
    assert (card.data.library_name, card.data.model_name) == ("hf_sphere", path.parent.name)
    for result in results:
        assert 0 <= result.metric_value <= 1
        assert result.dataset_split == "test"
        assert card.data.datasets in (None, [result.dataset_type])  # two clusters are no dataset of the Hub
    assert "pip install" in card.text
    for code in re.findall(r"```python\n(.*?)```", card.text, re.DOTALL):
        compile(code, str(path), "exec")


def test_a_card_has_results_also_in_its_metadata_limits_settings_and_citation(finished):
    (text,) = render_cards(finished([ENTRY], VALUES), PAPERS).values()
    (result,), found = ModelCard(text).data.eval_results, ModelCard(text).text
    assert (result.metric_value, result.metric_name) == (0.985, "accuracy, mean over 3 seeds")
    assert (result.task_type, result.dataset_type) == ("image-classification", "ylecun/mnist")
    for text in (
        "| `eval_accuracy` | 98.50 ± 0.50 % |",
        "- `eval_accuracy`: accuracy on the evaluation split",
        "over 3 runs, seeds 0 to 2.",
        "Published for this configuration: 99.1 ± 0.05 %.",
        "published: -0.60 (-1.84 to +0.64), with the 95 % interval",
        "| backbone | `lenet5` |",
        "| learning_rate | 0.001 |",
        "@article{one}",
        'model_id = "outputs/spherization/mnist-lenet5-plain"',
    ):
        assert text in found
    assert "@article{two}" not in found  # of other runs


def test_a_card_with_weights_gives_the_number_of_their_run_and_their_dtype(finished):
    (text,) = render_cards(finished([ENTRY], VALUES), PAPERS, weights=dict.fromkeys(VALUES, "float16")).values()
    assert "| `eval_accuracy` | 98.50 ± 0.50 %; these weights: 99.00 % |" in text
    assert "run with seed 0, stored as float16" in text
    assert 'model_id = "hub_cards/mnist-lenet5-plain"' in text
    assert "No weights" not in text
    results = {result.metric_name: result.metric_value for result in ModelCard(text).data.eval_results}
    assert results == {"accuracy, these weights, seed 0": 0.99, "accuracy, mean over 3 seeds": 0.985}


def test_a_card_names_the_limits_of_its_configuration(finished):
    limits = [Limit("One setting.", [PLAIN]), Limit("Of another.", ["vmf/mnist-vmf"])]
    (text,) = render_cards(finished([ENTRY], {"mnist-lenet5-plain": {0: 0.9}}), PAPERS, limits).values()
    assert "- One setting.\n" in text
    assert "Of another." not in text


def test_runs_with_other_training_have_no_card(finished):
    changed = Entry(**{**vars(ENTRY), "label": "short", "overrides": {"num_train_epochs": 2}})
    assert find_groups(finished([changed], {"mnist-lenet5-plain-short": {0: 0.9}})) == {}


def test_runs_that_only_measure_more_are_used_if_there_are_no_others(finished):
    more = Entry(**{**vars(ENTRY), "entry": "more", "label": "flips", "overrides": {"test_time_flips": True}})
    values = {"mnist-lenet5-plain-flips": {0: 0.9}}
    assert find_groups(finished([more, ENTRY], values)) == {Path(PLAIN).name: "mnist-lenet5-plain-flips"}
    values["mnist-lenet5-plain"] = {0: 0.9}
    assert find_groups(finished([more, ENTRY], values)) == {Path(PLAIN).name: "mnist-lenet5-plain"}


@each("damage")
@pytest.mark.parametrize("damage", ["stale", "cut", "not finite", "not a share", "no torch", "no commit", "other seed"])
def test_damaged_and_stale_files_have_no_card(finished, tmp_path, damage):
    finished([ENTRY], {"mnist-lenet5-plain": {0: 0.9}})
    path = tmp_path / "mnist-lenet5-plain-seed0.json"
    content = json.loads(path.read_text())
    changes = {"stale": {"digest": "of other settings"}, "no torch": {"versions": {}}, "no commit": {"commit": None}}
    content |= {**changes, "other seed": {"seed": 1}}.get(damage, {})
    content["metrics"]["eval_accuracy"] = {"not finite": float("nan"), "not a share": 90.0}.get(damage, 0.9)
    path.write_text(json.dumps(content)[: 100 if damage == "cut" else None])
    results = Results.read(tmp_path)
    assert render_cards(Source.read(results, [ENTRY]), PAPERS) == {}
    named = results.stale([ENTRY]) if damage == "stale" else results.problems
    assert len(named) == 1
    assert path.stem in named[0]
    assert {"no commit": "of another type: commit.", "no torch": "no version of torch"}.get(damage, "") in named[0]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_with_weights_has_the_files_of_a_hub_repository_and_the_number_of_the_card(folder):
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == FILES
    assert (folder / "model.safetensors").stat().st_size <= 4_000_000
    texts = [(folder / name).read_text() for name in FILES - {"model.safetensors"}]
    assert [text for text in texts if hide_private(text) != text or "/work" in text] == []
    (entry,) = parse_eval_result_entries(yaml.safe_load((folder / ".eval_results" / "results.yaml").read_text()))
    card = ModelCard.load(folder / "README.md")
    values = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert round(entry.value, 6) == values["accuracy, these weights, seed 0"]
    assert entry.dataset_id == card.data.datasets[0]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_stored_model_is_loaded_by_every_way_as_float32(folder):
    classes = [load_saved(folder), AutoModel.from_pretrained(folder)]
    if (task := ModelCard.load(folder / "README.md").data.pipeline_tag) is not None:
        classes += [AutoModelForImageClassification.from_pretrained(folder), pipeline(task, model=str(folder)).model]
    assert {model.dtype for model in classes} == {torch.float32}
    assert {parameter.isfinite().all().item() for model in classes for parameter in model.parameters()} == {True}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_code_of_a_card_with_weights_runs(folder, root):
    blocks = re.findall(r"```python\n(.*?)```", ModelCard.load(folder / "README.md").text, re.DOTALL)
    for block in blocks:
        ended = run_fresh([sys.executable, "-c", block], cwd=root, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_stored_weights_have_exactly_the_accuracy_of_their_run(folder, real_data, monkeypatch):
    monkeypatch.setattr("store_weights.subprocess.run", run_fresh)
    result = Results.read(ROOT / "results" / "runs").runs[f"{folder.name}-seed0"]
    data = real_data(result["data"]["name"])
    runs = (run for entry in read_queue(ROOT / "benchmarks" / "queue.yaml") for run in plan(entry))
    (run,) = [run for run in runs if run.name == result["name"]]
    assert evaluate(folder, run, result, data) == result["metrics"]["eval_accuracy"]


@pytest.mark.slow
def test_transformers_alone_measures_the_accuracy_of_the_card(real_data):
    folder = CARDS / "mnist-lenet5-spherized"
    data = load_dataset(str(real_data("ylecun/mnist")), split="test")
    model = SphereVisionForImageClassification.from_pretrained(folder).eval()
    processor = AutoImageProcessor.from_pretrained(folder)
    with torch.inference_mode():
        correct = [
            (model(**processor(batch["image"], return_tensors="pt")).logits.argmax(-1) == torch.tensor(batch["label"]))
            for batch in data.iter(500)
        ]
    expected = Results.read(ROOT / "results" / "runs").runs["mnist-lenet5-spherized-seed0"]["metrics"]["eval_accuracy"]
    assert torch.cat(correct).double().mean().item() == pytest.approx(expected, abs=1e-12)
