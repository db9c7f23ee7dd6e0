"""Class weights on two processes: losses, weights, checkpoints and evaluation are those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from small_runs import random_images, run_loop, small_model
from two_processes import run_two

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.nn import HEADS, build_head
from hf_sphere.training import evaluate, gather_classes
from hf_sphere.training.checkpoints import _read_rows
from hf_sphere.utils.checks import keyword_options

OPTIONS: dict[str, dict[str, Any]] = {
    "arcface": {"margin": 0.2, "sample_rate": 0.7},
    "softmax": {"label_smoothing": 0.1},
}
RUNS = [name for name, head in HEADS.items() if "shard_classes" in keyword_options(head)]
CLASSES = 5  # two classes on the first process and three on the second
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def train(head: str, folder: str, processes: int = 1, rank: int = 0, **arguments: Any) -> dict[str, Any]:
    """Train for four steps with 12 images each, over all processes; return states, losses and metrics."""
    accelerator = Accelerator(cpu=True)  # first: it creates the process group
    model = small_model(head, head_kwargs={"shard_classes": True, **OPTIONS.get(head, {})}, width=4, num_labels=CLASSES)
    share = {"process_index": rank, "num_processes": processes, "classes": CLASSES}
    batches = random_images(24, batch_size=12 // processes, shuffle=True, **share)
    options = {"optim": "adam", "learning_rate": 0.02, "max_grad_norm": 0.5, "save_total_limit": 9}
    loop = run_loop(model, batches, folder, accelerator, **options, **arguments)
    # Four batches on the first process and three on the second.
    metrics = evaluate(loop.trained_model, random_images(7, batch_size=1, **share), accelerator)
    return {
        "state": gather_classes(loop.trained_model),
        "losses": [entry["train_loss"] for entry in loop.state.history],
        "metrics": metrics,
        "rows": len(loop.trained_model.get_parameter(f"head.{model.head.class_parameters[0]}")),
    }


def train_all(rank: int, folder: str) -> None:
    results: dict[str, Any] = {head: train(head, f"{folder}/{head}", 2, rank) for head in RUNS}
    try:
        build_head("cosine", 4, 1, shard_classes=True)
    except ValueError as error:
        results["too few"] = str(error)
    model = SphereVisionForImageClassification(
        SphereVisionConfig(num_labels=CLASSES, head="cosine", head_kwargs={"shard_classes": True})
    )
    state = gather_classes(model)
    if rank == 0:
        results["saved"] = state["head.weight"]
        model.save_pretrained(f"{folder}/saved", state_dict=state)
    torch.distributed.barrier()
    loaded = SphereVisionForImageClassification.from_pretrained(f"{folder}/saved", head_kwargs={"shard_classes": True})
    results["loaded"] = loaded.head.weight.detach().clone()
    torch.save(results, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Results of two processes, and their checkpoints."""
    folder: Path = tmp_path_factory.mktemp("class_shards")
    run_two(train_all, str(folder))
    return folder


@pytest.fixture(scope="module")
def results(folder) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_two_processes_match_one_which_resumes_their_checkpoint(results, folder, tmp_path):
    """For all heads in one test, since each worker of xdist would train them again."""
    for head in RUNS:
        assert [of[head]["rows"] for of in results] == [2, 3]
        one, two = train(head, str(tmp_path / head)), results[0][head]
        resumed = train(head, f"{folder}/{head}", resume_from_checkpoint=f"{folder}/{head}/checkpoint-2")
        torch.testing.assert_close((two["losses"], two["metrics"]), (one["losses"], one["metrics"]), **TOLERANCE)
        torch.testing.assert_close(two["state"], one["state"], **TOLERANCE)
        torch.testing.assert_close((resumed["losses"], resumed["state"]), (two["losses"], two["state"]), **TOLERANCE)


def test_a_saved_model_has_all_classes_and_is_read_by_any_number_of_processes(results, folder):
    saved = SphereVisionForImageClassification.from_pretrained(folder / "saved")
    assert not saved.head.shard_classes
    assert torch.equal(saved.head.weight, results[0]["saved"])
    assert torch.equal(torch.cat([of["loaded"] for of in results]), results[0]["saved"])


def test_unfit_spreads_are_rejected_and_a_part_of_the_classes_is_not_saved_as_the_model(results, tmp_path):
    assert "1 classes cannot be spread over 2 processes" in results[0]["too few"]
    model = SphereVisionForImageClassification(SphereVisionConfig(num_labels=CLASSES, head="cosine"))
    model.head.classes = range(2)
    with pytest.raises(ValueError, match="gather_classes"):
        model.save_pretrained(tmp_path)


def test_any_range_of_classes_is_read_from_the_files_of_several_processes(tmp_path):
    weights = torch.randn(CLASSES, 4)
    for number, (start, stop) in enumerate([(0, 1), (1, 3), (3, 5)]):
        path = tmp_path / f"class_weights-{number:05d}-of-00003.safetensors"
        save_file({"w:": weights[start:stop].clone()}, path, metadata={"w": f"{start} {stop} {CLASSES}"})
    for start, stop in [(0, 5), (0, 2), (2, 5), (1, 3), (4, 5)]:
        assert torch.equal(_read_rows(tmp_path, "w", range(start, stop), CLASSES)[""], weights[start:stop])
    with pytest.raises(ValueError, match=r"00000-of-00003[.]safetensors has w of 5 classes; expected 6"):
        _read_rows(tmp_path, "w", range(6), 6)
    with pytest.raises(ValueError, match="was written without shard_classes"):
        _read_rows(tmp_path / "none", "w", range(5), CLASSES)
