"""What all heads share: logits, losses, compilation, labels, and the range and precision of numbers."""

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
from hf_sphere.metrics.retrieval import Distance
from hf_sphere.nn import HEADS, Head, HeadOutput, PrototypicalClassifier, build_head
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


# Labels

WITH_IGNORED = torch.tensor([0, -100, 2, 3, -100])
USED = WITH_IGNORED != -100
OWN_LOSS = [name for name, head in HEADS.items() if head.has_own_loss()]
MULTI_LABEL = [name for name in HEADS if name not in OWN_LOSS]
TARGETS = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])


def make(name, **options):
    return build_head(name, 6, 4, **FEW_SAMPLES.get(name, {}), **options)


def loss_of(head, x, labels, places):
    head.before_forward(0, places)
    return head(x, labels).loss


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_labels_of_any_integer_dtype_have_the_loss_of_int64(name, dtype):
    head, x, labels = make(name), torch.randn(4, 6), torch.tensor([1, 3, 2, 1])  # as many as classes, and none is 0
    places = torch.arange(4)
    torch.testing.assert_close(loss_of(head, x, labels.to(dtype), places), loss_of(head, x, labels, places))


# Ignored examples


@pytest.mark.parametrize("name", HEADS)
def test_loss_and_gradient_are_those_of_the_examples_that_are_not_ignored(name):
    head, x, places = make(name), torch.randn(5, 6, requires_grad=True), torch.arange(5)
    expected, found = loss_of(head, x[USED], WITH_IGNORED[USED], places[USED]), loss_of(head, x, WITH_IGNORED, places)
    torch.testing.assert_close(found, expected)
    found.backward()
    assert torch.equal(x.grad.any(dim=1), USED)
    assert make(name)(torch.randn(2, 6), torch.tensor([-100, -100])).loss == 0


def test_ignored_examples_have_no_share_in_sums_concentrations_and_queries():
    x, with_ignored, without = torch.randn(5, 6), make("prototype"), make("prototype")
    total = make("prototype", reduction="sum")(x, WITH_IGNORED).loss
    torch.testing.assert_close(total, 3 * with_ignored(x, WITH_IGNORED).loss)
    without(x[USED], WITH_IGNORED[USED])
    torch.testing.assert_close(with_ignored.class_concentration, without.class_concentration)
    assert without.class_concentration != 10.0
    support = torch.randn(4, 2, 6)
    expected = PrototypicalClassifier()(x[USED], support, WITH_IGNORED[USED]).loss
    torch.testing.assert_close(PrototypicalClassifier()(x, support, WITH_IGNORED).loss, expected)


# Several classes per example


