"""Weight snapshots of a run, and runs with corrupted labels or pixels."""

import json
import shutil

import pytest
from safetensors.torch import load_file
from training_runs import DIGITS, same

from hf_sphere.utils.snapshots import SNAPSHOT_FOLDER, list_snapshots

RECIPE = "train_image_classification"
QUICK = [*DIGITS, "--head", "softmax", "--num_train_epochs", "5"]
KEPT = FINISHED = ["--snapshot_epochs", "4", "--snapshot_until", "1"]


def epochs_of(folder) -> list[int]:
    return [snapshot.epoch for snapshot in list_snapshots(folder)]


def test_snapshots_of_the_initial_requested_and_last_epochs_are_kept_and_identify_their_run(finished):
    assert epochs_of(finished) == [0, 1, 4, 5]
    first = list_snapshots(finished)[0].metadata
    assert (first["dataset"], first["seed"]) == ("digits", "0")
    assert "linear_embedding" in first["model"]
    assert json.loads((finished / "run.json").read_text())["corruption_seed"] is None


def test_resuming_a_finished_run_leaves_its_snapshots_unchanged_and_no_other_run_overwrites_them(
    finished, train, tmp_path
):
    folder = shutil.copytree(finished, tmp_path / "run")
    before = [load_file(snapshot.path) for snapshot in list_snapshots(folder)]
    train(*KEPT, "--resume_from_checkpoint", "latest")
    after = [load_file(snapshot.path) for snapshot in list_snapshots(folder)]
    assert all(map(same, after, before))
    for path in folder.iterdir():
        if path.name != SNAPSHOT_FOLDER:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(FileExistsError, match=SNAPSHOT_FOLDER):
        train()
    assert epochs_of(folder) == [0, 1, 4, 5]


def test_resuming_from_an_earlier_checkpoint_removes_later_snapshots(train):
    folder = train(*KEPT, "--save_total_limit", "9")
    train(*KEPT, "--resume_from_checkpoint", str(folder / "checkpoint-20"), "--num_train_epochs", "3")
    assert epochs_of(folder) == [0, 1, 3]


def test_the_best_epoch_can_be_chosen_by_a_training_metric_and_no_snapshots_are_kept(train, results_of):
    results = results_of(folder := train("--metric_for_best_model", "train_loss", "--load_best_model_at_end"))
    best = min(results["history"], key=lambda entry: entry["train_loss"])
    assert results["best_train_loss"] == best["train_loss"]
    assert results["best_epoch"] == best["epoch"]
    assert not (folder / SNAPSHOT_FOLDER).exists()


def test_resuming_with_another_metric_restarts_the_choice_of_the_best_epoch(train, results_of):
    train("--num_train_epochs", "3")
    words = ["--resume_from_checkpoint", "latest", "--num_train_epochs", "5", "--metric_for_best_model", "train_loss"]
    results = results_of(train(*words))
    late = min(results["history"][3:], key=lambda entry: entry["train_loss"])
    assert results["best_train_loss"] == late["train_loss"]
    assert results["best_epoch"] == late["epoch"]


def test_the_corruption_seed_is_saved_with_the_run_and_kept_when_it_is_resumed(train):
    for words in (["--seed", "7", "--num_train_epochs", "2"], ["--seed", "8", "--resume_from_checkpoint", "latest"]):
        folder = train("--label_noise", "0.5", *words)
        assert json.loads((folder / "run.json").read_text())["corruption_seed"] == 7


def test_random_labels_are_memorized_without_generalizing(train, results_of):
    noisy = ["--label_noise", "1.0", "--backbone", "mlp", "--backbone_kwargs", "{widths: [256]}"]
    results = results_of(train(*noisy, "--num_train_epochs", "40", "--learning_rate", "0.003"))
    assert results["train_accuracy"] > 0.95
    assert results["eval_accuracy"] < 0.25
