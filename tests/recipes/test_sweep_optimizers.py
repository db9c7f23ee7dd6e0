import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

# Three steps of ResNet-20 on the bundled digits.
QUICK = ["--dataset_name", "digits", "--max_train_samples", "60", "--per_device_train_batch_size", "20"]
QUICK += ["--max_eval_samples", "40", "--num_train_epochs", "1", "--disable_tqdm", "true"]
SETTING = ["--setting", "cifar10-resnet20"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> list[str]:
    return [*SETTING, *QUICK, "--cache_dir", str(tmp_path_factory.mktemp("decoded"))]


@pytest.fixture(scope="module")
def sweep(load_recipe) -> ModuleType:
    return load_recipe("sweep_optimizers")


class Runs:
    """Runs the training recipe in this process instead of a subprocess, and records the commands."""

    def __init__(self, recipe: ModuleType, run_main: Callable[[ModuleType, list[str]], None]) -> None:
        self.commands: list[list[str]] = []
        self._recipe, self._run_main = recipe, run_main

    def run(self, command: list[str]) -> SimpleNamespace:
        python, script, *words = command
        assert (python, Path(script).name) == (sys.executable, "train_image_classification.py")
        self.commands.append(words)
        try:
            self._run_main(self._recipe, words)
        except ValueError as error:
            print(f"Error: {error}")
            return SimpleNamespace(returncode=1)
        except SystemExit as stop:
            return SimpleNamespace(returncode=stop.code)
        return SimpleNamespace(returncode=0)


@pytest.fixture(scope="module")
def in_process(sweep, load_recipe, run_main) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patch:
        runs = Runs(load_recipe("train_image_classification"), run_main)
        patch.setattr(sweep, "subprocess", runs)
        yield runs


@pytest.fixture
def runs(in_process) -> Runs:
    in_process.commands.clear()
    return in_process


@pytest.fixture(scope="module")
def finished(sweep, in_process, quick, tmp_path_factory) -> tuple[Path, str]:
    """The folder and printed output of a finished sweep of two optimizers; read only."""
    folder, printed = tmp_path_factory.mktemp("finished") / "sweep", io.StringIO()
    with contextlib.redirect_stdout(printed):
        sweep.main([*quick, "--optimizers", "adam", "adam_srt", "--output_dir", str(folder)])
    return folder, printed.getvalue()


# Output


@pytest.mark.parametrize("optimizer", ["adam", "adam_srt"])
def test_each_run_has_the_settings_of_its_optimizer(finished, optimizer):
    settings = json.loads((finished[0] / f"{optimizer}-seed0" / "run.json").read_text())
    assert (settings["optimizer"], settings["seed"], settings["backbone"]) == (optimizer, 0, "resnet20_cifar")
    assert settings["weight_decay"] == {"adam": 5e-4, "adam_srt": 7.8125e-6}[optimizer]


def test_the_summary_has_the_accuracies_of_the_runs(finished, results_of):
    folder, _ = finished
    accuracies = {name: [results_of(folder / f"{name}-seed0")["eval_accuracy"]] for name in ("adam", "adam_srt")}
    assert json.loads((folder / "sweep.json").read_text()) == {
        "setting": "cifar10-resnet20",
        "eval_accuracy": accuracies,
    }


def test_the_figure_has_a_curve_for_every_optimizer(finished):
    picture = Image.open(finished[0] / "sweep.png").convert("RGB")
    colors = {color for _, color in picture.getcolors(picture.width * picture.height)}
    assert {(63, 144, 218), (255, 169, 14)} <= colors


def test_the_table_has_a_row_for_every_optimizer(finished, results_of):
    folder, printed = finished
    rows = re.findall(r"^\| (adam\w*) \| 1 \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \|$", printed, re.MULTILINE)
    expected = []
    for name in ("adam", "adam_srt"):
        results = results_of(folder / f"{name}-seed0")
        expected.append((name, f"{100 * results['eval_accuracy']:.2f}", f"{100 * results['best_accuracy']:.2f}"))
    assert rows == expected


# Repeated calls


def test_a_second_call_repeats_only_the_comparison(sweep, runs, finished, quick, capsys):
    folder, _ = finished
    (folder / "sweep.png").unlink()
    sweep.main([*quick, "--optimizers", "adam", "adam_srt", "--output_dir", str(folder)])
    assert runs.commands == []
    assert capsys.readouterr().out.count("already finished") == 2
    assert (folder / "sweep.png").is_file()


def test_a_call_for_one_optimizer_compares_all_existing_runs(sweep, runs, finished, quick, capsys):
    sweep.main([*quick, "--optimizers", "adam", "--output_dir", str(finished[0])])
    assert "| adam_srt | 1 |" in capsys.readouterr().out


def test_runs_with_different_arguments_are_not_mixed(sweep, finished, quick):
    words = [*quick, "--output_dir", str(finished[0]), "--max_steps", "2"]
    with pytest.raises(ValueError, match=r"with the arguments .* not of .*--max_steps 2.*another --output_dir"):
        sweep.main(words)


def test_an_interrupted_run_resumes(sweep, runs, finished, quick, tmp_path, results_of, capsys):
    words = [*quick, "--optimizers", "adam_srt", "--output_dir", str(tmp_path)]
    run = tmp_path / "adam_srt-seed0"
    sweep.main([*words, "--max_steps", "2"])
    (run / "all_results.json").unlink()
    (tmp_path / "arguments.json").unlink()
    capsys.readouterr()
    sweep.main(words)
    assert f"{run}: resuming" in capsys.readouterr().out
    assert "--resume_from_checkpoint" in runs.commands[-1]
    assert (results_of(run)["steps"], results_of(run)["epoch"]) == (3, 1.0)
    unbroken, resumed = (load_file(r / "model.safetensors") for r in (finished[0] / "adam_srt-seed0", run))
    torch.testing.assert_close(resumed, unbroken, rtol=0, atol=0)


def test_a_run_without_a_checkpoint_starts_from_scratch(sweep, runs, quick, tmp_path, results_of, capsys):
    run = tmp_path / "adam-seed0"
    run.mkdir()
    (run / "run.json").write_text("{}")
    sweep.main([*quick, "--optimizers", "adam", "--output_dir", str(tmp_path)])
    assert f"{run}: starting" in capsys.readouterr().out
    assert results_of(run)["steps"] == 3


# Failing runs

FAILS = ["--optimizers", "sgd_mrt", "adam", "--nesterov", "true"]  # sgd_mrt does not have this option


def test_a_failed_run_is_named_and_the_others_are_compared(sweep, runs, quick, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"1 of the runs failed: sgd_mrt with seed 0\. See their messages above"):
        sweep.main([*quick, *FAILS, "--output_dir", str(tmp_path)])
    assert list(json.loads((tmp_path / "sweep.json").read_text())["eval_accuracy"]) == ["adam"]
    assert "| adam | 1 |" in capsys.readouterr().out


def test_nothing_is_compared_if_all_runs_fail(sweep, runs, quick, tmp_path):
    with pytest.raises(ValueError, match="2 of the runs failed: sgd_mrt with seed 0, sgd_mrt with seed 1"):
        sweep.main([*quick, *FAILS[:2], *FAILS[3:], "--seeds", "0", "1", "--output_dir", str(tmp_path)])
    assert list(tmp_path.glob("sweep.*")) == []


def test_ctrl_c_in_a_run_stops_the_sweep(sweep, quick, tmp_path, monkeypatch):
    started = []

    def stopped(command: list[str]) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace(returncode=130)

    monkeypatch.setattr(sweep, "subprocess", SimpleNamespace(run=stopped))
    with pytest.raises(KeyboardInterrupt):
        sweep.main([*quick, "--optimizers", "adam", "adam_srt", "--output_dir", str(tmp_path)])
    assert len(started) == 1


@pytest.mark.slow
def test_the_sweep_exits_with_status_1_if_a_run_fails(start, quick, tmp_path):
    words = [*quick, *FAILS[:2], *FAILS[3:], "--output_dir", tmp_path / "sweep"]
    process = start("recipes/sweep_optimizers.py", *words)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 1, printed
    assert "sgd_mrt has no nesterov form; leave nesterov out" in printed
    assert [line for line in printed.splitlines() if line.startswith(("Error:", "Traceback"))] == [
        "Error: 1 of the runs failed: sgd_mrt with seed 0. See their messages above."
    ]


# The command line


def test_every_setting_has_a_configuration_for_every_optimizer(sweep):
    settings = {path.stem.rsplit("-", 1)[0] for path in sweep.CONFIGS.glob("*.yaml")}
    names = {f"{setting}-{optimizer}.yaml" for setting in settings for optimizer in sweep.OPTIMIZERS}
    assert names == {path.name for path in sweep.CONFIGS.glob("*.yaml")}


def test_by_default_all_optimizers_run_with_one_seed(sweep):
    args, words = sweep.parse(SETTING)
    assert (args.optimizers, args.seeds, args.output_dir, words) == (sweep.OPTIMIZERS, [0], None, [])


def test_unknown_arguments_are_appended_to_every_run(sweep, tmp_path):
    args, words = sweep.parse([*SETTING, "--learning_rate", "0.5", "--seeds", "3"])
    line = sweep.command(args.setting, "adam", args.seeds[0], tmp_path, words)
    assert line[-2:] == ["--learning_rate", "0.5"]
    assert line[line.index("--seed") + 1] == "3"


@pytest.mark.parametrize(
    "words",
    [
        ["--config", "x.yaml"],
        ["--optimizer", "adam"],
        ["--seed", "3"],
        ["--seed=3"],
        ["--resume_from_checkpoint", "latest"],
        ["--resume-from-checkpoint", "latest"],
        ["--output-dir", "elsewhere"],
    ],
    ids=lambda words: words[0],
)
def test_arguments_set_by_the_sweep_are_refused(sweep, words, capsys):
    with pytest.raises(SystemExit) as stop:
        sweep.parse([*SETTING, *words])
    assert stop.value.code == 2
    assert (
        f"{words[0].split('=')[0].replace('-', '_').replace('__', '--', 1)} is set by the sweep; leave it out."
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "words", [[], ["--setting", "mnist-lenet5"], [*SETTING, "--optimizers", "adamax"], [*SETTING, "--seeds", "one"]]
)
def test_invalid_arguments_are_refused(sweep, words, capsys):
    with pytest.raises(SystemExit) as stop:
        sweep.parse(words)
    assert stop.value.code == 2


# The comparison


def result(accuracy: float) -> dict:
    return {"eval_accuracy": accuracy, "best_accuracy": accuracy + 0.1, "train_runtime": 6.0, "epoch": 3.0}


def test_runs_with_several_seeds_are_averaged(sweep):
    *_, row = sweep.table({"adam": [result(0.5), result(0.6)]}).splitlines()
    assert row == "| adam | 2 | 55.00 ± 7.07 | 65.00 ± 7.07 | 2.0 |"


def test_results_are_collected_by_optimizer_and_seed(sweep, tmp_path):
    for name, accuracy in (("adam_srt-seed0", 0.1), ("adam-seed1", 0.3), ("adam-seed0", 0.2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "all_results.json").write_text(json.dumps(result(accuracy)))
    gathered = {name: [run["eval_accuracy"] for run in runs] for name, runs in sweep.gather(tmp_path).items()}
    assert gathered == {"adam": [0.2, 0.3], "adam_srt": [0.1]}


def test_runs_with_held_out_images_are_compared(sweep, runs, quick, tmp_path):
    """The history has the accuracy on held-out images, the result that on the evaluation split."""
    words = ["--validation_fraction", "0.2", "--max_train_samples", "200", "--per_device_train_batch_size", "80"]
    sweep.main([*quick, *words, "--optimizers", "adam", "--output_dir", str(tmp_path)])
    assert (tmp_path / "sweep.png").is_file()
