"""Options, embeddings and labels that would give a wrong result are refused."""

import math

import numpy as np
import pytest
import torch

from hf_sphere import nn

SHARES, INTEGERS = torch.full((2, 4), 0.25), torch.ones(1, 4, 4, 4, dtype=torch.long)
NAN, INF = math.nan, math.inf


def head(name, classes=4, **options):
    return lambda: nn.build_head(name, 6, classes, **options)


def loss(name, labels, count=2, **options):
    return lambda: nn.build_head(name, 6, 4, **options)(torch.randn(count, 6), torch.as_tensor(labels))


def mixed(name="cosine", **changed):
    labels = {"mixed_labels": torch.tensor([1, 2]), "mixed_share": torch.tensor([0.1, 0.2])} | changed
    return lambda: nn.build_head(name, 6, 4)(torch.randn(2, 6), torch.tensor([0, 1]), **labels)


def regression(targets, dim=4, count=3):
    return lambda: nn.PoleRegression(4, (1000.0, 1932.0))(torch.randn(count, dim), torch.as_tensor(targets))


def episode(query=(7, 6), support=(4, 3, 6), labels=None):
    return lambda: nn.PrototypicalClassifier()(torch.zeros(query), torch.ones(support), labels)


def calibration(logits, labels, kind="vector"):
    return lambda: nn.fit_calibration(logits, labels, kind)


def prototypes(points):
    return lambda: nn.build_head("prototype", 4, 7).set_prototypes(points)


