"""The memory of earlier batches of a loss of pairs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.losses import CrossBatchSupConLoss, SupConLoss, trainer_loss
from hf_sphere.nn import class_softmax


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Compute with several blocks also for small batches."""
    monkeypatch.setattr(class_softmax, "SMALLEST_BLOCK", 2)
    monkeypatch.setitem(class_softmax.BLOCK, "cpu", 8)


def plain(x: Tensor, labels: Tensor, memory: Tensor, memory_labels: Tensor, temperature: float = 0.1) -> Tensor:
    """Mean over the batch of the cross-entropies of the positives in batch and memory, in float64."""
    everything = F.normalize(torch.cat([x.double(), memory.double()]), dim=-1)
    all_labels, losses = torch.cat([labels, memory_labels]), []
    for i in range(len(x)):
        others = torch.arange(len(all_labels)) != i
        others &= all_labels != -100
        logits = everything[others] @ everything[i] / temperature
        positive = all_labels[others] == labels[i]
        if labels[i] != -100 and positive.any():
            losses.append((logits.logsumexp(0) - logits[positive]).mean())
    return torch.stack(losses).mean()


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
        memory = [torch.cat(part)[-size:] for part in zip(*seen, strict=True)] if seen else [x[:0], labels[:0]]
        inputs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, value = plain(inputs, labels, *memory), loss(ours, labels)
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
        gradients = torch.autograd.grad(expected, inputs)[0], torch.autograd.grad(value, ours)[0]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
        assert seen or torch.equal(value, SupConLoss()(x, labels))
        loaded = CrossBatchSupConLoss(4, size=10)
        loaded.load_state_dict(loss.state_dict())
        loss, seen = loaded, [*seen, (x, labels)]


def test_an_example_that_is_still_in_the_memory_is_a_positive_of_itself():
    loss, x, labels = CrossBatchSupConLoss(4, 8), torch.randn(4, 4), torch.arange(4)
    assert loss(x, labels) == 0
    torch.testing.assert_close(loss(x, labels).double(), plain(x, labels, x, labels), rtol=1e-5, atol=1e-6)


def test_in_eval_mode_the_memory_is_neither_used_nor_filled():
    loss, ((x, labels), other) = CrossBatchSupConLoss(4, 8), batches(2, 8)
    loss(*other)
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    assert torch.equal(loss.eval()(x, labels), SupConLoss()(x, labels))
    torch.testing.assert_close(loss.state_dict(), before, rtol=0, atol=0)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="embeddings must have the length 4; got 6"):
        CrossBatchSupConLoss(4, size=8)(torch.randn(2, 6), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="a memory of 7 embeddings is smaller than a batch of 8; increase its size"):
        CrossBatchSupConLoss(4, 7)(torch.randn(8, 4), torch.arange(8) // 2)


def test_evaluation_in_a_trainer_leaves_the_memory():
    loss, labels = CrossBatchSupConLoss(4, size=16), torch.tensor([0, 0, 1, 1])
    compute, outputs = trainer_loss(loss), {"embeddings": torch.randn(4, 4)}
    compute(outputs, labels)
    with torch.no_grad():
        torch.testing.assert_close(compute(outputs, labels), SupConLoss()(outputs["embeddings"], labels))
    assert loss.position == 4
