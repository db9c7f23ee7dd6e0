"""Losses of pairs of embeddings, also with a memory of earlier batches."""

import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor

from hf_sphere.losses import CrossBatchSupConLoss, InfoNCELoss, SigLIPLoss, SupConLoss, trainer_loss
from hf_sphere.nn import class_softmax

PAIRS = torch.tensor([4, 7, 4, 1, 7, 1])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Compute with several blocks also for small batches."""
    monkeypatch.setattr(class_softmax, "SMALLEST_BLOCK", 2)
    monkeypatch.setitem(class_softmax.BLOCK, "cpu", 8)


def plain_supcon(x: Tensor, labels: Tensor, temperature: float = 0.1, memory: tuple[Tensor, ...] = ()) -> Tensor:
    """Equation 2 of the paper, one example at a time, in float64, among those of the batch and of a memory."""
    more, more_labels = memory or (x[:0], labels[:0])
    points, losses = F.normalize(torch.cat([x.double(), more.double()]), dim=-1), []
    all_labels = torch.cat([labels, more_labels])
    for i, label in enumerate(labels):
        others = (torch.arange(len(points)) != i) & (all_labels != -100)
        logits, positive = points[others] @ points[i] / temperature, all_labels[others] == label
        if label != -100 and positive.any():
            losses.append((logits.logsumexp(0) - logits[positive]).mean())
    return torch.stack(losses).mean() if losses else points.sum() * 0


def check_definition(loss: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Compare a loss and its gradient with its definition."""
    results = []
    for each in (plain, loss):
        inputs = x.clone().requires_grad_()
        value = each(inputs)
        value.backward()
        results.append((value.detach().double(), inputs.grad))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@given(st.lists(st.sampled_from([-100, 0, 1, 2, 10**9]), min_size=1, max_size=9), st.sampled_from([0.05, 0.1, 1.0]))
def test_supcon_loss_and_gradient_are_those_of_the_definition(labels, temperature):
    labels, loss = torch.tensor(labels), SupConLoss(temperature)
    x = torch.randn(len(labels), 4)
    check_definition(lambda x: loss(x, labels), lambda x: plain_supcon(x, labels, temperature), x)


@pytest.mark.parametrize("loss", [SupConLoss(0.3, learn_temperature=True), InfoNCELoss(0.3), SigLIPLoss(0.3, -1.0)])
def test_gradients_pass_gradcheck(loss):
    loss, x = loss.double(), torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: loss(x, PAIRS), [x, *loss.parameters()])


@pytest.mark.parametrize("make", [SupConLoss, InfoNCELoss])
def test_a_fixed_temperature_is_exact_in_float64(make):
    x = torch.randn(6, 4, dtype=torch.float64)
    loss = make(0.07, learn_temperature=False)
    for _ in range(2):  # without parameters, it need not be converted
        torch.testing.assert_close(loss.scale(x), x / 0.07, rtol=1e-14, atol=0)
        if make is SupConLoss:
            torch.testing.assert_close(loss(x, PAIRS), plain_supcon(x, PAIRS, 0.07), rtol=1e-13, atol=0)
        loss = loss.double()
    siglip = SigLIPLoss()  # with the initial values of the paper
    assert (siglip.log_temperature.exp().item(), siglip.bias.item()) == (pytest.approx(0.1), -10)
    assert repr(loss) == f"{make.__name__}(temperature=0.07)"


@pytest.mark.parametrize("ignored", [False, True])
def test_infonce_loss_is_the_symmetric_cross_entropy_of_the_pairs(ignored):
    x, labels = torch.randn(6, 4), PAIRS
    points = F.normalize(x, dim=-1)
    logits, own = points[[3, 0, 1]] @ points[[5, 2, 4]].T / 0.07, torch.arange(3)
    expected = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    if ignored:
        x, labels = torch.cat([torch.randn(1, 4), x]), torch.cat([torch.tensor([-100]), labels])
    torch.testing.assert_close(InfoNCELoss()(x, labels), expected)


def plain_siglip(x: Tensor, first: list[int], second: list[int], temperature: float, bias: float) -> Tensor:
    """Algorithm 1 of the paper."""
    points = F.normalize(x.double(), dim=-1)
    logits = points[first] @ points[second].T / temperature + bias
    return -F.logsigmoid((2 * torch.eye(len(first), dtype=x.dtype) - 1) * logits).sum() / len(first)


@given(st.permutations([0, 0, 1, 1, 2, 2, 3, 3]), st.sampled_from([0.01, 0.1, 1.0]), st.floats(-12, 3), st.booleans())
def test_siglip_loss_and_gradient_are_those_of_the_definition(labels, temperature, bias, ignored):
    x, labels = torch.randn(8, 4), torch.tensor(labels)
    labels[labels == 3] = -100 if ignored else 3
    at = [(labels == label).nonzero().flatten().tolist() for label in range(3 if ignored else 4)]
    first, second = map(list, zip(*at, strict=True))
    loss = SigLIPLoss(temperature, bias)
    check_definition(lambda x: loss(x, labels), lambda x: plain_siglip(x, first, second, temperature, bias), x)


