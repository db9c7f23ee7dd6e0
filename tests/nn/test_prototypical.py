"""Prototypical few-shot classification, compared with the formulas of the papers in float64."""

import pytest
import torch
from hypothesis import given, strategies as st

from hf_sphere.geometry import spherize
from hf_sphere.nn import PrototypicalClassifier

METRICS = ("euclidean", "cosine")

every_metric = pytest.mark.parametrize("metric", METRICS)
seeds = st.integers(0, 1000)


def episode(*episodes: int, seed: int = 0, queries=7, way=4, shot=3, dim=6, dtype=torch.float64):
    """Random queries, support and labels, with `episodes` as leading axes."""
    draws = torch.Generator().manual_seed(seed)
    query = torch.randn(*episodes, queries, dim, generator=draws, dtype=dtype)
    support = torch.randn(*episodes, way, shot, dim, generator=draws, dtype=dtype)
    return query, support, torch.randint(way, (*episodes, queries), generator=draws)


def plain(metric, temperature, query, support):
    """Logits of one episode, computed for each query and class."""
    query, support = query.double(), support.double()
    rows = []
    for q in query:
        row = []
        for examples in support:
            p = sum(examples) / len(examples)
            if metric == "euclidean":
                row.append(-((q - p) ** 2).sum() / temperature)
            else:
                row.append(1000 * ((q @ p) / (q.norm() * p.norm()) - 1) / temperature)
        rows.append(torch.stack(row))
    return torch.stack(rows)


@every_metric
@pytest.mark.parametrize("temperature", [1.0, 0.5, 64])
def test_logits_and_loss_match_the_formula(metric, temperature):
    query, support, labels = episode()
    expected = plain(metric, temperature, query, support)
    output = PrototypicalClassifier(metric, temperature)(query, support, labels.to(torch.int16))
    torch.testing.assert_close(output.logits, expected)
    torch.testing.assert_close(output.loss, -expected.log_softmax(1)[range(7), labels].mean())
    torch.testing.assert_close(output.prototypes, support.mean(dim=1))


@every_metric
def test_batched_episodes_match_single_episodes(metric):
    query, support, labels = episode(2, 3)
    classifier = PrototypicalClassifier(metric)
    together = classifier(query, support, labels)
    alone = [[classifier(query[i, j], support[i, j], labels[i, j]) for j in range(3)] for i in range(2)]
    assert torch.equal(together.logits, torch.stack([torch.stack([one.logits for one in row]) for row in alone]))
    torch.testing.assert_close(together.loss, sum(one.loss for row in alone for one in row) / 6)
    losses = torch.func.vmap(lambda q, s, y: classifier(q, s, y).loss)(query, support, labels)
    torch.testing.assert_close(losses.mean(), together.loss)


@every_metric
def test_gradients_pass_gradcheck(metric):
    query, support, labels = episode(queries=3, way=2, shot=2, dim=3)
    classifier = PrototypicalClassifier(metric, temperature=100.0 if metric == "cosine" else 1.0)
    inputs = (query.requires_grad_(), support.requires_grad_())
    assert torch.autograd.gradcheck(lambda q, s: classifier(q, s, labels).loss, inputs)


def test_gradients_are_finite_at_the_prototype_and_zero_at_zero_vectors_of_the_cosine():
    for metric in METRICS:
        query, support = torch.ones(1, 3, requires_grad=True), torch.stack([torch.ones(1, 3), -torch.ones(1, 3)])
        PrototypicalClassifier(metric)(query, support, torch.tensor([0])).loss.backward()
        assert query.grad.isfinite().all()
    query, support = torch.zeros(1, 3, requires_grad=True), torch.stack([torch.ones(1, 3), torch.zeros(1, 3)])
    support.requires_grad_()
    PrototypicalClassifier("cosine")(query, support, torch.tensor([0])).loss.backward()
    assert not query.grad.any()
    assert not support.grad[1].any()


# Precision


def test_small_distances_far_from_the_origin_are_accurate():
    query, support, _ = episode()
    query, support = (1000 + 0.01 * query).float(), (1000 + 0.01 * support[:, :1]).float()
    logits = PrototypicalClassifier()(query, support).logits
    torch.testing.assert_close(logits.double(), plain("euclidean", 1.0, query, support), rtol=1e-5, atol=0)


def test_cosines_of_spherized_embeddings_are_accurate():
    points = spherize(0.01 * torch.randn(11, 640), scaling=1.0, radius=5.0)
    query, support = points[:7], points[7:, None]
    logits = PrototypicalClassifier("cosine")(query, support).logits
    expected = plain("cosine", 1.0, query, support)
    assert expected.max() > -0.1  # angles of a degree and less
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-7)


@every_metric
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_embeddings_are_compared_in_float32(metric, dtype):
    query, support, labels = episode(dtype=dtype)
    output = PrototypicalClassifier(metric)(100 * query, 100 * support, labels)  # squares of 1e4 and sums beyond 65504
    expected = plain(metric, 1.0, 100 * query, 100 * support)
    torch.testing.assert_close(output.logits.double(), expected, rtol=1e-5, atol=2e-3)
    assert (output.logits.dtype, output.prototypes.dtype) == (torch.float32, dtype)


@every_metric
def test_autocast_and_compiling_do_not_change_the_result(metric):
    query, support, labels = episode(2, dtype=torch.float32)
    classifier = PrototypicalClassifier(metric)
    expected = classifier(query, support, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = classifier(query, support, labels)
    assert all(torch.equal(one, other) for one, other in zip(output, expected, strict=True))
    compiled = torch.compile(classifier, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, support, labels).loss, expected.loss)


# Invariances of the metrics


@given(
    st.sampled_from(METRICS), seeds, st.permutations(range(4)), st.permutations(range(3)), st.floats(-100, 100),
    st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)),
)  # fmt: skip
def test_logits_have_the_invariances_of_their_metric(metric, seed, classes, examples, shift, lengths):
    query, support, _ = episode(seed=seed)
    logits_of = PrototypicalClassifier(metric)
    logits = logits_of(query, support).logits
    torch.testing.assert_close(logits_of(query, support[classes]).logits, logits[:, classes])
    torch.testing.assert_close(logits_of(query, support[:, examples]).logits, logits)
    rotation = torch.linalg.qr(episode(seed=seed + 1, queries=6)[0]).Q
    torch.testing.assert_close(logits_of(query @ rotation, support @ rotation).logits, logits)
    if metric == "euclidean":
        torch.testing.assert_close(logits_of(query + shift, support + shift).logits, logits)
    else:
        torch.testing.assert_close(logits_of(lengths[0] * query, lengths[1] * support).logits, logits)
