"""The command `hf-sphere` as a user meets it."""

import importlib
import io
import os
import pty
import re
import subprocess
import sys
import termios
import threading
from contextlib import suppress

import pytest

from hf_sphere.commands import JOBS
from hf_sphere.commands.command_line import run_main
from hf_sphere.commands.main import main
from hf_sphere.commands.predict import PredictionArguments
from hf_sphere.commands.train import TASKS
from hf_sphere.training.tasks import find_task
from hf_sphere.utils.arguments import parse_arguments
from hf_sphere.utils.texts import PrintableStream

DIGITS = ["--dataset_name", "digits", "--max_train_samples", "60", "--backbone", "linear_embedding"]
DIGITS += ["--backbone_kwargs", "{width: 8}", "--num_train_epochs", "2", "--cache_dir", "cache", "--output_dir", "out"]
BARS = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")


@pytest.fixture
def run(root, tmp_path):
    """Run `python -m` with a module of the commands outside of the repository; return status, stdout and stderr."""
    own = {"PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}

    def start(*words: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess:
        command, options = [sys.executable, "-m", *words], {"stderr": subprocess.PIPE, "stdout": stdout}
        return subprocess.run(command, cwd=tmp_path, env=os.environ | own, text=True, timeout=60, **options)

    return start


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(words)
    return f"{stop.value.code}\n{capsys.readouterr().err}"


def test_without_arguments_one_screen_lists_the_jobs(capsys):
    main([])
    printed = capsys.readouterr().out
    assert all(f"\n  {job} " in printed for job in JOBS)
    assert len(printed.splitlines()) <= 24
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serch"], "there is no job 'serch'; did you mean 'search'?"),
        (["retreival"], "did you mean 'train retrieval'?"),
        (["zzz"], "there is no job 'zzz'; run hf-sphere to see the jobs."),
        (["train", "zzz"], "there is no task 'zzz'; the tasks are classification, "),
        (["train", "--seed", "1"], "name the task first; the tasks are classification, "),
        (["train", "retrieval", "--config", "mnist-vmf"], "is for hf-sphere train classification."),
        (["index", "--config", "mnist-vmf"], "of hf_sphere/configs/vmf.yaml, which is for hf-sphere train "),
        (["train", "retrieval", "--config"], "hf-sphere train retrieval: error: argument --config: expected one"),
        (["train", "classification", "--max_steps", "5"], "Did you mean stop_after_steps?"),
        (["train", "classification", "--lr", "1"], "Did you mean learning_rate?"),
        (["train", "classification", "--head", "arcfase"], "argument --head: invalid choice: 'arcfase'"),
        (["compare", "digits", "--heads", "softmax", "cosina"], "argument --heads: invalid choice: 'cosina'"),
        (["search", "--index", "index", "--query", "bird.jpg", "--k", "5"], "unknown argument '--k'. Did you mean"),
        (["search", "--index", "index", "--query", "bird.jpg"], "--index index: there is no such file or folder.\n"),
        (
            ["search", "--index", ".", "--query", "brd.jpg"],
            "--query brd.jpg: there is no such file or folder. Did you m",
        ),
        (["duplicates", "a folder"], "--source a folder: there is no such file or folder.\n"),
        (["duplicates", "fotos"], "no dataset of this name in the cache of the Hub, and downloads are off (HF_HUB_OFF"),
        (["index", "x", "--model_name_or_path", "digits", "--output_dir", "o"], "--images x: there is no such file"),
        (["predict", "--images", "digits", "--model_name_or_path", "no/model", "--output", "o.csv"], "no/model: there"),
        (["compare", "digits", "--settings", "no.yaml"], "--settings no.yaml: there is no such file or folder."),
    ],
)
def test_a_wrong_word_is_refused_with_a_hint(capsys, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bird.jpg").touch()
    assert message in refused(capsys, *words)


def test_a_missing_folder_is_found_without_torch_and_a_start_is_announced(tmp_path):
    code = """
import sys
from hf_sphere.commands.main import main
from hf_sphere.commands.search import SearchArguments
from hf_sphere.utils.arguments import parse_arguments
from hf_sphere.utils.commands import running
try:
    main(["duplicates", "photos that are missing"])
except SystemExit:
    running.set("hf-sphere search")
    parse_arguments((SearchArguments,), ["--index", ".", "--query", "."])
    assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert "photos that are missing: there is no such file" in ended.stderr
    assert "hf-sphere search: loading libraries ..." in ended.stderr


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
    texts |= {task: find_task(task.replace("-", "_")).example for task in TASKS}
    for name, text in texts.items():
        examples = re.findall(r"^hf-sphere .*(?:(?<=\\)\n.*)*$", text, re.MULTILINE)
        assert examples, name
        blocks.check_commands("\n".join(examples).replace("<", "").replace(">", ""))


def test_check_prints_versions_extras_device_and_weights(capsys, monkeypatch):
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ['no_such_package>1 ; extra == "plots"'])
    main(["check"])
    printed = capsys.readouterr().out
    assert [*dict.fromkeys(re.findall(r"^\w+", printed, re.MULTILINE))] == [
        *("python", "versions", "extra", "device", "weights", "hub")
    ]
    assert "plots                  missing no_such_package: pip install 'hf_sphere[plots]'" in printed


def test_a_configuration_states_the_task_that_is_left_out_also_printed_in_a_file(capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--config", "vmf/mnist-vmf", "--print_config"])
    assert (stop.value.code, 'head: "vmf"' in capsys.readouterr().out) == (0, True)
    main(["configs", "digits-vmf"])
    (tmp_path / "copy.yaml").write_text(capsys.readouterr().out)
    assert "copy.yaml is for hf-sphere train classification." in refused(
        capsys, "train", "few-shot", "--config", str(tmp_path / "copy.yaml")
    )
    (tmp_path / "own file.yaml").write_text("seed: 1")
    main(["configs", str(tmp_path / "own file.yaml")])
    assert capsys.readouterr().out == f"# hf-sphere JOB --config '{tmp_path}/own file.yaml'\nseed: 1\n"


def test_a_module_of_a_job_that_is_started_names_the_command(run):
    ended = run("hf_sphere.commands.search", "--help")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "use hf-sphere search, or python -m hf_sphere.commands.main search." in ended.stderr


@pytest.mark.parametrize(("word", "status"), [("--help", 0), ("--unknown", 2)])
def test_the_help_has_the_command_and_arguments_are_parsed_without_torch(word, status):
    code = f"""
import io, sys
from contextlib import redirect_stdout
from hf_sphere.commands import JOBS
from hf_sphere.commands.main import main
from hf_sphere.commands.train import TASKS
for words in [*([job] for job in JOBS if job != "train"), *(["train", task] for task in TASKS)]:
    try:
        with redirect_stdout(io.StringIO()) as printed:
            main([*words, "{word}"])
    except SystemExit as end:
        assert end.code == {status}, words
    assert {status} or printed.getvalue().startswith(f"usage: hf-sphere {{' '.join(words)}} ["), words
    assert not {{"torch", "transformers"}} & sys.modules.keys(), words
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert not ended.returncode, ended.stderr


@pytest.mark.parametrize("words", [[], ["configs"], ["train"], ["train", "classification", "--help"]])
def test_a_closed_pipe_leaves_no_traceback(run, words):
    reader, writer = os.pipe()
    os.close(reader)
    ended = run("hf_sphere.commands.main", *words, stdout=writer)
    os.close(writer)
    assert ended.stderr == ""


@pytest.mark.parametrize("module", ["huggingface_hub.errors", "hf_sphere.commands.place", "torch"])
def test_ctrl_c_during_imports_leaves_no_traceback(root, module):
    code = f"""
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from hf_sphere.commands.main import main
main(["place", "--num_classes", "3", "--dim", "2", "--output_dir", "none/a"])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, "Traceback" in ended.stderr) == (130, False)


def test_a_terminal_has_bars_and_a_log_has_one_line_per_epoch_without_them(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    (parent, child), printed = pty.openpty(), []
    termios.tcsetwinsize(child, (24, 100))

    def read() -> None:
        with suppress(OSError):  # at its end
            while part := os.read(parent, 4096):
                printed.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with open(child, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        main(["train", "classification", *DIGITS])
    reader.join()
    os.close(parent)
    assert b"step/s" in b"".join(printed)
    log = capsys.readouterr().out
    assert "\r" not in log
    assert re.findall(r"^epoch (\d)/2 ", log, re.M) == ["1", "2"]
    for is_terminal in (True, False):
        monkeypatch.setattr(os, "environ", {})
        monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
        monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal)
        run_main(lambda _: None)
        assert [name in os.environ for name in BARS] == [not is_terminal] * 3  # tqdm draws no bars with these


def test_characters_that_an_output_lacks_are_escaped():
    output = io.BytesIO()
    stream = PrintableStream(io.TextIOWrapper(output, encoding="latin-1", write_through=True), False)
    stream.write("caf\u00e9, \U0001f436")
    assert output.getvalue().decode("latin-1") == "caf\u00e9, \\U0001f436"


def test_the_home_folder_is_that_of_the_user_where_no_shell_has_expanded_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["--model_name_or_path=~/model", "--images", "a~/b", "--output=~/x.csv"]
    (args,) = parse_arguments((PredictionArguments,), words)
    assert (args.model_name_or_path, args.images) == (f"{tmp_path}/model", "a~/b")
    assert args.output == f"{tmp_path}/x.csv"
