"""Help and errors of the command `hf-sphere`, before anything is loaded."""

import importlib
import re

import pytest

from hf_sphere.commands import JOBS
from hf_sphere.commands.main import main
from hf_sphere.training.tasks import TASKS, find_task


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
    ],
)
def test_a_mistake_is_named_before_anything_is_loaded(capsys, words, message):
    assert message in refused(capsys, *words)


def test_check_prints_versions_extras_device_and_weights(capsys, monkeypatch):
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ['no_such_package>1 ; extra == "plots"'])
    main(["check"])
    printed = capsys.readouterr().out
    assert [*dict.fromkeys(re.findall(r"^\w+", printed, re.MULTILINE))] == [
        *("python", "versions", "extra", "device", "weights", "hub")
    ]
    assert "plots                  missing no_such_package: pip install 'hf_sphere[plots]'" in printed
