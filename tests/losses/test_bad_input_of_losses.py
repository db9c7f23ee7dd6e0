"""What each loss refuses."""

import math

import pytest
import torch
from doubles import GivenEmbeddings
from torch import nn

from hf_sphere.losses import (
    ArcFaceLoss,
    CrossBatchSupConLoss,
    HeadLoss,
    HeatKernelLoss,
    InfoNCELoss,
    KoLeoLoss,
    SentenceTransformerLoss,
    SigLIPLoss,
    SlicedUniformityLoss,
    SupConLoss,
    cached_step,
    trainer_loss,
)

X, LABELS, PAIRS = torch.randn(6, 4), torch.tensor([0, 3, 1, 2, 3, 0]), torch.tensor([4, 7, 4, 1, 7, 1])
TWO_EACH = r"needs exactly two examples of each label; got .* pass torch.cat\(\[a, b\]\) and the labels torch.arange"


def of_texts(loss, columns):
    return SentenceTransformerLoss(GivenEmbeddings(), loss)([{"x": X}] * columns)


def of_labels(loss, labels, dtype=torch.int64):
    return loss(torch.randn(len(labels), 4), torch.tensor(labels, dtype=dtype))


TABLE = [
    *(
        (lambda kind=kind, labels=labels, dtype=dtype: of_labels(kind(), labels, dtype), f"{kind.__name__} {TWO_EACH}")
        for kind in (InfoNCELoss, SigLIPLoss)
        for labels in ([0, 0, 1], [0, 0, 0, 0], [0, 1])
        for dtype in (torch.int64, torch.uint8)
    ),
    (
        lambda: InfoNCELoss()(*torch.randn(2, 3, 4)),
        r"torch.cat\(\[a, b\]\) and the labels torch.arange\(len\(a\)\).repeat\(2\)",
    ),
    *(
        (lambda t=t: SupConLoss(t), r"temperature must be a number in \(0, inf\); got")
        for t in (0.0, -1.0, math.nan, math.inf)
    ),
    *(
        (lambda loss=loss: loss(X, PAIRS[:5]), r"and \(B,\); got \(6, 4\) and \(5,\)")
        for loss in (SupConLoss(), InfoNCELoss())
    ),
    *(
        (lambda loss=loss: loss(X, LABELS, (LABELS,)), "leave out indices_tuple")
        for loss in (SupConLoss(), ArcFaceLoss(4, 4))
    ),
    (
        lambda: CrossBatchSupConLoss(4, 5)(X, PAIRS),
        "a memory of 5 embeddings is smaller than a batch of 6; increase its size",
    ),
    *(
        (lambda make=make, shape=shape: make()(torch.randn(shape)), r"must be \(B, d\) with B > 1 and d > 1")
        for make in (HeatKernelLoss, KoLeoLoss, SlicedUniformityLoss)
        for shape in ((), (1, 4), (4, 1), (2, 3, 4))
    ),
    (lambda: HeadLoss(6, 4), "head must be one of adaface, angular"),
    (lambda: HeadLoss(6, 4, head="arcfase"), "unknown head 'arcfase'"),
    (lambda: ArcFaceLoss(6, 4, head="cosine"), "head must be arcface; got 'cosine'"),
    (lambda: ArcFaceLoss(6, 4, margin=28.6), "margin, of a cosine or an angle in radians"),
    (lambda: ArcFaceLoss(6, 4)(X, LABELS), r"shape \(B, 6\); got \(6, 4\)"),
    (lambda: ArcFaceLoss(4, 4)(X, LABELS + 1), "labels run from 1 to 4"),
    (lambda: trainer_loss(InfoNCELoss()), "would not train the parameters log_temperature .*learn_temperature=False"),
    (lambda: cached_step(nn.Linear(4, 5), SupConLoss(), (X, PAIRS[:5])), "must have the same number of examples"),
    # Chunks would have two embeddings per example in another order than the whole batch.
    (
        lambda: cached_step(lambda x: torch.cat([x, -x]), SupConLoss(), (X, PAIRS), 2),
        "one embedding per example; got 4",
    ),
    *(
        (
            lambda loss=loss, count=count: of_texts(loss, count),
            "labels are missing, but .*: name their column label, labels",
        )
        for loss, count in ((ArcFaceLoss(4, 4), 2), (CrossBatchSupConLoss(4, 64), 2), (SupConLoss(), 3))
    ),
]


@pytest.mark.parametrize(("call", "message"), TABLE)
def test_values_that_are_invalid_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_gradient_of_a_gradient_is_an_error():
    x = torch.randn(6, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(HeatKernelLoss()(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        gradient.sum().backward()


@pytest.mark.parametrize("kind", [SupConLoss, InfoNCELoss, SigLIPLoss])
def test_labels_that_are_no_integers_are_refused(kind):
    """Similarities of pairs as labels would be compared for equality."""
    with pytest.raises(TypeError, match=r"labels must be integers; got torch.float32"):
        kind()(X, LABELS / 4)
