"""Quick command lines for every training recipe, and comparison of saved models."""

import json
import random
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_sphere.data.sources import load_splits
from hf_sphere.utils.commands import COMMANDS

ROOT = Path(__file__).parents[2]
TINY_BERT = ROOT / "tests" / "golden" / "analogy" / "tiny-bert"

DIGITS = ["--dataset_name", "digits", "--max_train_samples", "200", "--per_device_train_batch_size", "20"]
DIGITS += ["--backbone", "linear_embedding", "--backbone_kwargs", "{width: 32}", "--learning_rate", "0.01"]
DIGITS += ["--num_train_epochs", "2", "--disable_tqdm"]
"""A linear map to 32 units on the bundled digits: 200 images per epoch in 10 steps."""
SLANTS = ["--computed_value", "slant", "--out_of_range", "clip"]
"""Slants of the images, some of which exceed the range of those 200."""

_DIGITS = ["--dataset_name", "digits", "--max_train_samples", "200", "--num_train_epochs", "2", "--disable_tqdm"]
_DIGITS += ["--backbone", "linear_embedding", "--backbone_kwargs", "{width: 32, drop_rate: 0.3}", "--crop_padding", "1"]
_BATCHES = ["--per_device_train_batch_size", "20", "--learning_rate", "0.01"]
_EPISODES = ["--way", "3", "--shot", "2", "--query", "5", "--episodes_per_epoch", "10", "--eval_episodes", "20"]
_TEXT = ["--model_name_or_path", str(TINY_BERT), "--from_scratch", "--spherized", "--dataset_name", "TEXTS"]
_TEXT += ["--max_seq_length", "32", "--max_train_samples", "80", "--max_eval_samples", "40"]


@dataclass(frozen=True)
class QuickRun:
    """A quick run of a recipe: two epochs of ten steps that use all sources of randomness.

    Attributes:
        recipe: Name of the script.
        argv: Command line without folders.
        held_out: Arguments that hold out validation data.
        ruinous_gamma: Factor of the learning rate that ruins the model without making it diverge.
    """

    recipe: str
    argv: list[str]
    held_out: tuple[str, ...] = ("--validation_fraction", "0.4")
    ruinous_gamma: str = "1e4"


QUICK_RUNS = {
    "classification": QuickRun("train_image_classification", [*_DIGITS, *_BATCHES, "--head", "softmax"]),
    "regression": QuickRun("train_image_regression", [*_DIGITS, *_BATCHES, *SLANTS, "--embedding_dim", "2"]),
    "joint": QuickRun(
        "train_joint_prediction", [*_DIGITS, *_BATCHES, *SLANTS, "--embedding_dim", "4", "--head", "softmax"]
    ),
    "retrieval": QuickRun(
        "train_image_retrieval",
        [*_DIGITS, *_BATCHES, "--train_classes", "6", "--embedding_dim", "8", "--head", "vmf"],
        ruinous_gamma="1e6",
    ),
    "few_shot": QuickRun(
        "train_few_shot",
        [*_DIGITS, "--train_classes", "6", "--learning_rate", "0.003", *_EPISODES],
        ("--validation_fraction", "0.5", "--validation_episodes", "10"),
    ),
    # TEXTS stands for a folder of text files, which has a validation split.
    "masked_lm": QuickRun(
        "train_masked_lm",
        [*_TEXT, "--num_train_epochs", "2", "--learning_rate", "0.003", "--disable_tqdm"],
        held_out=(),
        ruinous_gamma="1e3",
    ),
}
"""Quick runs by task name."""


def write_texts(folder: Path, **counts: int) -> None:
    """Write a file of sentences in which words predict each other for each split."""
    folder.mkdir(exist_ok=True)
    facts = {"cat": "milk", "dog": "bones", "bird": "seeds", "cow": "grass"}
    for seed, (split, count) in enumerate(counts.items()):
        animals = random.Random(seed).choices(list(facts), k=count)
        lines = [f"the {animal} is here and the {animal} wants {facts[animal]} ." for animal in animals]
        (folder / f"{split}.txt").write_text("\n".join(lines))


@torch.no_grad()
def output_on_digits(folder: Path, model: Any = None) -> tuple[Any, Tensor]:
    """Return the output of a saved model, or this one, for the test split, and its labels, by public interfaces."""
    test, model = load_splits("digits")["test"], model or AutoModelForImageClassification.from_pretrained(folder)
    inputs = AutoImageProcessor.from_pretrained(folder)(test["image"][:], return_tensors="pt")
    return model.eval()(**inputs), torch.tensor(test["label"][:])


def load_recipe(name: str) -> Any:
    """Import the module of a job, or the script of a training, which is in no package."""
    if name not in COMMANDS:
        return import_module(f"hf_sphere.commands.{name}")
    if str(ROOT / "recipes") not in sys.path:
        sys.path.insert(0, str(ROOT / "recipes"))
    return import_module(name)


def assert_same_run(folder: Path, expected: Path, steps: int) -> None:
    """Assert that two runs of this many steps have the same weights and metrics, but for rounding."""
    torch.testing.assert_close(weights(folder), weights(expected), rtol=1e-5, atol=1e-5)
    found, wanted = (json.loads((run / "all_results.json").read_text()) for run in (folder, expected))
    assert found["steps"] == wanted["steps"] == steps
    by_epoch = {entry["epoch"]: entry for entry in found["history"]}  # an interrupted run has parts of epochs, too
    for of_one in (wanted, *wanted["history"]):
        entry = found if of_one is wanted else by_epoch[of_one["epoch"]]
        metrics = {key: value for key, value in of_one.items() if key.startswith(("train_loss", "eval_"))}
        assert {key: entry[key] for key in metrics} == pytest.approx(metrics, rel=1e-5, abs=1e-5)


def forget() -> None:
    """Reset the process-wide state of accelerate."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a saved model."""
    return load_file(folder / "model.safetensors")


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether tensors are bit-for-bit equal."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
