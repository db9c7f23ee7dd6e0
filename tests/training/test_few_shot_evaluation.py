"""Few-shot evaluation: episodes sampled from embeddings that are computed once."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from hf_sphere import SphereVisionConfig, SphereVisionForFewShotClassification
from hf_sphere.data import Augmentation, Episodes, FewShotBatches, ImagesInMemory
from hf_sphere.training import evaluate_few_shot, evaluation
from hf_sphere.utils.texts import show_metric, show_metrics

LABELS = torch.arange(6).repeat(10)


def make_model(**options: Any) -> SphereVisionForFewShotClassification:
    torch.manual_seed(0)
    config = SphereVisionConfig(
        backbone="lenet5_bn", num_channels=1, image_size=6, embedding_dim=5, head=None, **options
    )  # fmt: skip
    model = SphereVisionForFewShotClassification(config).train()
    with torch.no_grad():  # statistics that differ from those of an untrained batch norm
        model(torch.randn(2, 9, 1, 6, 6), torch.randn(2, 3, 2, 1, 6, 6))
    return model


def make_batches(count: int = 9, *, shot: int = 2, eval_batch_size: int = 16, **options: Any) -> FewShotBatches:
    """Episodes of 3 classes with 4 queries each, of noisy images in six classes."""
    noise = torch.randint(0, 150, (60, 1, 6, 6), generator=torch.Generator().manual_seed(3))
    images = (noise + 100 * ((LABELS[:, None, None, None] + torch.arange(6)) % 3 == 0)).to(torch.uint8)
    episodes = Episodes(3, shot + 4, count, distinct=True)
    defaults = {"mean": [0.5], "std": [0.3], "episodes": episodes, "seed": 11}
    return FewShotBatches(ImagesInMemory(images, LABELS, **(defaults | options)), shot, eval_batch_size=eval_batch_size)


def evaluate(model: Any, batches: FewShotBatches) -> dict[str, float]:
    return evaluate_few_shot(model, batches, Accelerator(cpu=True))


@torch.no_grad()
def plainly(model: Any, batches: FewShotBatches) -> dict[str, float]:
    """Run one forward pass per episode; return the mean and interval as Python numbers."""
    model.eval()
    accuracies, losses = [], []
    for batch in batches.epoch():
        output = model(**batch)
        accuracies.append((output.logits.argmax(-1) == batch["labels"]).double().mean().item())
        losses.append(output.loss.item())
    n, mean = len(accuracies), math.fsum(accuracies) / len(accuracies)
    deviation = math.sqrt(math.fsum((a - mean) ** 2 for a in accuracies) / (n - 1))
    return {
        "accuracy": mean,
        "accuracy_interval": 1.96 * deviation / math.sqrt(n),
        "loss": math.fsum(losses) / n,
        "num_episodes": n,
    }


@pytest.mark.parametrize("shot", [1, 5])
@pytest.mark.parametrize(
    "options", [{}, {"spherization": {"scaling": 2.0}, "few_shot_kwargs": {"metric": "cosine", "temperature": 50.0}}]
)
def test_it_matches_one_forward_pass_per_episode(shot, options):
    model, batches = make_model(**options), make_batches(shot=shot)
    expected = plainly(model, batches)
    assert 1 / 3 < expected["accuracy"] < 1
    assert evaluate(model, batches) == pytest.approx(expected, rel=1e-5)


def test_it_does_not_depend_on_the_batch_sizes_of_images_and_episodes(monkeypatch):
    model = make_model()
    expected = evaluate(model, make_batches())
    for size in (1, 7, 100):
        assert evaluate(model, make_batches(eval_batch_size=size)) == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr(evaluation, "_NUMBERS_AT_ONCE", 2 * 3 * 4 * 3 * 5)
    assert evaluate(model, make_batches()) == pytest.approx(expected, rel=1e-6)


def test_only_images_in_episodes_are_embedded_and_only_once(monkeypatch):
    model, batches = make_model(), make_batches(count=2)
    embedded = []
    encode = model.base_model.forward
    monkeypatch.setattr(model.base_model, "forward", lambda pixels: embedded.append(len(pixels)) or encode(pixels))
    evaluate(model, batches)
    assert sum(embedded) == len(batches.images.episode_indices().unique()) < 2 * 3 * 6


def test_evaluation_is_reproducible_in_eval_mode_without_the_augmentation_of_training():
    model, before = make_model().train(), torch.get_rng_state()
    weights = copy.deepcopy(model.state_dict())
    torch.set_rng_state(before)
    changed = make_batches(augmentation=Augmentation(crop_padding=2, rotation=40.0), shuffle=True)
    expected = evaluate(model, make_batches())
    assert evaluate(model, make_batches()) == expected
    assert evaluate(model, changed) == pytest.approx(expected)
    assert not model.training
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)
    measured = evaluate(model, make_batches(count=1))
    assert (math.isnan(measured["accuracy_interval"]), measured["num_episodes"]) == (True, 1)


def test_a_process_without_images_takes_part_in_the_gathering(monkeypatch):
    model, batches = make_model().eval(), make_batches()
    idle = SimpleNamespace(process_index=1, num_processes=2, device="cpu")
    monkeypatch.setattr(evaluation, "gather_object", lambda share: [(torch.tensor([0]), torch.ones(1, 5)), *share])
    assert torch.equal(evaluation._gather_images(model, batches, torch.tensor([4]), idle), torch.ones(1, 5))


def test_intervals_are_shown_with_their_metrics_and_counts_are_omitted():
    assert show_metric("eval_accuracy", 0.95312, 0.00218) == "95.31 ± 0.22 %"
    assert show_metric("train_runtime", 61.2345) == "61.23 s"
    measured = {"eval_accuracy": 0.5, "eval_accuracy_interval": 0.01, "eval_loss": 2.0, "eval_num_episodes": 600}
    assert list(show_metrics(measured)) == ["eval_accuracy 50.00 ± 1.00 %", "eval_loss 2"]
