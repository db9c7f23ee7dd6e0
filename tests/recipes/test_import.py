"""Parts of the user's own, from a module that `--import` names: the modules and commands of docs/extending.md."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import code_blocks
import pytest
from case_selection import each
from fresh_python import run_fresh

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.commands import export, extract, predict
from hf_sphere.commands.train import main as train
from hf_sphere.nn import HEADS
from hf_sphere.utils.arguments import import_modules

BLOCKS = code_blocks.read_page(code_blocks.ROOT / "docs" / "extending.md")[1]
MODULES = {found[1]: b.code for b in BLOCKS if b.language == "python" and (found := re.match(r"# (\w+\.py)\n", b.code))}
LINES = "\n".join(block.code.replace("\\\n", " ") for block in BLOCKS if block.language == "bash").splitlines()
COMMANDS = [shlex.split(line)[1:] for line in LINES]


def run(folder: Path, *words: str, launcher: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess:
    """Run the command like its console script, which does not have the current folder on `sys.path`."""
    start = launcher or (sys.executable, "-P", "-c", "from hf_sphere.commands.main import main; main()")
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", **environment}
    return run_fresh([*start, *words], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the modules of the page and the outputs of its commands."""
    folder = tmp_path_factory.mktemp("own")
    for name, code in MODULES.items():
        (folder / name).write_text(code)
    for words in COMMANDS:
        ended = run(folder, *words)
        assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty current folder; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    with mock.patch.dict(sys.modules), mock.patch.dict(HEADS):
        yield tmp_path


@pytest.fixture
def model(folder) -> Path:
    return folder / "outputs" / "own-head"


def test_heads_optimizers_tasks_and_placement_methods_are_used_by_name(model, folder):
    assert [words[words.index("--import") + 1] for words in COMMANDS] == ["my_head", "my_head", "my_task", "my_method"]
    settings = json.loads((model / "run.json").read_text())
    assert (settings["head"], settings["optim"]) == ("scaled_cosine", "sphere_sgd")
    results = [json.loads((folder / "outputs" / name / "all_results.json").read_text()) for name in OUTPUTS]
    assert results[0]["eval_accuracy"] > 0.8
    assert "eval_even_fraction" in results[1]
    assert "draw" in results[2]["method"]


OUTPUTS = ("own-head", "parity", "prototypes/5-3")


def test_a_saved_model_and_its_card_name_the_module_of_its_head_and_one_of_the_library_none(model):
    assert json.loads((model / "config.json").read_text())["requires_import"] == ["my_head"]
    assert "requires_import" not in SphereVisionConfig(head="vmf").to_dict()
    blocks = code_blocks.read_page(model / "README.md")[1]
    assert {b.code.splitlines()[0] for b in blocks if b.language == "python"} == {"import my_head"}
    assert "--import=my_head" in (model / "README.md").read_text()


NAMES_BOTH_WAYS = r"head 'scaled_cosine'.*import \['my_head'\], or pass --import my_head"


def test_the_error_in_python_names_the_module_after_whose_import_the_model_is_loaded(model, folder, here, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ValueError, match=NAMES_BOTH_WAYS):
        SphereVisionForImageClassification.from_pretrained(model)
    assert "my_head" not in sys.modules
    importlib.import_module("my_head")
    assert type(SphereVisionForImageClassification.from_pretrained(model).head).__name__ == "ScaledCosineHead"


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (export, ["--output", "onnx"]),
        (extract, ["--dataset_name", "digits", "--output_dir", "embeddings"]),
        (predict, ["--images", "digits", "--output", "predictions.csv"]),
    ],
    ids=["export", "extract", "predict"],
)
def test_the_error_of_a_command_names_the_module(job, words, model, here):
    with pytest.raises(ValueError, match=NAMES_BOTH_WAYS):
        job.main(["--model_name_or_path", str(model), *words])