def test_batches_without_positives_or_of_one_class_warn_once(caplog):
    loss, x = SupConLoss(), torch.randn(4, 4, requires_grad=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            value = loss(x, torch.arange(4))
            value.backward()
    assert value == 0
    assert not x.grad.any()
    assert len(caplog.messages) == 1
    loss = SupConLoss()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            loss(torch.randn(4, 4), torch.tensor([3, -100, 3, 3]))
        SupConLoss()(torch.randn(4, 4), torch.tensor([0, 0, 1, 1]))
    assert len([message for message in caplog.messages if "separates no classes" in message]) == 2


@pytest.mark.parametrize("kind", [SupConLoss, InfoNCELoss, SigLIPLoss])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(kind, dtype):
    x = torch.randn(6, 4).to(dtype)
    x[0] = x[2]  # a cosine of 1
    x[5] = 0
    expected = kind()(x.float(), PAIRS)
    inputs = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = kind()(inputs, PAIRS)
    value.backward()
    assert torch.equal(value, expected)
    assert inputs.grad.isfinite().all()
    assert inputs.grad[0].any()
    assert not inputs.grad[5].any()


@pytest.mark.parametrize("kind", [SupConLoss, InfoNCELoss, SigLIPLoss])
def test_no_tensor_has_an_entry_per_pair(kind):
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(part.numel() for part in torch.utils._pytree.tree_leaves(result) if isinstance(part, Tensor))
            return result

    with Sizes():
        kind()(torch.randn(256, 2, requires_grad=True), torch.arange(128).repeat(2)).backward()
    assert max(sizes) < 256**2 / 8


@pytest.mark.parametrize(
    ("kind", "labels"),
    [(SupConLoss, [0, -100, 0, 1, 1, -100]), (InfoNCELoss, [0, 1, -100, 0, 1]), (SigLIPLoss, [0, 1, -100, 0, 1])],
)
def test_ignored_examples_need_not_be_finite(kind, labels):
    x, labels = torch.randn(len(labels), 4), torch.tensor(labels)
    used = labels != -100
    expected = kind()(x[used], labels[used])
    x[~used] = torch.nan
    x.requires_grad_()
    loss = kind()(x, labels)
    torch.testing.assert_close(loss, expected)
    assert torch.autograd.grad(loss, x)[0].isfinite().all()


EXTREMES = [torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min, torch.iinfo(torch.int32).max, -1]


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("kind", [SupConLoss, InfoNCELoss, SigLIPLoss])
@pytest.mark.parametrize("ignored", [0, 1, 2])
def test_any_other_label_than_that_of_ignored_examples_is_a_class(kind, extreme, ignored):
    x, labels = torch.randn(6 + ignored, 4), torch.tensor([0, 1, 2, 0, 1, 2] + ignored * [-100])
    expected = kind()(x, labels)
    torch.testing.assert_close(kind()(x, labels.where(labels != 2, extreme)), expected)


@pytest.mark.parametrize("kind", [SupConLoss, InfoNCELoss, SigLIPLoss])
def test_class_156_of_labels_of_8_bits_is_a_class(kind):
    x, labels = torch.randn(6, 4), torch.tensor([0, 156, 2, 0, 156, 2])
    torch.testing.assert_close(kind()(x, labels.to(torch.uint8)), kind()(x, labels))


# The memory of earlier batches


def batches(count: int, size: int, dim: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, dim, generator=generator), torch.randint(-1, 4, (size,), generator=generator) % 5)
        for _ in range(count)
    ]


def test_each_loss_is_that_of_the_batch_among_the_last_embeddings():
    loss, seen, size = CrossBatchSupConLoss(4, size=10), [], 10
    for x, labels in batches(6, 4):
        labels[0] = -100
        memory = tuple(torch.cat(part)[-size:] for part in zip(*seen, strict=True))
        loaded = CrossBatchSupConLoss(4, size=10)
        loaded.load_state_dict(loss.state_dict())
        assert seen or torch.equal(loss(x, labels), SupConLoss()(x, labels))
        loss, seen = loaded, [*seen, (x, labels)]
        plain = partial(plain_supcon, labels=labels, memory=memory)
        check_definition(partial(loss, labels=labels), plain, x)


def test_an_example_that_is_still_in_the_memory_is_a_positive_of_itself():
    loss, x, labels = CrossBatchSupConLoss(4, 8), torch.randn(4, 4), torch.arange(4)
    assert loss(x, labels) == 0
    expected = plain_supcon(x, labels, memory=(x, labels))
    torch.testing.assert_close(loss(x, labels).double(), expected, rtol=1e-5, atol=1e-6)


def test_in_eval_mode_the_memory_is_neither_used_nor_filled():
    loss, ((x, labels), other) = CrossBatchSupConLoss(4, 8), batches(2, 8)
    loss(*other)
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    assert torch.equal(loss.eval()(x, labels), SupConLoss()(x, labels))
    torch.testing.assert_close(loss.state_dict(), before, rtol=0, atol=0)


def test_evaluation_in_a_trainer_leaves_the_memory_and_takes_a_dictionary():
    loss, labels = CrossBatchSupConLoss(4, size=16), torch.tensor([0, 0, 1, 1])
    compute, outputs = trainer_loss(loss), {"embeddings": torch.randn(4, 4)}
    assert compute(outputs, labels) == SupConLoss()(outputs["embeddings"], labels)  # the first batch
    with torch.no_grad():
        torch.testing.assert_close(compute(outputs, labels), SupConLoss()(outputs["embeddings"], labels))
    assert loss.position == 4
