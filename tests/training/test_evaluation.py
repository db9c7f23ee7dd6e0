import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from small_runs import make_batches, make_model, random_images, small_model
from torch import nn

import hf_sphere
from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.data import ImagesInMemory
from hf_sphere.metrics import retrieval_scores
from hf_sphere.training import evaluate as evaluate_on, evaluate_retrieval
from hf_sphere.training.evaluation import (
    loss_is_sum,
    measure_images,
)
from hf_sphere.training.tasks.classification import evaluate_with_flips


def evaluate(model: nn.Module, batches) -> dict[str, float]:
    """Evaluate loss and accuracy on the CPU."""
    return evaluate_on(model, batches, Accelerator(cpu=True), measure_images)


def plain_evaluation(model: nn.Module, batches) -> dict[str, float]:
    """Accuracy and mean loss over all images in one batch."""
    data = list(batches.epoch(0))
    pixels, labels = (torch.cat([batch[key] for batch in data]) for key in ("pixel_values", "labels"))
    with torch.no_grad():
        logits = model.eval()(pixel_values=pixels, labels=labels).logits
    loss = nn.functional.cross_entropy(logits, labels).item()
    return {"accuracy": (logits.argmax(-1) == labels).float().mean().item(), "loss": loss}


def test_flips_at_test_time_average_the_logits_of_mirror_images():
    config = SphereVisionConfig(backbone="simple_fnn", num_channels=1, image_size=6, head="softmax", num_labels=3)
    model = SphereVisionForImageClassification(config).eval()
    batches = make_batches(shuffle=False, augment=False)
    (full,) = make_batches(batch_size=40, shuffle=False, augment=False).epoch()
    images, labels = full["pixel_values"], full["labels"]
    with torch.no_grad():
        logits = model(images).logits + model(images.flip(-1)).logits
    metrics = evaluate_with_flips(SimpleNamespace(accelerator=Accelerator(cpu=True)), model, batches)
    assert metrics.pop("accuracy_with_flips") == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    assert metrics == pytest.approx(plain_evaluation(model, batches))


@pytest.mark.parametrize("kind", ["classes", "retrieval"])
@pytest.mark.settings(kind=lambda kind: {"kind": kind})
def test_evaluation_is_in_eval_mode_and_leaves_the_model_and_the_random_numbers_unchanged(kind):
    model, batches = make_model().train(), make_batches(shuffle=False, augment=False)
    expected = plain_evaluation(make_model(), batches)
    if kind == "retrieval":
        config = SphereVisionConfig(
            backbone="lenet5_bn", backbone_kwargs={"drop_rate": 0.5}, num_channels=1, image_size=6, num_labels=3,
            head="vmf",
        )  # fmt: skip
        model, batches = SphereVisionForImageClassification(config), images_in_pairs(7)
        expected = expected_scores(model, batches)
    before, numbers = copy.deepcopy(model.train().state_dict()), torch.get_rng_state()
    if kind == "retrieval":
        measured = evaluate_retrieval(model, batches, Accelerator(cpu=True))
        assert {"recall_at_1", "r_precision", "map_at_r"} <= set(measured)
        assert {type(value) for value in measured.values()} == {float}
    else:
        measured = evaluate(model, batches)
    assert measured == pytest.approx(expected)
    assert not model.training
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), numbers)


# Retrieval


def images_in_pairs(batch_size: int) -> ImagesInMemory:
    """Forty random images of unseen classes, in the order of a split."""
    return random_images(40, labels=1000 + 7 * (torch.arange(40) // 4), batch_size=batch_size)


@torch.no_grad()
def expected_scores(model: SphereVisionForImageClassification, batches: ImagesInMemory, **options) -> dict[str, float]:
    (batch,) = ImagesInMemory(batches.images, batches.labels, batch_size=40, mean=[0.5], std=[0.3]).epoch()
    embeddings = model.eval().base_model(batch["pixel_values"]).embeddings
    scores = retrieval_scores(model.head.transform(embeddings), batches.labels, **options)
    return {name: scores[name] for name in ("recall_at_1", "r_precision", "map_at_r", "num_excluded")}


@pytest.mark.parametrize("head", ["softmax", "spherized", "prototype", "cosine", "arcface", "vmf", "hyperbolic"])
def test_retrieval_compares_all_images_by_the_distance_of_the_head(head):
    for curvature in (1e-5, 0.05, 1.0) if head == "hyperbolic" else (None,):
        options = {"curvature": curvature} if curvature else {}
        model = small_model(head, embedding_dim=5, head_kwargs=options)
        distance = {"distance": "hyperbolic", **options} if curvature else {}
        for batch_size in (7, 1, 100):
            batches = images_in_pairs(batch_size)
            expected = expected_scores(model, batches, **distance)
            assert evaluate_retrieval(model.train(), batches, Accelerator(cpu=True)) == pytest.approx(expected)
            assert 0.0 < expected["map_at_r"] < 1.0
        assert not curvature or expected != pytest.approx(expected_scores(model, batches))


# Tasks

TASKS = {
    "classification": hf_sphere.SphereVisionForImageClassification,
    "regression": hf_sphere.SphereVisionForRegression,
    "joint": hf_sphere.SphereVisionForJointPrediction,
}
every_task = pytest.mark.parametrize("task", TASKS)


def task_model(task: str, reduction: str = "mean") -> nn.Module:
    """A linear model of a task, with three classes or values from 0 to 4."""
    sums = {"reduction": "sum"} if reduction == "sum" else {}
    options = {"embedding_dim": 4, "value_range": [0.0, 4.0], "head_kwargs": sums, "regression_kwargs": sums}
    return small_model("prototype" if task != "regression" else None, kind=TASKS[task], **options)


def task_batches(task: str, batch_size: int) -> ImagesInMemory:
    """Forty random images with the targets of a task."""
    values = torch.rand(40, generator=torch.Generator().manual_seed(5)) * 4
    options: dict[str, Any] = {"labels": values} if task == "regression" else {}
    options |= {"regression_labels": values} if task == "joint" else {}
    return random_images(40, batch_size=batch_size, **options)


@torch.no_grad()
def plain_task_evaluation(task: str, model: nn.Module) -> dict[str, float]:
    """Metrics of all images in one batch."""
    (batch,) = task_batches(task, 40).epoch()
    output = model.eval()(**batch)
    expected = {"loss": output.loss.item()}
    if task != "regression":
        expected["accuracy"] = (output.logits.argmax(-1) == batch["labels"]).double().mean().item()
    if task in ("regression", "joint"):
        values = batch["regression_labels" if task == "joint" else "labels"]
        expected["mean_absolute_error"] = (output.predictions - values).abs().mean().item()
    return expected


@every_task
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.settings(reduction=lambda reduction: {"reduction": reduction})
def test_task_evaluation_matches_a_single_full_batch_and_reports_a_summed_loss_as_its_mean(task, reduction):
    model = task_model(task, reduction)
    expected = plain_task_evaluation(task, model)
    expected["loss"] /= 40 if reduction == "sum" else 1
    for batch_size in (7, 1, 100):
        measured = evaluate_on(model, task_batches(task, batch_size), Accelerator(cpu=True))
        assert measured == pytest.approx(expected, rel=1e-5)
    assert [loss_is_sum(each) for each in (model, make_model())] == [reduction == "sum", False]
    module = nn.ModuleDict({"auxiliary": nn.MSELoss(reduction="sum"), "own": model})
    assert loss_is_sum(module) == (reduction == "sum")
    module.loss_reduction = "sum"
    assert loss_is_sum(module)
