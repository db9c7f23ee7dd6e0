"""A small part of tests/recipes/bad_input.py, and each bad input that once had a traceback or was accepted."""

import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import bad_input
import pytest
import torch
from bad_calls import RECIPES, Call, copy_of, declared_arguments, reading, valid
from bad_input import attack, run
from case_selection import each
from crafted_folders import INVALID
from safetensors.torch import save_file

from hf_sphere.commands.command_line import run_main

UNBOUNDED = {"image_mean", "value_range", "spherized_layers"}
"""Numeric arguments that may have any finite value."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """The inputs of the recipes; read only."""
    folder = tmp_path_factory.mktemp("bad") / "inputs"
    threads, level = torch.get_num_threads(), logging.getLogger("hf_sphere").level
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        bad_input.prepare(folder)
    yield folder
    torch.set_num_threads(threads)
    logging.getLogger("hf_sphere").setLevel(level)


@pytest.fixture
def folder(prepared, monkeypatch) -> Path:
    """The prepared folder, as working directory."""
    monkeypatch.chdir(prepared)
    return prepared


@pytest.fixture
def refusal(folder) -> Callable[..., str]:
    """Call a recipe with additional arguments, which must be refused on one line, and return what it printed."""

    def refuse(recipe: str, *words: str) -> str:
        code, printed = run(Call(recipe, [*valid(recipe), *words]))
        assert code > 0
        assert bad_input.problem(code, printed) is None
        return printed

    return refuse


@pytest.fixture
def damaged(folder) -> Path:
    """A copy of the model, to damage."""
    return copy_of("model", folder)


@pytest.mark.parametrize("recipe", RECIPES)
def test_command_line_that_is_made_worse_works(folder, recipe):
    assert run(Call(recipe, valid(recipe)))[0] == 0


ATTACKS = {"line": 14, "config": 8, "file": 4, "folder": 16, "input": 8, "output": 14}
"""Number of random calls by kind."""


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind, count in ATTACKS.items() for seed in range(count)])
@each("kind")
def test_random_call_works_or_is_refused_on_one_line(folder, kind, seed):
    assert attack(kind, seed, folder)[1] is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(INVALID))
def test_every_invalid_folder_is_refused_on_one_line(folder, kind):
    accepted, readers_of_weights = [], ("compute_projections", "train_image_classification")
    for number, name in enumerate(sorted(INVALID[kind])):
        INVALID[kind][name](copy_of(kind, folder))
        call = reading(kind, random.Random(number))
        code, printed = run(call)
        if bad_input.problem(code, printed) or (code == 0 and call.recipe not in readers_of_weights):
            accepted.append(f"{name}: {call.recipe} {code} {printed[-200:]}")
    assert accepted == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_number_of_a_recipe_has_bounds(recipe):
    unchecked = []
    for _, field, hint in declared_arguments(recipe):
        numeric = hint in (int, float) or str(hint) in ("list[int]", "list[float]")
        if numeric and not field.metadata["help"].bounds and field.name not in UNBOUNDED:
            unchecked.append(field.name)
    assert unchecked == []


# Saved models


READERS = {
    "extract": ("extract_embeddings", []),
    "train": ("train_image_regression", ["--initial_weights"]),
    "reinitialize": ("reinitialize_layers", []),
}
WEIGHTS = {
    "empty": (lambda file: file.write_bytes(b""), "damaged cannot be loaded as "),
    "truncated": (lambda file: os.truncate(file, file.stat().st_size - 10), "damaged cannot be loaded as "),
    "not safetensors": (lambda file: file.write_bytes(b"weights" * 50), "damaged cannot be loaded as "),
    "no file": (Path.unlink, "damaged has no weights of a|no file named model.safetensors"),
    "no tensor": (lambda file: save_file({}, file), "damaged has no weights of a"),
    "other tensors": (lambda file: save_file({"other": torch.ones(2)}, file), "damaged has no weights of a"),
}
"""Changes of the weights of a model, and messages."""


@each("reader")
@each("weights")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_missing_and_damaged_weights_are_refused(refusal, damaged, reader, weights):
    change, message = WEIGHTS[weights]
    change(damaged / "model.safetensors")
    recipe, words = READERS[reader]
    assert re.search(message, refusal(recipe, *(words or ["--model_name_or_path"]), "damaged"))


def test_model_to_evaluate_needs_all_its_weights(refusal, damaged):
    save_file({"head.linear.bias": torch.zeros(10)}, damaged / "model.safetensors")
    assert "damaged has no sphere_vision.backbone" in refusal("extract_embeddings", "--model_name_or_path", "damaged")


DESCRIPTIONS = ["", "[1]", '{"model": 3}', '{"dataset": "digits"}', '{"distance": null}']
DAMAGED = [
    *[
        (f"{recipe} --model_name_or_path", "model", "run.json", content)
        for recipe in ("reinitialize_layers", "compute_projections")
        for content in ("", "[1]", "{", "null", '"text"')
    ],
    *[("evaluate_embeddings --embeddings", "embeddings", "embeddings.json", content) for content in DESCRIPTIONS],
]


@each("reader")
@each("content")
@pytest.mark.parametrize(("reader", "kind", "file", "content"), DAMAGED)
def test_damaged_settings_and_descriptions_are_refused(refusal, folder, reader, kind, file, content):
    (copy_of(kind, folder) / file).write_text(content)
    assert f"{file} is damaged" in refusal(*reader.split(), "damaged")


def test_damaged_progress_of_a_run_is_refused(refusal, folder):
    shutil.rmtree("again", ignore_errors=True)
    shutil.copytree("model", "again")
    (next(Path("again").glob("checkpoint-*")) / "trainer_state.json").write_text("[]")
    words = ["--output_dir", "again", "--resume_from_checkpoint", "latest"]
    assert "trainer_state.json is damaged" in refusal("train_image_classification", *words)


# Options


REFUSED = {
    "--dataset_name=": "the name of the dataset must not be empty",
    "--head_kwargs={bias: null}": "option bias of head 'softmax' must be of type bool; got None",
    "--head=vmf --head_kwargs={num_samples: null}": "option num_samples of head 'vmf' must be of type int; got None",
    "--label_column_name=image": "class labels are integers or names",
    "--image_size=100000": "image_size must be at least 1 and at most 16384; got 100000",
    "--warmup_epochs=inf": "warmup_epochs must be at least 0 and finite; got inf",
    "--lr_gamma=-1": "lr_gamma must be at least 0",
    "--lr_patience=-3": "lr_patience must be at least 0; got -3",
    "--num_train_epochs=0": "num_train_epochs 0 only evaluates a saved model",
    "--num_train_epochs=-1": "num_train_epochs must be at least 0; got -1",
    "--stop_after_steps=99999999999": "stop_after_steps must be at least 1 and at most 2147483647; got 99999999999",
    "--crop_padding=9": "crop_padding 9 exceeds what images of 8 x 8 pixels allow, 8",
    "--occlusion=9": "occlusion 9 exceeds what images of 8 x 8 pixels allow, 8",
    "--backbone=conv4": "conv4",
    "--hub_model_id=a\nb": "Repo id must",
    "--lr_scheduler_type=multistep --lr_milestones 5 3": "increase; got [5, 3]",
    "reinitialize_layers --drop=nan": "drop must be at least 0 and at most 1; got nan",
    "place_prototypes --device=nothing": "device must be one of torch, such as cpu or cuda:0; got 'nothing'",
}
"""Messages by options of classification, or of the recipe that comes first."""


@each("options")
@pytest.mark.parametrize("options", REFUSED)
def test_wrong_options_are_refused(refusal, options):
    words = re.split(" (?!null)", options)
    recipe = "train_image_classification" if words[0].startswith("--") else words.pop(0)
    assert REFUSED[options] in refusal(recipe, *words)


@pytest.mark.parametrize("recipe", ["reinitialize_layers", "train_image_classification"])
def test_size_that_a_saved_model_does_not_support_is_refused(refusal, recipe):
    words = ["--image_size", "2", "--model_name_or_path", "model"]
    if recipe == "train_image_classification":  # as in the saved model
        words += ["--crop_padding", "0", "--head_kwargs", "{}"]
    assert "the model does not support images of 1 x 2 x 2: " in refusal(recipe, *words)


# Configurations


def test_configuration_that_is_not_utf8_is_named(refusal, folder):
    (folder / "bad.yaml").write_bytes(b"learning_rate: 0.1 # \xff")
    assert "cannot read the configuration bad.yaml" in refusal("train_image_classification", "--config", "bad.yaml")


# The entry point


OUT_OF_MEMORY = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3 bytes")


@pytest.mark.parametrize("error", [ValueError(), OSError(), ValueError(" \n"), MemoryError(), OUT_OF_MEMORY])
def test_error_without_a_text_is_named_and_lack_of_memory_explained(capsys, error):
    with pytest.raises(SystemExit):
        run_main(mock.Mock(side_effect=error))
    is_memory = isinstance(error, (MemoryError, RuntimeError))
    message = "Error: not enough memory: " if is_memory else f"Error: {type(error).__name__}\n"
    assert message in capsys.readouterr().err


def test_defect_of_the_library_has_a_traceback():
    with pytest.raises(RuntimeError, match="a defect"):
        run_main(mock.Mock(side_effect=RuntimeError("a defect")))


def test_settings_are_those_of_the_run(folder):
    assert json.loads(Path("model", "run.json").read_text())["recipe"] == "train_image_classification"
