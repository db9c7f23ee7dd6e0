"""Labels of the heads: ignored examples, several classes per example, and training without labels."""

import copy

import pytest
import torch
import torch.nn.functional as F

from hf_sphere.nn import HEADS, PrototypicalClassifier, build_head

OPTIONS = {"vmf": {"num_samples": 2}}
LABELS = torch.tensor([0, -100, 2, 3, -100])
USED = LABELS != -100
OWN_LOSS = [name for name, head in HEADS.items() if head.has_own_loss()]
MULTI_LABEL = [name for name in HEADS if name not in OWN_LOSS]
TARGETS = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])


def make(name, **options):
    return build_head(name, 6, 4, **OPTIONS.get(name, {}), **options)


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
def test_loss_is_that_of_the_examples_that_are_not_ignored(name):
    head, x, places = make(name), torch.randn(5, 6), torch.arange(5)
    expected = loss_of(head, x[USED], LABELS[USED], places[USED])
    torch.testing.assert_close(loss_of(head, x, LABELS, places), expected)


@pytest.mark.parametrize("name", HEADS)
def test_ignored_examples_have_no_loss_and_no_gradient(name):
    x = torch.randn(5, 6, requires_grad=True)
    make(name)(x, LABELS).loss.backward()
    assert torch.equal(x.grad.any(dim=1), USED)
    assert make(name)(torch.randn(2, 6), torch.tensor([-100, -100])).loss == 0


def test_ignored_examples_have_no_share_in_sums_concentrations_and_queries():
    x, with_ignored, without = torch.randn(5, 6), make("prototype"), make("prototype")
    total = make("prototype", reduction="sum")(x, LABELS).loss
    torch.testing.assert_close(total, 3 * with_ignored(x, LABELS).loss)
    without(x[USED], LABELS[USED])
    torch.testing.assert_close(with_ignored.class_concentration, without.class_concentration)
    assert without.class_concentration != 10.0
    support = torch.randn(4, 2, 6)
    expected = PrototypicalClassifier()(x[USED], support, LABELS[USED]).loss
    torch.testing.assert_close(PrototypicalClassifier()(x, support, LABELS).loss, expected)


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


@pytest.mark.parametrize("name", ["arcface", "proxy_anchor"])
def test_the_loss_in_training_has_second_and_forward_derivatives(name):
    head, labels = make(name).double(), torch.tensor([0, 2, 3])
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: head(x, labels).loss, x, check_forward_ad=True)
    head = make(name).double()
    assert torch.autograd.gradgradcheck(lambda x: head(x, labels).loss, x)
