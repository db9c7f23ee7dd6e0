import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from reproduction.cards import CARDS, JPEG_COPY, Limit, Paper, find_groups, read_limits, render_cards
from reproduction.entries import ROOT, Entry
from reproduction.results import Results
from reproduction.tables import CIFAR_NOTE, Source

PLAIN = "spherization/mnist-lenet5-plain"
ENTRY = Entry("mnist", 1, "classification", [PLAIN], 1.0, seeds=3)
PAPERS = [Paper("@article{one}", tables=["spherization"]), Paper("@article{two}", heads=["vmf"])]
LIMITS = ROOT / "results" / "limits.yaml"
WRITTEN = sorted(CARDS.glob("*/README.md"))


@pytest.fixture
def card(finished):
    """The card of LeNet-5 with these values by seed."""

    def render(values: dict[int, float | dict], **changes) -> ModelCard:
        entry = Entry(**{**vars(ENTRY), **changes})
        (text,) = render_cards(finished([entry], {"mnist-lenet5-plain": values}), PAPERS).values()
        return ModelCard(text)

    return render


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.parent.name)
def test_a_written_card_is_valid(path):
    card = ModelCard.load(path)
    (result,) = [result for result in card.data.eval_results if result.metric_type == "accuracy"]
    assert 0 <= result.metric_value <= 1
    assert (card.data.library_name, card.data.model_name) == ("transformers", path.parent.name)
    assert (result.dataset_split, result.dataset_type) == ("test", card.data.datasets[0])
    assert "pip install" in card.text
    for code in re.findall(r"```python\n(.*?)```", card.text, re.DOTALL):
        compile(code, str(path), "exec")


def test_a_card_has_the_mean_over_seeds_in_its_metadata(card):
    (result,) = card({0: 0.99, 1: 0.98, 2: 0.985}).data.eval_results
    assert (result.metric_value, result.metric_name) == (0.985, "accuracy, mean over 3 seeds")
    assert (result.task_type, result.dataset_type) == ("image-classification", "ylecun/mnist")


@pytest.mark.parametrize(
    "text",
    [
        "| `eval_accuracy` | 98.50 ± 0.50 % |",
        "- `eval_accuracy`: share of the evaluation split whose largest logit",
        "over 3 runs, seeds 0 to 2.",
        "Published for this configuration: 99.1 ± 0.05 %.",
        "mean: -0.60 (-1.84 to +0.64). The source",
        "| backbone | `lenet5` |",
        "| learning_rate | 0.001 |",
        "@article{one}",
        'model_id = "outputs/spherization/mnist-lenet5-plain"',
    ],
)
def test_a_card_has_results_limits_settings_and_citation(card, text):
    assert text in card({0: 0.99, 1: 0.98, 2: 0.985}).text


def test_a_card_cites_only_its_papers(card):
    assert "@article{two}" not in card({0: 0.99}).text


def test_a_card_of_one_run_says_that_the_deviation_is_unknown(card):
    text = card({1: 0.99}).text
    assert "| `eval_accuracy` | 99.00 % |" in text
    assert "One run: nothing is known about the deviation between seeds." in text


def test_a_card_names_the_runs_that_diverged(card):
    assert "Diverged, and not in the mean: mnist-lenet5-plain-seed1." in card({0: 0.99, 1: {}}).text


def test_a_card_leaves_out_the_best_epoch_and_times(card):
    text = card({0: {"eval_accuracy": 0.99, "best_accuracy": 0.995, "train_runtime": 3.0, "unknown": 1.0}}).text
    assert not re.search("best_accuracy|train_runtime|unknown", text)


def test_a_card_of_the_jpeg_copy_says_so(finished):
    source = finished([ENTRY], {"mnist-lenet5-plain": {0: 0.9}})
    source.results.runs["mnist-lenet5-plain-seed0"]["data"] = {"name": "uoft-cs/cifar10", "encoding": "JPEG"}
    (text,) = render_cards(source, PAPERS).values()
    assert CIFAR_NOTE in text
    (result,) = ModelCard(text).data.eval_results
    assert (result.dataset_type, result.dataset_name) == ("uoft-cs/cifar10", f"uoft-cs/cifar10{JPEG_COPY}")


def test_a_card_names_the_limits_of_its_configuration(finished):
    limits = [Limit("One setting.", [PLAIN]), Limit("Of another.", ["vmf/mnist-vmf"])]
    (text,) = render_cards(finished([ENTRY], {"mnist-lenet5-plain": {0: 0.9}}), PAPERS, limits).values()
    assert "- One setting.\n" in text
    assert "Of another." not in text


def test_limits_name_configurations_that_have_cards():
    names = {Path(config).name for limit in read_limits(LIMITS) for config in limit.configs}
    assert names <= {path.parent.name for path in WRITTEN}


def test_runs_with_other_training_have_no_card(finished):
    changed = Entry(**{**vars(ENTRY), "label": "short", "overrides": {"num_train_epochs": 2}})
    assert find_groups(finished([changed], {"mnist-lenet5-plain-short": {0: 0.9}})) == {}


def test_runs_that_only_measure_more_are_used_if_there_are_no_others(finished):
    more = Entry(**{**vars(ENTRY), "entry": "more", "label": "flips", "overrides": {"test_time_flips": True}})
    values = {"mnist-lenet5-plain-flips": {0: 0.9}}
    assert find_groups(finished([more, ENTRY], values)) == {PLAIN: "mnist-lenet5-plain-flips"}
    values["mnist-lenet5-plain"] = {0: 0.9}
    assert find_groups(finished([more, ENTRY], values)) == {PLAIN: "mnist-lenet5-plain"}


@pytest.mark.parametrize("damage", ["stale", "cut", "not finite", "not a share", "no torch", "no commit", "other seed"])
def test_damaged_and_stale_files_have_no_card(finished, tmp_path, damage):
    finished([ENTRY], {"mnist-lenet5-plain": {0: 0.9}})
    path = tmp_path / "mnist-lenet5-plain-seed0.json"
    content = json.loads(path.read_text())
    if damage == "cut":
        path.write_text(path.read_text()[:100])
    else:
        changes = {
            "stale": {"digest": "of other settings"},
            "no torch": {"versions": {}},
            "no commit": {"commit": None},
        }
        content |= {**changes, "other seed": {"seed": 1}}.get(damage, {})
        content["metrics"]["eval_accuracy"] = {"not finite": float("nan"), "not a share": 90.0}.get(damage, 0.9)
        path.write_text(json.dumps(content))
    results = Results.read(tmp_path)
    assert render_cards(Source.read(results, [ENTRY]), PAPERS) == {}
    named = results.stale([ENTRY]) if damage == "stale" else results.problems
    assert len(named) == 1
    assert path.stem in named[0]
    assert {"no commit": "of another type: commit.", "no torch": "no version of torch"}.get(damage, "") in named[0]
