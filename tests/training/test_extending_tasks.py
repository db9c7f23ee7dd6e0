"""A task in a separate module is trained like a built-in one; tests/recipes/test_import.py has one with a name."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_sphere.commands.command_line import train
from hf_sphere.training import find_task, task_names, tasks

TOY = '''
"""Even or odd."""

from dataclasses import replace

from hf_sphere.training.tasks import classification


def prepare(run, *arguments):
    """Prepare a classification that also measures the fraction of images predicted to be even."""
    prepared = classification.prepare(run, *arguments)

    def measure(output, batch):
        even = (output.logits.argmax(-1) % 2 == 0).double().mean()
        return prepared.measure(output, batch) | {"even_fraction": even}

    return replace(prepared, measure=measure)


TASK = replace(classification.TASK, prepare=prepare, headline=("accuracy", "even_fraction"))
'''


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Path:
    """Add a folder with the module of a new task; the built-in tasks remain available."""
    (tmp_path / "toy_parity.py").write_text(TOY)
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    yield tmp_path
    sys.modules.pop("hf_sphere.training.tasks.toy_parity", None)
    importlib.invalidate_caches()


def test_task_in_one_file_is_found_by_name(toy):
    assert "toy_parity" in task_names()
    assert find_task("toy_parity").headline == ("accuracy", "even_fraction")


def test_task_in_one_file_is_trained_evaluated_and_described(toy, monkeypatch, root):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    argv = ["--backbone", "linear_embedding", "--backbone_kwargs", "{width: 8}", "--max_train_samples", "100"]
    argv += ["--num_train_epochs", "1", "--disable_tqdm", "--cache_dir", str(toy / "cache")]
    train("toy_parity", [*argv, "--output_dir", str(toy / "run")], script=str(root / "recipes" / "toy.py"))
    results = json.loads((toy / "run" / "all_results.json").read_text())
    assert 0 <= results["eval_even_fraction"] <= 1
    reported = ModelCard.load(toy / "run" / "README.md").data.eval_results
    assert {result.metric_type for result in reported} == {"accuracy", "even_fraction"}


def test_the_name_of_a_built_in_task_is_taken():
    with pytest.raises(ValueError, match=r"the task 'few_shot': hf_sphere\.training\.tasks.few_shot has this name"):
        replace(find_task("classification"), name="few-shot", prepare=test_the_name_of_a_built_in_task_is_taken)
