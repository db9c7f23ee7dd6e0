"""Open-set retrieval from the command line: trained and evaluated on disjoint classes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from training_runs import DIGITS, weights
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification

from hf_sphere.data.sources import load_splits
from hf_sphere.metrics import retrieval_scores
from hf_sphere.training.tasks import retrieval
from hf_sphere.utils.snapshots import list_snapshots

RECIPE = "train_image_retrieval"
QUICK = [*DIGITS, "--train_classes", "6", "--embedding_dim", "8"]  # the other four are for retrieval
EPISODES = ["--episode_classes", "4", "--episode_examples", "5", "--episodes_per_epoch", "10"]
FINISHED = [*EPISODES, "--head", "vmf"]


@torch.no_grad()
def scores_on_digits(
    folder: Path, classes: range, model: torch.nn.Module | None = None, **distance
) -> dict[str, float]:
    """Retrieval scores on all images of the given digits, computed with public interfaces only."""
    images, labels = [], []
    for split in load_splits("digits").values():
        chosen = split.filter(lambda label: label in classes, input_columns="label")
        images += chosen["image"][:]
        labels += chosen["label"][:]
    processor = AutoImageProcessor.from_pretrained(folder)
    model = model or AutoModelForImageClassification.from_pretrained(folder)
    embeddings = model(**processor(images, return_tensors="pt")).embeddings
    return retrieval_scores(embeddings, torch.tensor(labels), **distance)


# Output


def test_the_saved_model_and_processor_reproduce_the_reported_scores(finished, results_of):
    """Up to neighbors that swap because of rounding. The chance level is one in four."""
    results, expected = results_of(finished), scores_on_digits(finished, range(6, 10))
    assert results["eval_recall_at_1"] > 0.6
    for name in ("recall_at_1", "r_precision", "map_at_r"):
        assert results[f"eval_{name}"] == pytest.approx(expected[name], abs=3e-3)
    assert results["train_accuracy"] > 0.5
    assert "eval_accuracy" not in results
    config = AutoModelForImageClassification.from_pretrained(finished).config
    assert config.id2label == {index: str(index) for index in range(6)}


def test_the_card_names_the_classes_of_training_and_evaluation_and_how_they_were_divided(finished):
    card = ModelCard.load(finished / "README.md")
    for text in (
        "Trained on 6 classes (0, 1, 2, 3, 4, ...) and evaluated on 4 classes (6, 7, 8, 9).",
        "Image model for retrieval: a `linear_embedding` backbone and the vmf head of hf_sphere.",
        "| train_classes | 6 |",
        "| episode_classes | 4 |",
    ):
        assert text in card.content
    assert {result.dataset_split for result in card.data.eval_results} == {"train+test (classes not trained on)"}
    assert "num_excluded" not in card.text


def test_retrieval_with_a_hyperbolic_head_uses_its_distance(train, results_of):
    folder = train("--head", "hyperbolic", "--head_kwargs", "{curvature: 1.0}")
    expected = scores_on_digits(folder, range(6, 10), distance="hyperbolic", curvature=1.0)["map_at_r"]
    assert results_of(folder)["eval_map_at_r"] == pytest.approx(expected, abs=3e-3)
    assert expected != pytest.approx(scores_on_digits(folder, range(6, 10))["map_at_r"], abs=5e-3)


# Randomness, resuming, starting from a saved model


def test_a_saved_model_keeps_its_scale_and_gets_a_new_head_for_other_classes(train, finished, caplog):
    caplog.set_level("INFO")
    words = ["--model_name_or_path", str(finished), "--max_train_samples", "150", "--num_train_epochs", "1"]
    scale = weights(finished)["head.embedding_scale"]
    assert scale != 1.0
    assert torch.equal(weights(train(*words, name="same"))["head.embedding_scale"], scale)
    other = train(*words, "--train_classes", "5")
    assert f"New head for 5 classes (0, 1, 2, 3, 4); {finished} was trained on 6 classes" in caplog.text
    assert AutoConfig.from_pretrained(other).num_labels == 5


def test_frozen_batch_norms_keep_their_statistics_and_the_rest_is_trained(train):
    words = ["--backbone", "lenet5_bn", "--backbone_kwargs", "{}", "--freeze_batch_norm", "true", "--head", "vmf"]
    run = train(*words, "--num_train_epochs", "1", "--snapshot_epochs", "1")
    start, end = load_file(list_snapshots(run)[0].path), weights(run)
    kept = {name for name in start if torch.equal(start[name], end[name])}
    statistics = {name for name in start if name.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    assert len(statistics) == 9
    assert kept == statistics | {"head.embedding_scale", "head.is_initialized"}


# Errors


def test_validation_images_without_neighbors_are_refused(train):
    words = ["--train_classes", "2", "--max_train_samples", "3", "--validation_fraction", "0.5", "--seed", "2"]
    with pytest.raises(ValueError, match="each class of the validation images has a single one"):
        train(*words)


def test_evaluation_images_of_one_class_are_warned_of(train, caplog):
    train("--train_classes", "9")
    assert "are of one class, so retrieval is 100 % right for any model" in caplog.text


# Comparison with the frozen model


def test_a_saved_model_is_evaluated_before_training(train, finished, results_of):
    results = results_of(train("--model_name_or_path", str(finished), "--head", "vmf", "--num_train_epochs", "0"))
    for name in ("recall_at_1", "map_at_r"):
        assert results[f"frozen_{name}"] == pytest.approx(results_of(finished)[f"eval_{name}"], abs=1e-6)


@pytest.mark.parametrize(("map_at_r", "warns"), [(0.4, True), (0.5, False), (0.6, False)])
def test_results_worse_than_those_of_the_frozen_model_cause_a_warning(map_at_r, warns, caplog):
    before, said = {"frozen_recall_at_1": 0.5, "frozen_map_at_r": 0.5}, []
    run = SimpleNamespace(accelerator=SimpleNamespace(print=said.append))
    results = {"eval_recall_at_1": 0.7, "eval_map_at_r": map_at_r}
    assert retrieval.compare(run, before, None, results) == before
    assert ("made map_at_r worse than that of the frozen, pretrained model" in caplog.text) == warns
    assert "frozen_map_at_r 50.00 %" in said[0]


def test_a_pretrained_backbone_is_evaluated_by_its_features(train, finished, results_of, capsys):
    results = results_of(train("--initial_weights", str(finished), "--head", "cosine"))
    model = AutoModelForImageClassification.from_pretrained(finished).base_model
    model.projection = torch.nn.Identity()
    expected = scores_on_digits(finished, range(6, 10), model)
    assert results["frozen_recall_at_1"] == pytest.approx(expected["recall_at_1"], abs=2e-3)
    assert results["frozen_map_at_r"] == pytest.approx(expected["map_at_r"], abs=1e-3)
    assert "recall_at_1_by_decile" not in results  # the head has no concentration
    assert "frozen    frozen_recall_at_1" in capsys.readouterr().out


# Real characters


@pytest.fixture(scope="module")
def omniglot(real_data, run_main, recipe, tmp_path_factory) -> Path:
    """A run of a few steps with the settings of the configuration; read only."""
    folder = tmp_path_factory.mktemp("omniglot")
    words = ["--config", "vmf/omniglot-retrieval-vmf", "--disable_tqdm"]
    words += ["--dataset_name", str(real_data("brendenlake/omniglot")), "--cache_dir", str(folder / "decoded")]
    words += ["--max_train_samples", "800", "--max_eval_samples", "400", "--num_train_epochs", "1"]
    words += ["--stop_after_steps", "6"]
    words += ["--episode_classes", "10", "--dataloader_num_workers", "0", "--output_dir", str(folder / "run")]
    run_main(recipe, words)
    return folder / "run"


def test_unseen_alphabets_are_retrieved_and_training_characters_named(omniglot, results_of):
    """The chance level is one in a hundred."""
    results = results_of(omniglot)
    assert results["steps"] == 6
    assert results["eval_recall_at_1"] > 0.03
    assert results["validation_recall_at_1"] > 0.1
    """15 % of 136 classes are held out."""
    names = list(AutoModelForImageClassification.from_pretrained(omniglot).config.id2label.values())
    assert len(names) == 116
    assert all("/character" in name for name in names)
