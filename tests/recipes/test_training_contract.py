"""What every training recipe guarantees: outputs, reproducibility, resuming, overwriting, the best epoch, snapshots."""

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from training_runs import QUICK_RUNS, QuickRun, same, weights

from hf_sphere.training import CheckpointError, find_task, task_names
from hf_sphere.utils.commands import COMMANDS
from hf_sphere.utils.snapshots import list_snapshots

Train = Callable[..., Path]
FINISHED = ["--snapshot_epochs", "1"]
# From the third epoch on the learning rate ruins the model.
RUINED = ["--num_train_epochs", "4", "--lr_scheduler_type", "multistep", "--lr_milestones", "2", "--lr_gamma"]


ONE_TASK = pytest.mark.parametrize("task", ["classification"], indirect=True)
"""For what the training loop does for all tasks alike."""


def test_every_task_has_a_quick_run():
    assert set(QUICK_RUNS) == set(task_names())


@pytest.fixture(scope="module", params=sorted(QUICK_RUNS))
def task(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def quick(task: str) -> QuickRun:
    return QUICK_RUNS[task]


@pytest.fixture(scope="module")
def run_in(quick: QuickRun, load_recipe, run_quickly) -> Train:
    """Run the recipe into a given folder."""
    return run_quickly(load_recipe(quick.recipe), quick.argv)


@pytest.fixture(scope="module")
def ruined(run_in: Train, quick: QuickRun, tmp_path_factory) -> Path:
    """The folder of a run that keeps the model of its best epoch, which is not the last; read only."""
    words = [*RUINED, quick.ruinous_gamma, *quick.held_out, "--load_best_model_at_end"]
    return run_in(tmp_path_factory.mktemp("ruined") / "run", *words)


def max_train_samples(quick: QuickRun) -> int:
    return int(quick.argv[quick.argv.index("--max_train_samples") + 1])


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# Outputs


def test_a_run_writes_model_card_results_and_settings(finished, quick):
    names = {"model.safetensors", "config.json", "README.md", "all_results.json", "run.json"}
    assert names <= {path.name for path in finished.iterdir()}
    settings = json.loads((finished / "run.json").read_text())
    assert (settings["snapshot_epochs"], settings["max_train_samples"]) == (1, max_train_samples(quick))
    assert settings["recipe"] == quick.recipe


def test_the_results_have_every_headline_metric_and_the_best_of_the_history(finished, results_of, task):
    kind, results = find_task(task), results_of(finished)
    assert {f"eval_{name}" for name in kind.headline} <= results.keys()
    assert (results["epoch"], results["steps"], len(results["history"])) == (2.0, 20, 2)
    evaluated = "validation" if task == "masked_lm" else "eval"
    best = min if kind.metric.endswith(("loss", "error")) else max
    assert results[f"best_{kind.metric}"] == best(entry[f"{evaluated}_{kind.metric}"] for entry in results["history"])


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


def test_files_have_the_default_mode_and_those_that_are_published_no_absolute_path(finished):
    folders = str(finished.parents[1])
    published = [p for p in finished.iterdir() if p.is_file() and not p.name.startswith(".")]
    assert [path.name for path in published if folders.encode() in path.read_bytes()] == []
    os.umask(mask := os.umask(0))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in finished.rglob("*")}
    assert [path for path, mode in modes.items() if mode != (0o777 if path.is_dir() else 0o666) & ~mask] == []


def test_snapshots_of_initialization_and_epochs_are_kept_and_the_last_is_the_saved_model(finished):
    snapshots = list_snapshots(finished)
    assert [snapshot.epoch for snapshot in snapshots] == [0, 1, 2]
    assert same(weights(finished), load_file(snapshots[-1].path))


# Reproducibility


def test_the_same_seed_gives_the_same_model_and_its_last_line_the_headline_metrics(finished, train, task, capsys):
    folder = train()
    assert same(weights(finished), weights(folder))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "model and results in" in line]
    assert line.startswith(f"eval_{find_task(task).headline[0]} ")
    assert str(folder) in line
    assert not same(weights(folder), weights(train("--seed", "1", name="other")))


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


RESUME = ["--resume_from_checkpoint", "latest"]


@ONE_TASK
@pytest.mark.parametrize("words", [["--learning_rate", "1"], ["--num_train_epochs", "1"]])
def test_a_finished_run_is_not_trained_with_other_settings_and_unchanged(words, finished, train, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=f"finished and is not trained again with other settings: {words[0][2:]} "):
        train(*words, *RESUME)
    assert contents(tmp_path) == before


# Output directories


@ONE_TASK
def test_an_overwritten_run_leaves_nothing_behind(finished, train, results_of, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    folder = train("--num_train_epochs", "1", "--overwrite_output_dir", "--snapshot_epochs", "1")
    assert results_of(folder)["steps"] == 10
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-10"]
    assert [snapshot.epoch for snapshot in list_snapshots(folder)] == [0, 1]


# The best epoch


def best_checkpoint(folder: Path, results: dict) -> Path:
    return folder / f"checkpoint-{results['history'][results['best_epoch'] - 1]['step']}"


def test_the_model_of_the_best_epoch_on_held_out_data_is_kept_as_the_card_states(ruined, results_of, task):
    kind, results = find_task(task), results_of(ruined)
    values = [entry[f"validation_{kind.metric}"] for entry in results["history"]]
    best = (min if kind.metric.endswith(("loss", "error")) else max)(values)
    assert results["best_epoch"] == values.index(best) + 1 < results["epoch"]
    assert results[f"best_{kind.metric}"] == best
    # In retrieval, rounding can swap neighbors at almost equal distances.
    assert results[f"validation_{kind.metric}"] == pytest.approx(best, abs=3e-3 if task == "retrieval" else 0, rel=0)
    kept, of_best = weights(ruined), weights(best_checkpoint(ruined, results))
    # Some are fitted to held-out images after training, and tied ones may have either name.
    names = kept.keys() & of_best.keys() - {"head.class_concentration"}
    assert names
    assert same(*({name: tensors[name] for name in names} for tensors in (kept, of_best)))
    where = "validation" if task == "masked_lm" else "a held-out part of the training split"
    assert f"chosen by its {kind.metric.replace('_', ' ')} on {where}." in (ruined / "README.md").read_text()


@ONE_TASK
def test_a_damaged_checkpoint_of_the_best_epoch_is_refused_and_without_one_the_last_model_is_saved(
    ruined, train, results_of, quick, tmp_path
):
    shutil.copytree(ruined, tmp_path / "run")
    best = best_checkpoint(tmp_path / "run", results_of(ruined))
    data = bytearray((best / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (best / "model.safetensors").write_bytes(data)
    words = [*RUINED, quick.ruinous_gamma, *quick.held_out, "--load_best_model_at_end", *RESUME]
    with pytest.raises(CheckpointError, match=f"cannot load {best}: model.safetensors is damaged"):
        train(*words)
    shutil.rmtree(best)
    assert results_of(folder := train(*words))["best_epoch"] is None
    assert "The model is from the last epoch" in (folder / "README.md").read_text()
