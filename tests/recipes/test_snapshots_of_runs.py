"""What a run leaves of the weights along its way, and of the labels and pixels that it was given."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_sphere.snapshot_files import SNAPSHOT_FOLDER, list_snapshots
from hf_sphere.training import TrainingInterruptedError, TrainingLoop

# A linear map to 32 units on the embedded digits: an epoch of 200 images in 10 steps.
QUICK = ["--dataset_name", "digits", "--max_train_samples", "200", "--per_device_train_batch_size", "20"]
QUICK += ["--backbone", "linear_embedding", "--backbone_kwargs", "{width: 32}", "--learning_rate", "0.01"]
QUICK += ["--head", "softmax", "--num_train_epochs", "5", "--disable_tqdm"]
KEPT = ["--snapshot_epochs", "4", "--snapshot_until", "1"]


@pytest.fixture(scope="module")
def run_in(load_recipe, run_quickly):
    """Run the recipe, quickly, into a given folder."""
    return run_quickly(load_recipe("train_image_classification"), QUICK)


@pytest.fixture(scope="module")
def finished(run_in, tmp_path_factory):
    return run_in(tmp_path_factory.mktemp("finished") / "run", *KEPT)


def epochs_of(folder) -> list[int]:
    return [snapshot.epoch for snapshot in list_snapshots(folder)]


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_the_initialisation_the_asked_for_and_the_last_epoch_are_kept(finished):
    assert epochs_of(finished) == [0, 1, 4, 5]


def test_the_last_snapshot_is_the_saved_model(finished):
    assert same(load_file(list_snapshots(finished)[-1].path), load_file(finished / "model.safetensors"))


def test_a_snapshot_says_of_which_run_it_is(finished):
    first = list_snapshots(finished)[0].metadata
    assert first["dataset"] == "digits"
    assert first["seed"] == "0"
    assert "linear_embedding" in first["model"]


def test_a_run_keeps_no_snapshots_unless_told(train):
    assert not (train() / SNAPSHOT_FOLDER).exists()


def test_a_run_that_replaces_another_leaves_none_of_its_snapshots(train):
    train(*KEPT)
    assert epochs_of(train("--overwrite_output_dir", "--snapshot_epochs", "3")) == [0, 3, 5]


def test_a_resumed_run_has_the_snapshots_of_an_uninterrupted_one(finished, train, monkeypatch):
    step = TrainingLoop._train_step

    def stop_in_the_third_epoch(loop, group):
        step(loop, group)
        loop._stop_signal = 2 if loop.state.step == 25 else 0

    monkeypatch.setattr(TrainingLoop, "_train_step", stop_in_the_third_epoch)
    with pytest.raises(TrainingInterruptedError):
        train(*KEPT)
    monkeypatch.undo()
    folder = train(*KEPT, "--resume_from_checkpoint", "latest")
    assert epochs_of(folder) == epochs_of(finished)
    for ours, theirs in zip(list_snapshots(folder), list_snapshots(finished), strict=True):
        assert same(load_file(ours.path), load_file(theirs.path))


def test_going_on_from_an_earlier_checkpoint_forgets_the_snapshots_of_later_epochs(train):
    folder = train(*KEPT, "--save_total_limit", "9")
    train(*KEPT, "--resume_from_checkpoint", str(folder / "checkpoint-20"), "--num_train_epochs", "3")
    assert epochs_of(folder) == [0, 1, 3]


def test_the_metric_that_chooses_may_be_of_training(train, results_of):
    results = results_of(train("--metric_for_best_model", "train_loss", "--load_best_model_at_end"))
    best = min(results["history"], key=lambda entry: entry["train_loss"])
    assert results["best_train_loss"] == best["train_loss"]
    assert results["best_epoch"] == best["epoch"]


def test_a_run_stops_on_a_plateau_of_the_training_loss(train, results_of):
    still = ["--learning_rate", "0", "--early_stopping_patience", "2", "--metric_for_best_model", "train_loss"]
    results = results_of(train(*still, "--num_train_epochs", "9"))
    assert results["epoch"] == results["best_epoch"] + 2 < 9


@pytest.mark.parametrize("name", ["accuracy", "validation_accuracy"])
def test_a_metric_of_no_such_split_is_refused(name, train):
    with pytest.raises(ValueError, match=rf"train_loss or eval_accuracy; got '{name}'"):
        train("--metric_for_best_model", name)


def test_a_metric_that_is_not_measured_is_refused_with_those_that_are(train):
    with pytest.raises(ValueError, match=r"'train_acuracy'; this run measures: train_loss, train_accuracy"):
        train("--metric_for_best_model", "train_acuracy")


def test_the_seed_of_a_corruption_is_noted_with_the_run(train):
    folder = train("--label_noise", "0.5", "--seed", "7")
    assert json.loads((folder / "run.json").read_text())["corruption_seed"] == 7


def test_a_run_without_corruption_notes_no_seed_of_one(finished):
    assert json.loads((finished / "run.json").read_text())["corruption_seed"] is None


def test_a_seed_of_nothing_is_refused(train):
    with pytest.raises(SystemExit):
        train("--corruption_seed", "3")


def test_random_labels_are_learnt_by_heart_and_say_nothing_of_new_images(train, results_of):
    noisy = ["--label_noise", "1.0", "--backbone", "mlp", "--backbone_kwargs", "{widths: [256]}"]
    results = results_of(train(*noisy, "--num_train_epochs", "40", "--learning_rate", "0.003"))
    assert results["train_accuracy"] > 0.95
    assert results["eval_accuracy"] < 0.25
