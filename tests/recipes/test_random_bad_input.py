"""A small part of tests/recipes/bad_input.py, and bad input that once had a traceback or was accepted."""

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import bad_input
import pytest
import torch
from bad_calls import RECIPES, Call, declared_arguments, valid
from bad_input import attack, run
from case_selection import each
from safetensors.torch import save_file

UNBOUNDED = {"image_mean", "value_range", "spherized_layers"}
"""Numeric arguments that may have any finite value."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """The inputs of the recipes; read only."""
    folder = tmp_path_factory.mktemp("bad") / "inputs"
    level = logging.getLogger("hf_sphere").level
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        bad_input.prepare(folder)
    yield folder
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
    shutil.rmtree(folder / "damaged", ignore_errors=True)
    return Path(shutil.copytree(folder / "model", folder / "damaged", ignore=lambda *_: ["checkpoint-3", "best"]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_command_line_that_is_made_worse_works(folder, recipe):
    assert run(Call(recipe, valid(recipe)))[0] == 0


@pytest.mark.parametrize(("kind", "seed"), [("line", seed) for seed in range(14)] + [("config", n) for n in range(8)])
@each("kind")
def test_random_call_works_or_is_refused_on_one_line(folder, kind, seed):
    assert attack(kind, seed, folder)[1] is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_number_of_a_recipe_has_bounds(recipe):
    unchecked = []
    for _, field, hint in declared_arguments(recipe):
        numeric = hint in (int, float) or str(hint) in ("list[int]", "list[float]")
        if numeric and not field.metadata["help"].bounds and field.name not in UNBOUNDED:
            unchecked.append(field.name)
    assert unchecked == []


# Saved models


@pytest.mark.parametrize("recipe", ["extract", "reinitialize"])
def test_missing_and_damaged_weights_are_refused(refusal, damaged, recipe):
    file = damaged / "model.safetensors"
    for change, message in (
        (lambda: os.truncate(file, file.stat().st_size - 10), "damaged cannot be loaded as "),
        (lambda: save_file({"other": torch.ones(2)}, file), "damaged has no weights of a"),
        (file.unlink, "damaged has no weights of a|no file named model.safetensors"),
    ):
        change()
        assert re.search(message, refusal(recipe, "--model_name_or_path", "damaged"))


def test_model_to_evaluate_needs_all_its_weights(refusal, damaged):
    save_file({"head.linear.bias": torch.zeros(10)}, damaged / "model.safetensors")
    assert "damaged has no sphere_vision.backbone" in refusal("extract", "--model_name_or_path", "damaged")


# Options


def test_a_number_that_is_none_is_refused(refusal):
    assert "drop must be at least 0 and at most 1 and finite; got nan" in refusal("reinitialize", "--drop=nan")


@pytest.mark.parametrize("recipe", ["reinitialize", "train_image_classification"])
def test_size_that_a_saved_model_does_not_support_is_refused(refusal, recipe):
    words = ["--image_size", "2", "--model_name_or_path", "model"]
    if recipe == "train_image_classification":  # as in the saved model
        words += ["--crop_padding", "0", "--head_kwargs", "{}"]
    assert "the model does not support images of 1 x 2 x 2: " in refusal(recipe, *words)


# Configurations


def test_configuration_that_is_not_utf8_is_named(refusal, folder):
    (folder / "bad.yaml").write_bytes(b"learning_rate: 0.1 # \xff")
    assert "cannot read the configuration bad.yaml" in refusal("train_image_classification", "--config", "bad.yaml")
