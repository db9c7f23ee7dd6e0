"""A task of a script is trained like a built-in one; tests/recipes/test_import.py has one of an imported module."""

import json
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from hf_sphere.commands.command_line import train
from hf_sphere.training import find_task, task_names, tasks


def prepare(run, *arguments):
    """Prepare a classification that also measures the fraction of images predicted to be even."""
    prepared = find_task("classification").prepare(run, *arguments)

    def measure(output, batch):
        even = (output.logits.argmax(-1) % 2 == 0).double().mean()
        return prepared.measure(output, batch) | {"even_fraction": even}

    return replace(prepared, measure=measure)


def test_a_task_of_a_script_is_trained_evaluated_and_described(tmp_path, monkeypatch, root):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(tasks, "OWN_TASKS", {})
    replace(find_task("classification"), name="toy-parity", prepare=prepare, headline=("accuracy", "even_fraction"))
    assert "toy_parity" in task_names()
    argv = ["--backbone", "linear_embedding", "--backbone_kwargs", "{width: 8}", "--max_train_samples", "100"]
    argv += ["--num_train_epochs", "1", "--disable_tqdm", "--cache_dir", str(tmp_path / "cache")]
    train("toy_parity", [*argv, "--output_dir", str(tmp_path / "run")], script=str(root / "recipes" / "toy.py"))
    results, settings = (json.loads((tmp_path / "run" / f"{n}.json").read_text()) for n in ("all_results", "run"))
    assert 0 <= results["eval_even_fraction"] <= 1
    assert settings["recipe"] == "toy"
    card = ModelCard.load(tmp_path / "run" / "README.md")
    assert {result.metric_type for result in card.data.eval_results} == {"accuracy", "even_fraction"}
    assert "accelerate launch recipes/toy.py" in card.text


def test_the_name_of_a_built_in_task_is_taken():
    with pytest.raises(ValueError, match=r"the task 'few_shot': hf_sphere\.training\.tasks.few_shot has this name"):
        replace(find_task("classification"), name="few-shot", prepare=prepare)
