"""Help and errors of the command `hf-sphere`, before anything is loaded."""

import importlib
import re
import subprocess
import sys

import pytest

from hf_sphere.commands import JOBS
from hf_sphere.commands.main import main
from hf_sphere.training.tasks import TASKS, find_task
from hf_sphere.utils import progress
from hf_sphere.utils.commands import running


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit):
        main(words)
    return capsys.readouterr().err


@pytest.mark.parametrize("task", TASKS)
def test_help_of_a_task_shows_about_twenty_options_and_by_all_each_of_them(capsys, task):
    shown = []
    for last in ([], ["all"]):
        with pytest.raises(SystemExit):
            main(["train", task, "--help", *last])
        shown.append(capsys.readouterr().out)
    short, long = (re.findall(r"^  --(\w+)", text, re.MULTILINE) for text in shown)
    assert 15 <= len(short) <= 30
    assert {*short} < {*long}
    assert f"--help all shows the other {len({*long} - {*short})} options, too." in shown[0]


def test_each_job_and_task_has_an_example_whose_arguments_are_valid(load_file):
    blocks = load_file("docs/_tools/code_blocks.py")
    texts = {job: importlib.import_module(f"hf_sphere.commands.{job}").__doc__ for job in JOBS}
    texts |= {task: find_task(task).example for task in TASKS}
    for name, text in texts.items():
        examples = re.findall(r"^hf-sphere .*(?:(?<=\\)\n.*)*$", text, re.MULTILINE)
        assert examples, name
        blocks.check_commands("\n".join(examples).replace("<", "").replace(">", ""))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "classification", "--stop_after", "5"], "Did you mean stop_after_steps?"),
        (["train", "classification", "--head", "arcfase"], "argument --head: invalid choice: 'arcfase'"),
        (["compare", "digits", "--heads", "softmax", "cosina"], "argument --heads: invalid choice: 'cosina'"),
        (["search", "--index", "index", "--query", "bird.jpg", "--k", "5"], "unknown argument '--k'. Did you mean"),
        (["search", "--index", "index", "--query", "brd.jpg"], "--query brd.jpg: there is no such file or folder. Did"),
        (["duplicates", "a folder"], "--source a folder: there is no such file or folder.\n"),
        (["duplicates", "fotos"], "it is not in the cache of the Hub either, and downloads are off (HF_HUB_OFFLINE)."),
        (["index", "x", "--model_name_or_path", "digits", "--output_dir", "o"], "--images x: there is no such file"),
        (["predict", "--images", "digits", "--model_name_or_path", "no/model", "--output", "o.csv"], "no/model: there"),
        (["compare", "digits", "--settings", "no.yaml"], "--settings no.yaml: there is no such file or folder."),
    ],
)
def test_a_mistake_is_named_before_anything_is_loaded(capsys, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bird.jpg").touch()
    assert message in refused(capsys, *words)


def test_a_missing_folder_is_found_without_torch_and_a_start_is_announced(tmp_path):
    code = """
import sys
from hf_sphere.commands.main import main
from hf_sphere.utils.arguments import command_arguments
from hf_sphere.commands.search import SearchArguments
from hf_sphere.utils.commands import running
try:
    main(["duplicates", "photos that are missing"])
except SystemExit:
    running.set("hf-sphere duplicates")
    command_arguments((SearchArguments,), ["--index", ".", "--query", "."])
    assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert "photos that are missing: there is no such file" in ended.stderr
    assert "hf-sphere duplicates: loading libraries ..." in ended.stderr


def test_check_prints_versions_extras_device_and_weights(capsys, monkeypatch):
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ['no_such_package>1 ; extra == "plots"'])
    main(["check"])
    printed = capsys.readouterr().out
    assert [*dict.fromkeys(re.findall(r"^\w+", printed, re.MULTILINE))] == [
        *("python", "versions", "extra", "device", "weights", "hub")
    ]
    assert "plots                  missing no_such_package: pip install 'hf_sphere[plots]'" in printed


def test_a_command_without_a_terminal_prints_lines_without_control_characters(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert [*progress.progress_bar(range(3), disable=True)] == [0, 1, 2]
    assert capsys.readouterr().err == ""
    token = running.set("hf-sphere train")
    for _ in (bar := progress.progress_bar(range(3), desc="Epoch 1", unit="step", mininterval=0)):
        bar.set_postfix(loss=1)
    running.reset(token)
    printed = capsys.readouterr().err
    assert re.search(r"^Epoch 1: 2 of 3 steps, about \S+ left, loss=1$", printed, re.MULTILINE)
    assert not {*printed} & {"\r", "\x1b"}
