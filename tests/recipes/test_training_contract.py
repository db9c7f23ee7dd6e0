"""What every training recipe guarantees: outputs, reproducibility, resuming, overwriting, the best epoch, snapshots."""

import json
import os
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from training_runs import QUICK_RUNS, QuickRun, same, weights

from hf_sphere.training import (
    CheckpointError,
    TrainingDivergedError,
    TrainingInterruptedError,
    TrainingLoop,
    find_task,
    task_names,
)
from hf_sphere.utils.commands import COMMANDS
from hf_sphere.utils.files import write_manifest
from hf_sphere.utils.snapshots import list_snapshots

Train = Callable[..., Path]
# From the third epoch on the learning rate ruins the model.
RUINED = ["--num_train_epochs", "4", "--lr_scheduler_type", "multistep", "--lr_milestones", "2", "--lr_gamma"]


def test_every_task_has_a_quick_run():
    assert set(QUICK_RUNS) == set(task_names())


@pytest.fixture(scope="module", params=sorted(QUICK_RUNS))
def task(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def quick(task: str) -> QuickRun:
    return QUICK_RUNS[task]


@pytest.fixture(scope="module")
def run_in(quick: QuickRun, load_recipe, run_quickly, texts) -> Train:
    """Run the recipe into a given folder."""
    return run_quickly(load_recipe(quick.recipe), [str(texts) if word == "TEXTS" else word for word in quick.argv])


@pytest.fixture(scope="module")
def finished(run_in: Train, tmp_path_factory) -> Path:
    """The folder of a finished run with snapshots; read only."""
    return run_in(tmp_path_factory.mktemp("finished") / "run", "--snapshot_epochs", "1")


@pytest.fixture(scope="module")
def ruined(run_in: Train, quick: QuickRun, tmp_path_factory) -> Path:
    """The folder of a run that keeps the model of its best epoch, which is not the last; read only."""
    words = [*RUINED, quick.ruinous_gamma, *quick.held_out, "--load_best_model_at_end"]
    return run_in(tmp_path_factory.mktemp("ruined") / "run", *words)


def max_train_samples(quick: QuickRun) -> int:
    return int(quick.argv[quick.argv.index("--max_train_samples") + 1])


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Outputs


def test_a_run_writes_model_card_results_and_settings_and_the_best_model_if_it_is_loaded(finished, ruined, quick):
    names = {"model.safetensors", "config.json", "README.md", "all_results.json", "run.json"}
    assert names <= {path.name for path in finished.iterdir()}
    assert [(folder / "best").exists() for folder in (finished, ruined)] == [False, True]
    settings = json.loads((finished / "run.json").read_text())
    assert (settings["snapshot_epochs"], settings["max_train_samples"]) == (1, max_train_samples(quick))


def test_the_results_have_every_headline_metric_and_the_best_of_the_history(finished, results_of, task):
    kind, results = find_task(task), results_of(finished)
    assert {f"eval_{name}" for name in kind.headline} <= results.keys()
    assert (results["epoch"], results["steps"], len(results["history"])) == (2.0, 20, 2)
    evaluated, best = "validation" if task == "masked_lm" else "eval", max if kind.higher_is_better else min
    assert results[f"best_{kind.metric}"] == best(entry[f"{evaluated}_{kind.metric}"] for entry in results["history"])
    names = {f"{prefix}_{n}" for prefix in ("train", evaluated) for n in kind.selectable_metrics(prefix)}
    assert names <= results["history"][0].keys()


def test_the_card_has_the_installation_command_metrics_changed_settings_and_license(finished, results_of, task, quick):
    card, results = ModelCard.load(finished / "README.md"), results_of(finished)
    expected = {name: round(results[f"eval_{name}"], 6) for name in find_task(task).headline}
    assert {result.metric_type: result.metric_value for result in card.data.eval_results} == expected
    assert card.data.license == "unknown"
    assert "pip install hf_sphere" in card.text.partition("\n## ")[0]
    assert "pip install hf_sphere" in (finished / "config.json").read_text()
    assert f"hf-sphere {COMMANDS[quick.recipe]} " in card.content
    assert f"| max_train_samples | {max_train_samples(quick)} |" in card.content
    assert "| momentum |" not in card.content  # a default
    assert "bf16" not in card.content


def test_no_published_file_has_an_absolute_path(finished):
    folders = str(finished.parents[1])
    published = [p for p in finished.iterdir() if p.is_file() and not p.name.startswith(".")]
    assert [path.name for path in published if folders.encode() in path.read_bytes()] == []


def test_the_last_line_shows_the_headline_metrics(train, capsys, task):
    folder = train("--num_train_epochs", "1")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "model and results in" in line]
    assert line.startswith(f"eval_{find_task(task).headline[0]} ")
    assert str(folder) in line