OPTIONS = [
    (head("softmx"), "unknown head 'softmx'; the heads are: .*softmax, spherized"),
    (head("spherized", margin=0.5), "head 'spherized' has no option margin; its options are: scaling, radius"),
    (head("vmf", label_smoothing=0.1), "head 'vmf' has no option label_smoothing; its options are: num_samples"),
    (head("cosine", 0), "num_classes must be an integer of at least 1; got 0"),
    (head("softmax", label_smoothing=1.0), r"label_smoothing must be a number in \[0, 1\); got 1.0"),
    *(
        (head("softmax", class_weights=weights), "class_weights must be 4 positive numbers; got")
        for weights in ([1.0], np.ones((4, 1)), torch.ones(1, 4), [1.0, 0.0, 1.0, 1.0], [1.0, 1.0, NAN, 1.0], [INF] * 4)
    ),
    *((head("cosine", sample_rate=rate), "sample_rate must be a number in") for rate in (0.0, -0.1, 1.1, NAN)),
    (head("arcface", blockwise="yes"), "blockwise must be one of True, False, auto; got 'yes'"),
    *((head("arcface", margin=margin), r"must be a number in \[0, 1.57") for margin in (-0.1, 1.6, 28.6, NAN)),
    (head("cosface", margin=1.5), r"must be a number in \[0, 1.0\]; got 1.5"),
    (head("proxy_anchor", margin=-0.1), r"margin must be a number in \[0, 1\]; got -0.1"),
    (head("arcface", margin_warmup_epochs=-5), "margin_warmup_epochs must be an integer of at least 0; got -5"),
    (head("subcenter_arcface", sub_centers=0), "sub_centers must be an integer of at least 1; got 0"),
    *((head("arcface", scale=s), r"'learned', must be a number in \(0, inf\)") for s in (0, -3.0, INF, NAN, "fixed")),
    (head("cosine", scale="learned", log_temperature=-2.0), "log_temperature -2.0 and scale 'learned' are exclusive"),
    (head("cosine", scale=64, temperature_lr=0.1), "temperature_lr 0.1 needs a learned scale, but scale 64 is fixed"),
    (head("cosine", temperature_lr=-0.1), r"temperature_lr must be a number in \[0, inf\); got -0\.1"),
    (head("vmf", num_samples=0), "num_samples must be an integer of at least 1; got 0"),
    (head("vmf", kappa_confidence=0.0), r"kappa_confidence, if not 'auto', must be a number in \(0, 1\); got 0\.0"),
    (head("vmf", prediction="median"), "prediction must be one of samples, mean; got 'median'"),
    (head("prototype", reduction="none"), "reduction must be one of mean, sum; got 'none'"),
    (head("prototype", method="adam"), "method must be one of auto, .*; got 'adam'"),
    (head("prototype", 1), "num_classes must be an integer of at least 2; got 1"),
    (head("etf", 8), "embedding_dim must be at least num_classes - 1, 7; got 6"),
    *((head("hyperbolic", curvature=c), r"curvature must be a number in \(0, inf\)") for c in (0.0, -1.0, NAN, INF)),
    *((head(name, operator="tanh"), "operator must be one of cosine, .*; got 'tanh'") for name in ("angular",)),
    (lambda: nn.AngularLinear(4, 3, "tanh"), "operator must be one of .*; got 'tanh'"),
    (lambda: nn.AngularConv2d(4, 3, 1, "tanh"), "operator must be one of .*; got 'tanh'"),
    (lambda: nn.Spherization(4, radius=INF), r"radius must be a number in \(0, inf\); got inf"),
    (lambda: nn.Spherization(4, scaling=0.0), "scaling must be finite and not 0"),
    (lambda: nn.Spherization(4, scaling=NAN), "scaling must be finite and not 0"),
    (lambda: nn.Spherization(4, delta=1.0), r"delta must be a number in \(0, 1\)"),
    (lambda: nn.SphericalConv2d(0, 3, 1), "in_channels must be an integer of at least 1"),
    *(
        (lambda e=ends: nn.PoleRegression(3, e), "the lower one first")
        for ends in [(1, 1), (2, 1), (0, INF), (NAN, 1), ()]
    ),
    (lambda: nn.PoleRegression(1, (0, 1)), "embedding_dim must be an integer of at least 2; got 1"),
    (
        lambda: nn.PoleRegression(3, (0, 1), out_of_range="ignore"),
        "out_of_range must be one of error, clip; got 'ignore'",
    ),
    (lambda: nn.PoleRegression(3, (0, 1), reduction="none"), "reduction must be one of mean, sum; got 'none'"),
    (lambda: nn.PrototypicalClassifier("l1"), "metric must be one of euclidean, cosine; got 'l1'"),
    (lambda: nn.PrototypicalClassifier(temperature=INF), r"temperature must be a number in \(0, inf\); got inf"),
]
TENSORS = [
    (lambda: nn.Head(6, 4)(torch.randn(2, 6)), "Head must define `compute_logits`"),
    (loss("softmax", torch.ones(2, 4), class_weights=[1.0, 1.0, 2.0, 1.0]), "class_weights are for one class per ex"),
    (loss("cosine", [0, 1], sample_rate=0.5, label_smoothing=0.1), "excludes label smoothing"),
    (loss("softmax", torch.zeros(2, 4), blockwise=True), "need one class per example"),
    (loss("softmax", [0, 4], blockwise=True), "labels run from 0 to 4"),
    (loss("softmax", torch.tensor([0, 156], dtype=torch.uint8)), "labels run from 0 to 156"),
    (mixed(mixed_share=None), "need labels, mixed_labels and mixed_share"),
    (mixed(mixed_labels=torch.tensor([9, 9])), "run from 9 to 9"),
    (mixed(mixed_share=torch.tensor([1.5, 0.0])), "from 0 to 1"),
    (mixed(mixed_share=torch.zeros(3)), "each of shape"),
    (mixed("proxy_anchor"), "'proxy_anchor' compares the images of a batch"),
    *((prototypes(torch.ones(shape)), r"must have the shape .*, \(7, 4\)") for shape in ((7, 3), (6, 4), (7,))),
    *((prototypes(torch.full((7, 4), value)), "finite and not zero") for value in (0.0, NAN, INF)),
    *((regression([1500.0, v, 1500.0]), f"target {v:g} is outside the range") for v in (999.9, 1933.0, NAN, INF)),
    *((regression(torch.full(s, 1500.0)), r"must have shape \(3,\)") for s in ((3, 1), (), (1, 3), (1,), (4,))),
    *((regression([1500.0] * 3, dim), f"the pole has 4 coordinates, the embeddings {dim}") for dim in (1, 3, 5)),
    *(
        (episode(*shapes), r"expected the shapes \(..., queries, d\) and .*; got \(")
        for shapes in [
            ((7, 6), (4, 3, 5)),  # wrong length
            ((7, 1), (4, 3, 6)),  # length that would broadcast
            ((7, 6), (12, 6)),  # no class axis
            ((2, 7, 6), (3, 4, 3, 6)),  # wrong number of episodes
            ((2, 7, 6), (1, 4, 3, 6)),  # episodes that would broadcast
            ((2, 7, 6), (4, 3, 6)),
            ((6,), (3, 6)),
            ((7, 6), (0, 3, 6)),
            ((7, 6), (4, 0, 6)),
        ]
    ),
    (episode(labels=torch.tensor([0, 1, 2])), r"labels must be one per query, \(7,\); got \(3,\)"),
    (episode(labels=torch.zeros(7, 1).long()), "labels must be one per query"),
    (episode(labels=torch.zeros(7)), "labels must be integers"),
    *((episode(labels=torch.tensor([k] * 7)), r"the support has 4 classes \(0 to 3\)") for k in (-1, 4, -101)),
    (calibration(torch.zeros(3, 2), [0, 1, 0], "matrix"), "kind must be one of temperature, vector; got 'matrix'"),
    (calibration(torch.zeros(3, 2), torch.tensor([0, 1])), r"labels must have the shape \(3,\)"),
    (calibration(torch.zeros(0, 2), torch.zeros(0)), "N >= 1"),
    (calibration(torch.full((3, 2), NAN), torch.tensor([0, 1, 0])), "logits must be finite"),
    (calibration(torch.zeros(3, 2), [0, 1, 2]), "from 0 to 1, and all of them must occur; got .0, 1, 2"),
    (calibration(torch.zeros(3, 2), [0, 1, -100]), "labels must be from 0 to 1.* got .-100, 0, 1"),
    (calibration(torch.zeros(3, 2), [1, 1, 1]), "and all of them must occur; got .1."),
    (calibration(torch.zeros(2, 2), [0.5, 1.0], "temperature"), "labels must be integers"),
    (calibration(torch.zeros(2, 2), np.array(["cat", "dog"]), "temperature"), "the first is 'cat'. Number the names"),
    (lambda: nn.Spherization(3)(torch.randn(2, 5)), r"expected 3 features along axis -1; got shape \(2, 5\)"),
    *(
        (lambda layer=layer, x=x: layer(x), rf"floating-point dtype; got {kind}")
        for layer in (nn.AngularLinear(4, 3), nn.AngularConv2d(4, 3, 1), nn.Spherization(4), nn.SphericalLinear(4, 3))
        for x, kind in ((INTEGERS, r"torch\.int64\. Convert"), (np.ones((4, 4, 4)), r"ndarray\. Convert"))
    ),
]