def test_a_run_resumes_with_the_modules(folder):
    words = ["3" if word == "2" else word for word in COMMANDS[0]]
    resumed = run(folder, *words, "--resume_from_checkpoint", "latest")
    assert "epoch 3/3" in resumed.stdout, resumed.stderr
    assert "epoch 2/3" not in resumed.stdout


@pytest.mark.slow
def test_several_processes_are_started_as_a_module_and_each_imports_the_modules(folder):
    options = "-P -m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1"
    words = ["-m", "hf_sphere.commands.train", *COMMANDS[0][1:-1], "outputs/two", "--max_train_samples", "200"]
    given = {"HF_SPHERE_IMPORT": "my_head", "PYTHONPATH": str(code_blocks.ROOT)}
    ended = run(folder, *words, launcher=(sys.executable, *options.split()), **given)
    assert (folder / "outputs" / "two" / "model.safetensors").exists(), ended.stderr
    card = (folder / "outputs" / "two" / "README.md").read_text()
    assert "| num_processes | 2 |" in card
    assert "accelerate launch -m hf_sphere.commands.train classification" in card


# The option


@pytest.mark.parametrize(
    ("words", "names", "returned"),
    [
        (["--import", "empty_1", "--dim", "3"], "", ["--dim", "3", "--import=empty_1"]),
        (["--dim", "3", "--import=empty_1"], "", ["--dim", "3", "--import=empty_1"]),
        (["--import", "empty_1", "--dim", "3", "--import", "empty_1"], "", ["--dim", "3", "--import=empty_1"]),
        (["--dim", "3"], "", ["--dim", "3"]),
        ([], "empty_1, empty_2", ["--import=empty_1", "--import=empty_2"]),
    ],
)
@each("words")
def test_the_option_can_stand_anywhere_and_the_environment_names_several(words, names, returned, here, monkeypatch):
    for name in ("empty_1", "empty_2"):
        (here / f"{name}.py").touch()
    monkeypatch.setenv("HF_SPHERE_IMPORT", names)
    assert import_modules(words) == returned
    imported = {word.removeprefix("--import=") for word in returned if word.startswith("--import")}
    assert {"empty_1", "empty_2"} & sys.modules.keys() == imported
    assert (str(here) in sys.path) == bool(imported)


def test_a_package_can_have_relative_imports(here):
    (here / "own").mkdir()
    for name, code in {"__init__": "", "base": "x = 1", "parts": "from .base import x"}.items():
        (here / "own" / f"{name}.py").write_text(code)
    import_modules(["--import", "own.parts"])
    assert sys.modules["own.parts"].x == 1


def test_a_module_that_fails_raises_its_own_error(here):
    (here / "parts.py").write_text("from hf_sphere.nn import Head\n\nclass Mine(Head):\n    name = 'vmf'\n")
    with pytest.raises(ValueError, match=r"parts cannot define the head 'vmf': hf_sphere\.nn\.heads\.vmf"):
        import_modules(["--import", "parts"])


# Configurations, and saved models of others


def test_a_configuration_imports_nothing_by_itself_but_names_the_option(here, capsys):
    (here / "parts.py").touch()
    (here / "run.yaml").write_text("import: [parts, other]\n")
    with pytest.raises(SystemExit):
        train(["classification", "--config", "run.yaml", "--print_config"])
    message = "run.yaml does not import its modules by itself; pass --import parts --import other."
    assert message in capsys.readouterr().err
    assert "parts" not in sys.modules
    (here / "run.yaml").write_text("import: parts\n")
    with pytest.raises(SystemExit):
        train(["classification", "--import", "parts", "--config", "run.yaml", "--output_dir", "x", "--print_config"])
    assert 'import: ["parts"]' in capsys.readouterr().out


def test_the_module_of_a_backbone_is_named_and_not_saved_again():
    with pytest.raises(ValueError, match=r"backbone 'theirs'.*import \['their_module'\]"):
        SphereVisionConfig.from_dict({"backbone": "theirs", "requires_import": ["their_module"]})
    config = SphereVisionConfig.from_dict({"head": "vmf", "requires_import": ["their_module"]})
    assert "requires_import" not in config.to_dict()