# Reproducibility


def test_the_same_seed_gives_the_same_model_and_another_seed_another(finished, train):
    assert same(weights(finished), weights(train()))
    assert not same(weights(finished), weights(train("--seed", "1", name="other")))


def test_a_run_of_zero_epochs_saves_the_model_it_starts_from(finished, train, task):
    words = ["--model_name_or_path", str(finished), "--num_train_epochs", "0"]
    if task == "masked_lm":  # otherwise it starts from the configuration only
        words += ["--from_scratch", "false", "--spherized", "false"]
    assert same(weights(train(*words)), weights(finished))


# Resuming


@pytest.mark.parametrize("steps", [7, 10])
def test_a_resumed_run_ends_with_the_model_of_an_uninterrupted_one(finished, train, results_of, task, steps):
    """In the middle of an epoch, and at its end."""
    train("--stop_after_steps", str(steps))
    resumed = train("--resume_from_checkpoint", "latest")
    assert same(weights(finished), weights(resumed))
    metric = f"eval_{find_task(task).headline[0]}"
    assert results_of(resumed)[metric] == results_of(finished)[metric]


def test_an_interrupted_run_resumes_from_the_checkpoint_it_wrote(finished, train, monkeypatch):
    step = TrainingLoop._train_step

    def interrupted(loop: TrainingLoop, group: list) -> None:
        step(loop, group)
        if loop.state.step == 13:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TrainingLoop, "_train_step", interrupted)
    with pytest.raises(TrainingInterruptedError, match="stopped at step 13 of 20"):
        train("--snapshot_epochs", "1")
    monkeypatch.setattr(TrainingLoop, "_train_step", step)
    folder = train("--snapshot_epochs", "1", "--resume_from_checkpoint", "latest")
    assert same(weights(finished), weights(folder))
    for ours, theirs in zip(list_snapshots(folder), list_snapshots(finished), strict=True):
        assert same(load_file(ours.path), load_file(theirs.path))


def test_resuming_without_a_checkpoint_is_refused(train):
    with pytest.raises(RuntimeError, match="there is no checkpoint in"):
        train("--resume_from_checkpoint", "latest")


