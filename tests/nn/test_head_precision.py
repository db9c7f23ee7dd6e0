"""Range and precision of floating-point numbers in the heads."""

import copy

import pytest
import torch
import torch.nn.functional as F

from hf_sphere.nn import HEADS, build_head

LABELS = torch.tensor([0, 1, 2, 3, 0])
OPTIONS = {"vmf": {"num_samples": 2}}


def make(name):
    head = build_head(name, 6, 4, **OPTIONS.get(name, {}))
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
    head = make(name)
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
    train(make(name), x)
    assert x.grad.isfinite().all()
    assert length == 0 or x.grad.any()
    for dtype in (torch.bfloat16, torch.float32):
        x = embeddings(0.0, dtype)
        train(make(name), x)
        assert x.grad.abs().max() < 100


@pytest.mark.parametrize("name", HEADS)
def test_float64_embeddings_have_the_logits_of_float32(name):
    head, x = make(name).eval(), embeddings(3.0).detach()
    torch.testing.assert_close(head(x.double()).logits.float(), head(x).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["cosine", "prototype", "angular"])
def test_normalized_float16_embeddings_are_exact_however_short_and_usual_gradients_those_of_float32(name):
    x = embeddings(1e-4, torch.float16)
    expected = F.normalize(x.detach().float(), dim=-1)
    torch.testing.assert_close(make(name).transform(x), expected)
    head, x = make(name), embeddings(3.0, torch.float16)
    wide = x.detach().float().requires_grad_()
    train(copy.deepcopy(head), x)
    train(head, wide)
    torch.testing.assert_close(x.grad, wide.grad.half())


@pytest.mark.parametrize("name", [name for name in HEADS if name not in ("softmax", "spherized")])
@pytest.mark.parametrize("training", [True, False])
def test_autocast_does_not_change_the_result(name, training):
    head, x = make(name).train(training), embeddings(3.0)
    other = copy.deepcopy(head)
    expected = train(head, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = train(other, x)
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.loss, expected.loss)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("training", [True, False])
def test_a_float64_head_computes_in_float64_and_half_precision_in_float32(name, training):
    output = train(make(name).double().train(training), embeddings(3.0, torch.float64))
    assert {output.loss.dtype, output.logits.dtype, output.embeddings.dtype} == {torch.float64}
    of_half = make(name).bfloat16().train(training)
    for head, dtype in ((make(name), torch.float16), (make(name), torch.bfloat16), (of_half, torch.bfloat16)):
        x = embeddings(3.0, dtype)
        output = train(head.train(training), x)
        assert (output.loss.dtype, output.embeddings.dtype, x.grad.dtype) == (torch.float32, dtype, dtype)
        assert all(each.grad.isfinite().all() for each in (x, *head.parameters()) if each.grad is not None)
    assert name not in ("softmax", "spherized") or output.logits.dtype == torch.bfloat16
