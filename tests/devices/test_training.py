"""Whole training runs on an accelerator: the recipes, and the Trainer."""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from safetensors.torch import load_file
from transformers import TrainingArguments

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "recipes")]

from training_runs import QUICK_RUNS, forget, weights, write_texts  # noqa: E402

from hf_sphere import SphereTrainer, SphereVisionConfig, SphereVisionForImageClassification  # noqa: E402
from hf_sphere.training import TrainingLoop  # noqa: E402

Train = Callable[..., Path]


@pytest.fixture(autouse=True)
def _on_the_device(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Accelerate choose the device, also if it does not know it."""
    monkeypatch.setattr(PartialState, "default_device", property(lambda self: torch.device(device)))
    forget()
    yield
    forget()


@pytest.fixture(params=sorted(QUICK_RUNS))
def train(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Run a recipe; dropout, whose random numbers differ between devices, is as large but the same on each of them."""
    texts = tmp_path / "texts"
    write_texts(texts, train=60, validation=60)
    run = QUICK_RUNS[request.param]
    words = [str(texts) if word == "TEXTS" else word for word in run.argv]

    def call(*more: str, name: str = "run") -> Path:
        forget()
        cache = ["--cache_dir", str(tmp_path / "cache")]
        import_module(run.recipe).main([*words, *cache, "--output_dir", str(tmp_path / name), *more])
        return tmp_path / name

    return call


def check_same(found: Path, expected: Path, tolerance: float = 1e-6) -> None:
    """Compare weights, except the biases of keys, whose gradients are zero but for rounding, which Adam enlarges."""
    pairs = [{k: v for k, v in weights(run).items() if not k.endswith("key.bias")} for run in (found, expected)]
    torch.testing.assert_close(*pairs, rtol=tolerance, atol=tolerance)


def test_a_resumed_run_ends_with_the_model_of_an_uninterrupted_one(train):
    train("--stop_after_steps", "7", name="resumed")
    check_same(train("--resume_from_checkpoint", "latest", name="resumed"), train())


@pytest.mark.parametrize(("without_float64", "tolerance"), [(False, 1e-3), (True, 1e-2)])
def test_a_run_on_the_device_ends_with_the_model_of_the_cpu(train, request, without_float64, tolerance, monkeypatch):
    request.getfixturevalue("narrow" if without_float64 else "pretend")
    on_device = train(name="on_device")
    monkeypatch.setattr(PartialState, "default_device", property(lambda self: torch.device("cpu")))
    check_same(on_device, train(name="on_cpu"), tolerance)


def test_training_steps_do_not_wait_for_the_device(train, no_synchronization, monkeypatch):
    step = TrainingLoop._train_step

    def strict(self: TrainingLoop, *args: Any) -> None:
        with no_synchronization() if self.state.step else nullcontext():  # constants are copied in the first step
            step(self, *args)

    monkeypatch.setattr(TrainingLoop, "_train_step", strict)
    train()


def test_batches_are_copied_to_the_device_without_waiting(train, pretend):
    train()
    waits = [wait.line for wait in pretend.synchronizations() if wait.line.startswith("hf_sphere/data/")]
    assert len(waits) <= 12, waits  # once for each dataset; there are 20 steps


def test_the_trainer_saves_and_resumes_on_the_device(tmp_path, device, monkeypatch):
    chosen = property(lambda self: self._setup_devices and torch.device(device))
    monkeypatch.setattr(TrainingArguments, "device", chosen)
    monkeypatch.setattr(TrainingArguments, "n_gpu", 1)
    images = [{"pixel_values": torch.randn(1, 8, 8), "labels": n % 4} for n in range(24)]
    options = {"image_size": 8, "num_channels": 1, "num_labels": 4, "head": "arcface"}

    def train(**more: object) -> dict[str, torch.Tensor]:
        forget()
        torch.manual_seed(1)
        config = SphereVisionConfig(backbone="linear_embedding", backbone_kwargs={"width": 8}, **options)
        args = TrainingArguments(
            str(tmp_path), num_train_epochs=2, save_steps=3, report_to=[], dataloader_pin_memory=False
        )
        trainer = SphereTrainer(SphereVisionForImageClassification(config), args, train_dataset=images)
        trainer.train(**more)
        assert trainer.model.device.type == device
        return load_file(tmp_path / "checkpoint-6" / "model.safetensors")

    whole = train()
    torch.testing.assert_close(train(resume_from_checkpoint=str(tmp_path / "checkpoint-3")), whole)