def test_a_finished_run_is_not_resumed_with_other_settings(finished, train, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    before = contents(tmp_path / "run")
    for words in (["--learning_rate", "1"], ["--num_train_epochs", "1"]):
        with pytest.raises(ValueError, match=f"finished and is not trained again with other settings: {words[0][2:]} "):
            train(*words, "--resume_from_checkpoint", "latest")
    assert contents(tmp_path / "run") == before


def test_a_run_that_cannot_resume_keeps_its_settings(finished, train, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    words = ["--num_train_epochs", "3", "--lr_scheduler_type", "reduce_lr_on_plateau"]
    with pytest.raises(CheckpointError, match="another lr_scheduler_type"):
        train(*words, "--resume_from_checkpoint", "latest")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["num_train_epochs"] == 2


# Divergence


def test_a_diverged_run_stops_without_saving_its_model(train, tmp_path):
    with pytest.raises(TrainingDivergedError, match="not finite"):
        train("--optim", "sgd", "--learning_rate", "1e38")
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert not list((tmp_path / "run").glob("checkpoint-*"))


# Output directories


def test_another_run_is_neither_replaced_nor_changed_unless_requested(train):
    folder = train("--num_train_epochs", "1")
    before = contents(folder)
    with pytest.raises(FileExistsError, match="--overwrite_output_dir"):
        train("--seed", "1")
    assert contents(folder) == before


def test_an_overwritten_run_leaves_nothing_behind(train, results_of):
    train("--save_total_limit", "9", "--snapshot_epochs", "1")
    folder = train("--num_train_epochs", "1", "--overwrite_output_dir", "--snapshot_epochs", "1")
    assert results_of(folder)["steps"] == 10
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-10"]
    assert [snapshot.epoch for snapshot in list_snapshots(folder)] == [0, 1]


def test_a_run_that_does_not_start_replaces_nothing(train):
    folder = train("--num_train_epochs", "1")
    before = contents(folder)
    with pytest.raises(ValueError, match="metric_for_best_model must be one of"):
        train("--metric_for_best_model", "nonsense", "--overwrite_output_dir")
    assert contents(folder) == before


def test_a_run_that_does_not_start_creates_no_directory(train, tmp_path):
    with pytest.raises(ValueError, match="metric_for_best_model must be one of"):
        train("--metric_for_best_model", "nonsense")
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_not_replaced_by_the_run_that_starts_from_it(train, finished, tmp_path):
    model = tmp_path / "run"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        shutil.copy(finished / name, model)
    before = contents(model)
    with pytest.raises(FileExistsError, match="files that no run wrote"):
        train("--model_name_or_path", str(model))
    assert contents(model) == before


def test_every_file_has_the_default_mode(finished):
    os.umask(mask := os.umask(0))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in finished.rglob("*")}
    assert [path for path, mode in modes.items() if mode != (0o777 if path.is_dir() else 0o666) & ~mask] == []


# The best epoch


def test_the_model_of_the_best_epoch_is_kept(ruined, results_of):
    assert results_of(ruined)["best_epoch"] < results_of(ruined)["epoch"]
    kept, best = weights(ruined), weights(ruined / "best")
    # Fitted to held-out images after training.
    kept.pop("head.class_concentration", None), best.pop("head.class_concentration", None)
    assert same(kept, best)


def test_the_best_epoch_is_chosen_on_held_out_data(ruined, results_of, task):
    kind, results = find_task(task), results_of(ruined)
    values = [entry[f"validation_{kind.metric}"] for entry in results["history"]]
    best = (max if kind.higher_is_better else min)(values)
    assert results["best_epoch"] == values.index(best) + 1
    assert results[f"best_{kind.metric}"] == best
    # In retrieval, rounding can swap neighbors at almost equal distances.
    assert results[f"validation_{kind.metric}"] == pytest.approx(best, abs=3e-3 if task == "retrieval" else 0, rel=0)


def test_a_damaged_model_of_the_best_epoch_is_not_saved_as_the_result(train, quick):
    words = [*quick.held_out, "--load_best_model_at_end"]
    best = train("--stop_after_steps", "10", *words) / "best" / "model.safetensors"
    data = bytearray(best.read_bytes())
    data[-1] ^= 1
    best.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"cannot load the best model .*: model.safetensors is damaged"):
        train("--resume_from_checkpoint", "latest", *words, "--stop_after_steps", "10")


def test_a_run_that_did_not_keep_its_best_model_is_not_resumed_to_load_it(train):
    train("--stop_after_steps", "10")
    with pytest.raises(CheckpointError, match=r"cannot load the best model .*/best: .* Leave out load_best"):
        train("--resume_from_checkpoint", "latest", "--load_best_model_at_end")


def test_the_model_of_another_epoch_is_not_loaded_as_that_of_the_best_one(ruined, train, results_of, quick, tmp_path):
    shutil.copytree(ruined, tmp_path / "run")
    (tmp_path / "run" / "best" / "trainer_state.json").write_text('{"best_epoch": 9}')
    write_manifest(tmp_path / "run" / "best")
    words = [*RUINED, quick.ruinous_gamma, *quick.held_out, "--load_best_model_at_end"]
    folder = train(*words, "--resume_from_checkpoint", "latest")
    assert results_of(folder)["best_epoch"] is None
    assert "The model is from the last epoch" in (folder / "README.md").read_text()


def test_the_card_states_on_which_data_the_epoch_was_chosen(ruined, task):
    where = "validation" if task == "masked_lm" else "a held-out part of the training split"
    metric = find_task(task).metric.replace("_", " ")
    assert f"chosen by its {metric} on {where}." in (ruined / "README.md").read_text()


# Snapshots


def test_snapshots_of_initialization_and_epochs_are_kept_and_the_last_is_the_saved_model(finished):
    snapshots = list_snapshots(finished)
    assert [snapshot.epoch for snapshot in snapshots] == [0, 1, 2]
    assert same(weights(finished), load_file(snapshots[-1].path))
