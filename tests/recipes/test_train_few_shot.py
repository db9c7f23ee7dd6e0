"""Few-shot learning from the command line: trained and evaluated on episodes of disjoint classes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from case_selection import each
from huggingface_hub import ModelCard
from training_runs import same, weights

from hf_sphere import SphereVisionForFewShotClassification, SphereVisionImageProcessor
from hf_sphere.data.sources import load_splits

RECIPE = "train_few_shot"
# Six digits for training and four for evaluation: 12 episodes per epoch in 6 steps.
QUICK = ["--dataset_name", "digits", "--train_classes", "6", "--max_train_samples", "300", "--disable_tqdm"]
QUICK += ["--backbone", "linear_embedding", "--backbone_kwargs", "{width: 16}", "--learning_rate", "0.003"]
QUICK += ["--way", "3", "--shot", "2", "--query", "5", "--episodes_per_epoch", "12", "--episodes_per_step", "2"]
QUICK += ["--eval_episodes", "60", "--num_train_epochs", "2"]
FINISHED = ["--metric", "cosine", "--temperature", "64", "--spherization", "{scaling: 5.0, radius: 5.0}"]


def load(folder: Path) -> SphereVisionForFewShotClassification:
    return SphereVisionForFewShotClassification.from_pretrained(folder).eval()


# Output


@torch.no_grad()
def test_the_saved_model_and_processor_reach_the_reported_accuracy_on_other_episodes(finished, results_of):
    """Uses public interfaces only, with other episodes, so the accuracy is only approximately the same."""
    results = results_of(finished)
    assert results["eval_num_episodes"] == 60
    assert results["eval_accuracy"] - results["eval_accuracy_interval"] > 0.5  # the chance level is one in three
    draws, processor = np.random.default_rng(0), SphereVisionImageProcessor.from_pretrained(finished)
    model = load(finished)
    of_class: dict[int, list] = {label: [] for label in range(6, 10)}
    for split in load_splits("digits").values():
        for row in split.filter(lambda label: label >= 6, input_columns="label"):
            of_class[row["label"]].append(row["image"])
    right = []
    for _ in range(60):
        drawn = [
            [of_class[label][index] for index in draws.choice(len(of_class[label]), 7, replace=False)]
            for label in draws.choice(list(of_class), 3, replace=False)
        ]
        pixels = torch.stack([processor(images, return_tensors="pt")["pixel_values"] for images in drawn])
        logits = model(pixels[:, 2:].flatten(0, 1), pixels[:, :2]).logits
        right.append((logits.argmax(-1) == torch.arange(3).repeat_interleave(5)).double().mean())
    assert torch.stack(right).mean().item() == pytest.approx(results["eval_accuracy"], abs=0.08)


def test_the_model_config_has_the_metric_and_the_spherization(finished):
    config = load(finished).config
    assert config.few_shot_kwargs == {"metric": "cosine", "temperature": 64.0}
    assert (config.spherization, config.head) == ({"scaling": 5.0, "radius": 5.0}, None)


def test_the_card_reports_the_accuracy_and_how_it_was_measured(finished, results_of):
    card = ModelCard.load(finished / "README.md")
    (reported,) = card.data.eval_results
    assert reported.metric_type == "accuracy"
    assert reported.metric_value == round(results_of(finished)["eval_accuracy"], 6)
    for line in (
        "| episodes | 3-way 2-shot, 5 queries of each class |",
        "| comparison | with the mean embedding of each class, `cosine`, temperature 64 |",
        "| spherization | of the embeddings {'scaling': 5.0, 'radius': 5.0} |",
        "| eval_accuracy_interval |",
        "| train_classes | 6 |",
    ):
        assert line in card.content


def test_the_last_line_shows_the_accuracy_with_its_interval_and_the_model_has_the_defaults(train, capsys, results_of):
    results = results_of(folder := train("--spherization", "{}", "--num_train_epochs", "1"))
    line = "eval_accuracy {eval_accuracy:.2f} ± {eval_accuracy_interval:.2f} %  (model"
    percent = {name: 100 * value for name, value in results.items() if name.startswith("eval_accuracy")}
    assert capsys.readouterr().out.splitlines()[-1].startswith(line.format(**percent))
    config = load(folder).config
    assert (config.spherization, config.few_shot_kwargs) == ({}, {"metric": "euclidean", "temperature": 1.0})
    assert "| spherization | {} |" in (folder / "README.md").read_text()


# Randomness, resuming, starting from a saved model


@each("metric")
@pytest.mark.parametrize("metric", [[], ["--metric", "euclidean"]])
def test_a_run_of_zero_epochs_evaluates_a_saved_model_with_its_metric_or_another(train, finished, results_of, metric):
    folder = train("--model_name_or_path", str(finished), "--num_train_epochs", "0", *metric)
    assert same(weights(folder), weights(finished))
    assert metric or results_of(folder)["eval_accuracy"] == results_of(finished)["eval_accuracy"]
    expected = {"metric": (metric or ["cosine"])[-1], "temperature": 64.0}
    assert load(folder).config.few_shot_kwargs == expected


# Errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--spherization", "{scaling: 1.0}"], r"spherization is \{'scaling': 1.0\} but .* has"),
        (["--backbone", "conv4"], "backbone is conv4 but"),
    ],
)
def test_a_saved_model_is_not_changed(train, finished, words, message):
    with pytest.raises(ValueError, match=message):
        train("--model_name_or_path", str(finished), *words)


@pytest.fixture
def train_undivided(run_main, recipe, cache, tmp_path) -> Callable[..., Path]:
    """Run the recipe without `--train_classes`."""

    def train(*words: str) -> Path:
        run_main(recipe, [*QUICK[:2], *QUICK[4:], *cache, "--output_dir", str(tmp_path / "run"), *words])
        return tmp_path / "run"

    return train


@pytest.mark.parametrize("words", [["--eval_split", "train"], ["--train_split", "test"]], ids=" ".join)
def test_training_classes_are_not_evaluated(train_undivided, words):
    # A fifth of the ten classes is held out.
    with pytest.raises(ValueError, match="an episode of 3 different classes cannot be drawn from 2"):
        train_undivided(*words)


def test_classes_of_data_without_an_evaluation_split_are_divided(train_undivided, train, results_of):
    of_one = train_undivided("--train_split", "test", "--eval_fraction", "0.4", "--stop_after_steps", "1")
    of_classes = train("--eval_split", "train", "--stop_after_steps", "1", name="classes")
    assert [results_of(folder)["eval_num_episodes"] for folder in (of_one, of_classes)] == [60, 60]


# Real characters


def test_accuracy_on_unseen_alphabets_is_above_chance(real_data, run_main, recipe, tmp_path, results_of):
    """The chance level is one in five; training takes a few steps with the settings of the configuration."""
    words = ["--config", "few_shot/omniglot-conv4-1shot-plain-euclidean"]
    words += ["--dataset_name", str(real_data("brendenlake/omniglot")), "--cache_dir", str(tmp_path / "decoded")]
    words += ["--stop_after_steps", "5", "--validation_episodes", "20", "--eval_episodes", "20", "--disable_tqdm"]
    words += ["--dataloader_num_workers", "0", "--output_dir", str(tmp_path / "run")]
    run_main(recipe, words)
    results = results_of(tmp_path / "run")
    assert results["eval_accuracy"] > 0.3
    assert results["validation_accuracy"] > 0.3