@pytest.mark.parametrize("name", sorted({*MULTI_LABEL, "softmax", "spherized", "cosine"}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_loss_of_several_classes_is_the_binary_cross_entropy_smoothed_towards_one_half(name, dtype):
    head, x = make(name), torch.randn(3, 6)
    expected = F.binary_cross_entropy_with_logits(head(x).logits, TARGETS.float())
    torch.testing.assert_close(head(x, TARGETS.to(dtype)).loss, expected)
    head = make("softmax", label_smoothing=0.2)
    expected = F.binary_cross_entropy_with_logits(head(x).logits, 0.8 * TARGETS + 0.1)
    torch.testing.assert_close(head(x, TARGETS.to(dtype)).loss, expected)


# Training by another loss


def reports(caplog) -> int:
    return sum("is trained by a loss of its logits instead of its own loss" in message for message in caplog.messages)


@pytest.mark.parametrize("name", OWN_LOSS)
def test_a_cross_entropy_of_the_logits_of_a_head_with_another_loss_is_reported_once(name, caplog):
    head, labels = make(name), torch.tensor([0, 2, 3])
    F.cross_entropy(head(torch.randn(3, 6, requires_grad=True)).logits, labels)
    copy.deepcopy(head).eval()(torch.randn(3, 6, requires_grad=True)).logits.max().backward()
    output = head(torch.randn(3, 6, requires_grad=True), labels)
    (output.loss + output.logits.softmax(-1).square().sum()).backward()  # as in a distillation
    if (embeddings := head(torch.randn(3, 6, requires_grad=True)).embeddings).requires_grad:
        embeddings.sum().backward()
    assert reports(caplog) == 0  # only in training, without labels, and with a gradient of the logits
    for _ in range(2):
        F.cross_entropy(head(torch.randn(3, 6, requires_grad=True)).logits, labels).backward()
    assert reports(caplog) == 1


@pytest.mark.parametrize("name", MULTI_LABEL)
def test_a_cross_entropy_of_the_logits_is_reported_only_if_it_is_not_the_loss_of_the_head(name, caplog):
    F.cross_entropy(make(name)(torch.randn(3, 6)).logits, torch.tensor([0, 2, 3])).backward()
    assert caplog.messages == []
    for number, options in enumerate(({"class_weights": [1.0, 2.0, 3.0, 4.0]}, {"label_smoothing": 0.1}), 1):
        F.cross_entropy(make(name, **options)(torch.randn(3, 6)).logits, torch.tensor([0, 2, 3])).backward()
        assert reports(caplog) == number


@pytest.mark.parametrize("name", ["arcface", "cosine", "proxy_anchor"])
def test_the_loss_in_training_has_second_and_forward_derivatives(name):
    head, labels = make(name).double(), torch.tensor([0, 2, 3])
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: head(x, labels).loss, x, check_forward_ad=True)
    head = make(name).double()
    assert torch.autograd.gradgradcheck(lambda x: head(x, labels).loss, x)


# Range and precision

LABELS = torch.tensor([0, 1, 2, 3, 0])


def fitted(name):
    head = make(name)
    if head.needs_data_initialization:
        head.initialize_from_data(torch.randn(50, 6))
    return head


def embeddings(length, dtype=torch.float32):
    return (length * F.normalize(torch.randn(5, 6), dim=-1)).to(dtype).requires_grad_()


def train(head, x):
    head.before_forward(0, torch.arange(5))
    output = head(x, LABELS)
    output.loss.backward()
    return output


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("length", [1e19, 1e20, 1e30])
def test_very_long_embeddings_have_the_loss_and_predictions_of_double_precision(name, length):
    head = fitted(name)
    reference, x = copy.deepcopy(head).double(), embeddings(length)
    expected = train(reference, x.detach().double().requires_grad_()).loss
    torch.testing.assert_close(train(head, x).loss.double(), expected, rtol=1e-3, atol=1e-3)
    assert x.grad.isfinite().all()
    expected = reference.eval()(x.double()).logits
    torch.testing.assert_close(head.eval()(x).logits.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("length", [1e-3, 1e-5, 1e-7, 0.0])
def test_gradients_of_very_short_float16_embeddings_are_finite_and_of_zeros_moderate(name, length):
    x = embeddings(length, torch.float16)
    train(fitted(name), x)
    assert x.grad.isfinite().all()
    assert length == 0 or x.grad.any()
    for dtype in (torch.bfloat16, torch.float32):
        x = embeddings(0.0, dtype)
        train(fitted(name), x)
        assert x.grad.abs().max() < 100


@pytest.mark.parametrize("name", HEADS)
def test_float64_embeddings_have_the_logits_of_float32(name):
    head, x = fitted(name).eval(), embeddings(3.0).detach()
    torch.testing.assert_close(head(x.double()).logits.float(), head(x).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["cosine", "prototype", "angular"])
def test_normalized_float16_embeddings_are_exact_however_short_and_usual_gradients_those_of_float32(name):
    x = embeddings(1e-4, torch.float16)
    expected = F.normalize(x.detach().float(), dim=-1)
    torch.testing.assert_close(fitted(name).transform(x), expected)
    head, x = fitted(name), embeddings(3.0, torch.float16)
    wide = x.detach().float().requires_grad_()
    train(copy.deepcopy(head), x)
    train(head, wide)
    torch.testing.assert_close(x.grad, wide.grad.half())


@pytest.mark.parametrize("name", [name for name in HEADS if name not in ("softmax", "spherized")])
@pytest.mark.parametrize("training", [True, False])
def test_autocast_does_not_change_the_result(name, training):
    head, x = fitted(name).train(training), embeddings(3.0)
    other = copy.deepcopy(head)
    expected = train(head, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = train(other, x)
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.loss, expected.loss)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("training", [True, False])
def test_a_float64_head_computes_in_float64_and_half_precision_in_float32(name, training):
    output = train(fitted(name).double().train(training), embeddings(3.0, torch.float64))
    assert {output.loss.dtype, output.logits.dtype, output.embeddings.dtype} == {torch.float64}
    of_half = fitted(name).bfloat16().train(training)
    for head, dtype in (
        (fitted(name), torch.float16),
        (fitted(name), torch.bfloat16),
        (of_half, torch.bfloat16),
    ):
        x = embeddings(3.0, dtype)
        output = train(head.train(training), x)
        assert (output.loss.dtype, output.embeddings.dtype, x.grad.dtype) == (torch.float32, dtype, dtype)
        assert all(each.grad.isfinite().all() for each in (x, *head.parameters()) if each.grad is not None)
    assert name not in ("softmax", "spherized") or output.logits.dtype == torch.bfloat16