@pytest.mark.parametrize(("call", "message"), [*OPTIONS, *TENSORS])
def test_bad_input_is_refused(call, message):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        call()


@pytest.mark.parametrize("name", nn.HEADS)
def test_every_head_refuses_embeddings_and_labels_of_a_wrong_shape_dtype_or_value(name):
    for shape in ((2, 5), (6,), (2, 3, 6)):
        with pytest.raises(ValueError, match=r"embeddings must have shape \(B, 6\); got"):
            nn.build_head(name, 6, 4)(torch.randn(shape))
    for dim in (0, 0.5, True):
        with pytest.raises(ValueError, match=f"embedding_dim .*; got {dim}"):
            nn.build_head(name, dim, 3)
    wrong = [([0, 4], "but the model has 4 classes"), ([-1, 0], "but the model has 4 classes")]
    wrong += [
        ([0, 1, 2], r"labels \(3,\) are not one for each of 2"),
        ([0], r"labels \(1,\) are not one for each of 2"),
    ]
    wrong += [([[0], [1]], r"must be the same as input size|is for one class per example")]
    wrong += [(torch.tensor([0, 1]).to(dtype), "labels must be integers") for dtype in (torch.float32, torch.bool)]
    if nn.HEADS[name].has_own_loss():
        wrong.append((torch.ones(2, 4), rf"head '{name}' is for one class per example; .* requires .* softmax"))
    else:
        wrong += [(torch.full((2, 4), value), "several classes must be 0 or 1") for value in (-1, 2, NAN)]
    for labels, message in wrong:
        with pytest.raises((ValueError, TypeError), match=message):
            loss(name, labels)()
