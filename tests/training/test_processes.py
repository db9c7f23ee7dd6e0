from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from small_runs import random_images, run_loop, small_model
from torch import Tensor, nn
from two_processes import run_two, sharding_accelerator

from hf_sphere.data import Episodes
from hf_sphere.nn import HEADS, HeadOutput
from hf_sphere.training import RecipeArguments, TrainingLoop


class NormalizedClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(36)
        self.dropout = nn.Dropout(0.5)
        self.out = nn.Linear(36, 3)
        self.dropped = torch.empty(0)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> HeadOutput:
        hidden = self.dropout(self.norm(pixel_values.flatten(1)))
        self.dropped = hidden.detach() == 0
        logits = self.out(hidden)
        return HeadOutput(logits=logits, loss=nn.functional.cross_entropy(logits, labels))


def _train_normalized(rank: int, folder: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    batches = random_images(24, batch_size=4, shuffle=True, process_index=rank, num_processes=2)
    seen = {}

    def evaluate(model: NormalizedClassifier) -> dict[str, float]:
        seen.update(statistics=model.norm.running_mean.clone(), dropped=model.dropped)
        return {"accuracy": 0.0}

    args = RecipeArguments(output_dir=folder, num_train_epochs=1, disable_tqdm=True)
    TrainingLoop(NormalizedClassifier(), batches, args, accelerator, evaluate=evaluate).run()
    return seen


def test_processes_share_batch_norm_statistics_but_not_dropout_masks(of_two_processes):
    first, second = (results["batch norm"] for results in of_two_processes)
    assert torch.equal(first["statistics"], second["statistics"])
    assert not torch.equal(first["dropped"], second["dropped"])


# Training does not depend on how the examples of a step are divided among processes and batches

OPTIONS: dict[str, dict[str, Any]] = {"prototype summed": {"reduction": "sum"}}
BY_BATCH = ["proxy_anchor"]  # its loss is no mean over examples, so it depends on how batches are divided
RUNS = [*(name for name in HEADS if name not in BY_BATCH), *OPTIONS, "vmf on episodes"]
"""Heads, each followed by words for its options and data."""

OPTIONS |= {"spherized fixed": {"learn_scaling": False}, "arcface fixed": {"scale": 16.0}}
SHARDED = ["softmax", "prototype", "hyperbolic", "angular", "spherized fixed", "arcface fixed"]
"""Heads without scalar parameters, which FSDP2 does not support."""

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

Trained = tuple[dict[str, Tensor], list[float]]
"""State and losses of a run."""


def _train_head(
    run: str,
    folder: str,
    *,
    batches_per_step: int = 1,
    divisor: int = 1,
    rank: int = 0,
    sharded: bool = False,
    **arguments,
) -> Trained:
    """Return the state and the losses of 8 steps in four epochs, with 12 images per step over all processes."""
    model = small_model(run.split()[0], head_kwargs=OPTIONS.get(run, {}), width=4)
    place: dict[str, Any] = {"process_index": rank, "num_processes": divisor // batches_per_step}
    if "episodes" in run:
        place["episodes"] = Episodes(classes=3, examples=2, count=4, per_batch=2 // divisor)
    else:
        place["batch_size"] = 12 // divisor
    accelerator = sharding_accelerator() if sharded else Accelerator(cpu=True)
    options = {"num_train_epochs": 4, "learning_rate": 0.02, "save_epochs": 4, "save_total_limit": 9} | arguments
    options["gradient_accumulation_steps"] = batches_per_step
    loop = run_loop(model, random_images(24, shuffle=True, **place), folder, accelerator, **options)
    return accelerator.get_state_dict(model), [entry["train_loss"] for entry in loop.state.history]


def _train_all(rank: int, folder: str) -> None:
    trained: dict[str, Any] = {run: _train_head(run, f"{folder}/{run}", divisor=2, rank=rank) for run in RUNS}
    trained["batch norm"] = _train_normalized(rank, f"{folder}/batch_norm")
    for run in SHARDED:  # last, since the state of Accelerate changes
        options: dict[str, Any] = {"divisor": 2, "rank": rank, "sharded": True, "save_steps": 5}
        trained[f"{run} sharded"] = _train_head(run, f"{folder}/{run}-sharded", **options)
    checkpoint = f"{folder}/{run}-sharded/checkpoint-5"
    resumed = _train_head(run, f"{folder}/{run}-sharded", resume_from_checkpoint=checkpoint, **options)
    trained["resumed"] = {run: resumed}
    torch.save(trained, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory) -> list[dict[str, Any]]:
    """Results of all runs, by process."""
    folder: Path = tmp_path_factory.mktemp("two_processes")
    run_two(_train_all, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.settings(run=lambda run: {"run": run})
def test_training_does_not_depend_on_processes_accumulation_and_interruptions(run, of_two_processes, tmp_path):
    one = _train_head(run, str(tmp_path / "one"), save_steps=5)
    first, second = (trained[run] for trained in of_two_processes)
    torch.testing.assert_close(first[0], second[0], rtol=0, atol=0)
    torch.testing.assert_close(first, one, **TOLERANCE)
    halves = _train_head(run, str(tmp_path / "halves"), batches_per_step=2, divisor=2)
    torch.testing.assert_close(halves, one, **TOLERANCE)
    checkpoint = str(tmp_path / "one" / "checkpoint-5")
    resumed = _train_head(run, str(tmp_path / "one"), resume_from_checkpoint=checkpoint)
    torch.testing.assert_close(resumed, one, rtol=0, atol=0)
    if run == "vmf":  # its samples depend on the seed
        other, _ = _train_head(run, str(tmp_path / "other"), seed=1)
        assert not torch.equal(other["head.weight"], one[0]["head.weight"])


@pytest.mark.parametrize(
    ("head", "parts", "expected"), [("proxy_anchor", 2, 1), ("proxy_anchor", 1, 0), ("adaface", 2, 0)]
)
def test_accumulation_of_a_loss_of_a_whole_batch_is_reported_once(head, parts, expected, tmp_path, caplog):
    _train_head(head, str(tmp_path), batches_per_step=parts, divisor=parts)
    assert sum("where it is divided" in message for message in caplog.messages) == expected


@pytest.mark.parametrize("run", SHARDED)
def test_two_processes_with_a_sharded_model_match_one(run, of_two_processes, tmp_path):
    one = _train_head(run, str(tmp_path))
    torch.testing.assert_close(of_two_processes[0][f"{run} sharded"], one, **TOLERANCE)


def test_a_resumed_run_with_a_sharded_model_matches_an_uninterrupted_one(of_two_processes):
    ((run, resumed),) = of_two_processes[0]["resumed"].items()
    torch.testing.assert_close(resumed, of_two_processes[0][f"{run} sharded"], rtol=0, atol=0)
