import copy
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from case_selection import HEAD_FILES
from torch import _dynamo

from hf_sphere import nn as sphere_nn
from hf_sphere.geometry import spherize
from hf_sphere.metrics.neighbors import Distance
from hf_sphere.nn import HEADS, Head, HeadOutput, build_head
from hf_sphere.nn.heads.mixins import TemperatureHead

FEW_SAMPLES = {"vmf": {"num_samples": 2}}  # a graph grows with each sample


@pytest.fixture(params=sorted(HEADS))
def head(request) -> Head:
    return build_head(request.param, 6, 4)


def test_named_heads_are_registered_and_importable_by_their_class_names():
    assert all(getattr(sphere_nn, cls.__name__) is cls for cls in HEADS.values())
    assert not {Head, TemperatureHead} & set(HEADS.values())


def test_logits_and_directions_are_one_per_class_and_without_labels_there_is_no_loss(head):
    output, directions = head(torch.randn(5, 6)), head.directions()
    assert (output.logits.shape, output.loss) == ((5, 4), None)
    assert (directions is None) == (head.name == "subcenter_arcface")
    if directions is not None:  # unit vectors in the space of the embeddings
        assert directions.shape == (4, output.embeddings.shape[1])
        torch.testing.assert_close(directions.norm(dim=-1), torch.ones(4))
    assert head.metric()["distance"] in get_args(Distance)
    assert set(head.parameter_options()) <= dict(head.named_parameters()).keys()


def test_training_behind_a_linear_map_reduces_the_loss(head):
    torch.manual_seed(0)
    labels = torch.arange(40) % 4
    features = F.one_hot(labels, 6).float() * 3 + 0.1 * torch.randn(40, 6)
    encoder = torch.nn.Linear(6, 6)
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=0.05)
    losses = []
    for _ in range(60):
        loss = head(encoder(features), labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_reset_resamples_the_weights(head):
    before = {name: value.clone() for name, value in head.state_dict().items()}
    for parameter in head.parameters():
        torch.nn.init.constant_(parameter, 9.0)
    head.reset_parameters()
    after = head.state_dict()
    assert not any((value == 9.0).any() for value in after.values())
    assert {n: v.shape for n, v in after.items()} == {n: v.shape for n, v in before.items()}


def compile_head(head: Head, dynamic: bool | None = None) -> Callable[..., HeadOutput]:
    torch.compiler.reset()  # all heads share one `forward`, and the number of recompilations is limited
    return torch.compile(head, fullgraph=True, backend="aot_eager", dynamic=dynamic)  # without generating code


@HEAD_FILES
@pytest.mark.parametrize("name", HEADS)
def test_a_compiled_head_predicts_the_same_for_any_batch_size(name):
    head = build_head(name, 6, 4, **FEW_SAMPLES.get(name, {})).eval()
    compiled = compile_head(head, dynamic=True)
    with torch.no_grad():
        for size in (5, 8):
            x = torch.randn(size, 6)
            torch.testing.assert_close(compiled(x).logits, head(x).logits)


@HEAD_FILES
@pytest.mark.parametrize("name", HEADS)
def test_compiled_training_with_ignored_labels_matches_eager_training_for_any_batch_size(name):
    sizes = (5, 5) if name == "vmf" else (8, 12, 6)  # compiled losses are tested with others
    # Bessel functions compile faster in many dimensions.
    batches = [torch.randn(size, 64, dtype=torch.float64) for size in sizes]
    head, results, counters = build_head(name, 64, 4, **FEW_SAMPLES.get(name, {})).double(), [], _dynamo.utils.counters
    head.initialize_from_data(batches[0])
    counters.clear()
    for trained, run in ((eager := copy.deepcopy(head), eager), (head, compile_head(head))):
        for seed, x in enumerate(batches):  # a step must not reuse the random numbers of the one before
            inputs, labels = x.clone().requires_grad_(), torch.arange(len(x)) % 4
            labels[1:3] = -100
            trained.before_forward(seed, torch.arange(len(x)))
            output = run(inputs, labels)
            (output.loss + output.logits.square().sum()).backward()
            trained.after_step(lambda values: values)
            results.append((output.loss.detach(), inputs.grad))
        results.append((trained.state_dict(), {name: p.grad for name, p in trained.named_parameters()}))
    torch.testing.assert_close(results[1 + len(sizes) :], results[: 1 + len(sizes)])
    assert counters["stats"]["unique_graphs"] <= 2  # one of the first size, one of any size


@pytest.mark.parametrize("name", ["softmax", "cosine", "angular", "arcface"])
def test_loss_uses_label_smoothing(name):
    head = build_head(name, 6, 4, label_smoothing=0.2, **({"margin": 0.0} if name == "arcface" else {}))
    x, labels = torch.randn(5, 6), torch.arange(5) % 4
    if name == "softmax":
        torch.testing.assert_close(head(x).logits, x @ head.linear.weight.T + head.linear.bias)
    torch.testing.assert_close(head(x, labels).loss, F.cross_entropy(head(x).logits, labels, label_smoothing=0.2))


def test_spherized_logits_are_a_linear_map_of_embeddings_on_the_sphere():
    head, x = build_head("spherized", 6, 4, scaling=2.0, radius=3.0), torch.randn(5, 6)
    torch.testing.assert_close(head(x).logits, spherize(x, 2.0, 3.0) @ head.classifier.linear.weight.T)
    torch.testing.assert_close(head(x).embeddings.norm(dim=-1), torch.full((5,), 3.0))


@pytest.mark.parametrize("as_given", [list, np.array, torch.tensor])
def test_class_weights_multiply_the_losses_of_the_examples(as_given):
    torch.manual_seed(0)
    head, embeddings, labels = build_head("softmax", 4, 3), torch.randn(5, 4), torch.tensor([0, 1, 2, -100, 1])
    weights = [0.5, 2.0, 1.5]
    weighted = build_head("softmax", 4, 3, class_weights=as_given(weights))
    weighted.load_state_dict(head.state_dict())
    losses = torch.nn.functional.cross_entropy(head(embeddings).logits, labels, torch.tensor(weights), reduction="none")
    torch.testing.assert_close(weighted(embeddings, labels).loss, losses.sum() / 4)
