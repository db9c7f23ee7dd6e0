import functools

import pytest
import torch
import torch.nn.functional as F

from hf_sphere.nn import build_head
from hf_sphere.nn.heads import prototype
from hf_sphere.prototypes import place_prototypes

LABELS = torch.tensor([0, 3, 6, 1, 3])


def cosines(embeddings, prototypes):
    """Cosines (B, K) in float64 by definition."""
    embeddings, prototypes = embeddings.double(), prototypes.double()
    return embeddings @ prototypes.T / embeddings.norm(dim=1)[:, None] / prototypes.norm(dim=1)


@pytest.fixture
def head():
    return build_head("prototype", 4, 7)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_is_the_squared_difference_of_the_cosine_from_one(reduction):
    head, x = build_head("prototype", 4, 7, reduction=reduction), torch.randn(5, 4)
    own = cosines(x, head.prototypes)[torch.arange(5), LABELS]
    expected = getattr((1 - own) ** 2, reduction)()
    torch.testing.assert_close(head(x, LABELS).loss.double(), expected, rtol=1e-5, atol=1e-6)
    head.class_concentration.fill_(50.0)  # which has no effect
    torch.testing.assert_close(head(x, LABELS).loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.autograd.gradcheck(lambda x: head.eval()(x, LABELS).loss, x.double().requires_grad_())


def test_prediction_is_the_nearest_prototype_and_confidence_the_vmf_posterior(head):
    x = torch.randn(50, 4)
    assert torch.equal(head(x).logits.argmax(1), cosines(x, head.prototypes).argmax(1))
    output = head(2 * head.prototypes, torch.arange(7))
    assert output.logits.argmax(1).tolist() == list(range(7))
    assert output.loss.item() == pytest.approx(0.0, abs=1e-12)
    # Of the densities of von Mises and Fisher, the normalizing constants cancel.
    densities = torch.exp(head.class_concentration.double() * cosines(x, head.prototypes))
    expected = densities / densities.sum(1, keepdim=True)
    torch.testing.assert_close(head.eval()(x).logits.softmax(1).double(), expected, rtol=1e-4, atol=1e-6)


def test_training_changes_embeddings_and_concentration_and_never_the_prototypes(head):
    before, x = head.prototypes.clone(), torch.randn(5, 4, requires_grad=True)
    for training, labels in ((True, None), (False, None), (False, LABELS)):
        head.train(training)(x, labels)
        assert head.class_concentration == 10.0
    logits = sum(head.train()(x, LABELS).logits for _ in range(5))
    logits.sum().backward()  # after other batches, which change the concentration
    assert x.grad.isfinite().all()
    assert x.grad.abs().sum() > 0
    assert head.class_concentration != 10.0
    assert torch.equal(head.prototypes, before)
    assert not head.prototypes.requires_grad
    assert not head.class_concentration.requires_grad
    assert list(head.parameters()) == []


def test_prototypes_match_the_placement_can_be_set_to_one_and_are_saved(head):
    expected = place_prototypes(9, 3, method="lbfgs", seed=3).prototypes
    torch.testing.assert_close(build_head("prototype", 3, 9, method="lbfgs", seed=3).prototypes, expected.float())
    placement = place_prototypes(7, 4, method="sgd", max_iterations=5)
    head.set_prototypes(placement)
    torch.testing.assert_close(head.prototypes, placement.prototypes.float())
    head(torch.randn(5, 4), LABELS)
    loaded = build_head("prototype", 4, 7)
    loaded.load_state_dict(head.state_dict())
    assert torch.equal(loaded.prototypes, head.prototypes)
    assert torch.equal(loaded.class_concentration, head.class_concentration)
    assert "4 -> 7 classes, method='auto', seed=0, reduction='mean'" in repr(head)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_set_prototypes_normalizes_and_resets_the_concentration(head, scale):
    points = torch.randn(7, 4, dtype=torch.float64)
    head(torch.randn(5, 4), LABELS)
    head.set_prototypes(scale * points)
    torch.testing.assert_close(head.prototypes, F.normalize(points, dim=1).float())
    assert head.class_concentration == 10.0


def cross_entropy(concentration, head, x, labels):
    """Cross-entropy of the vMF posterior in float64, with one label in a thousand replaced by a random class."""
    logs = (concentration * cosines(x, head.prototypes)).log_softmax(1)
    return -(0.999 * logs[torch.arange(len(x)), labels] + 0.001 * logs.mean(1)).mean()


def noisy(head, count, noise):
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(7, (count,), generator=generator)
    return head.prototypes[labels] + noise * torch.randn(count, 4, generator=generator), labels


def fit_concentration(head, x, labels):
    """Update the concentration from the same images until it has converged."""
    with torch.no_grad():
        points = head.transform(x)
        for _ in range(2000):
            head.update_statistics(head.measure(points, labels))


@pytest.mark.parametrize("noise", [0.05, 0.3, 2.0])
def test_fitted_concentration_minimizes_the_cross_entropy(head, noise):
    x, labels = noisy(head, 500, noise)
    fit_concentration(head, x, labels)
    best = head.class_concentration.double()
    losses = [cross_entropy(factor * best, head, x, labels) for factor in (0.97, 1.0, 1.03)]
    assert losses[1] == min(losses)
    fit_concentration(head, head.prototypes, torch.arange(7))  # finite also without errors
    assert 5.0 < head.class_concentration.item() < 20.0


def test_concentration_converges_to_the_fitted_one_in_training(head):
    other = build_head("prototype", 4, 7)
    x, labels = noisy(head, 3000, 0.4)
    fit_concentration(other, x, labels)
    for start in range(0, 3000, 30):
        head(x[start : start + 30], labels[start : start + 30])
    assert head.class_concentration.item() == pytest.approx(other.class_concentration.item(), rel=0.1)


@pytest.mark.parametrize("x", [torch.randn(0, 4), torch.full((1, 4), float("nan")), torch.full((1, 4), float("inf"))])
def test_empty_or_nonfinite_batch_leaves_the_concentration_unchanged(head, x):
    head(x, LABELS[: len(x)])
    assert head.class_concentration == 10.0


@pytest.fixture
def placed(monkeypatch):
    """Record placements, starting with an empty cache."""
    calls = []
    record = functools.lru_cache(lambda *a, **k: calls.append(a) or place_prototypes(*a, **k))
    monkeypatch.setattr(prototype, "_place", record)
    return calls


def test_placements_are_cached_by_seed_and_not_shared(placed):
    first, second = build_head("prototype", 3, 8), build_head("prototype", 3, 8)
    assert placed == [(8, 3)]
    assert torch.equal(first.prototypes, second.prototypes)
    first.prototypes.zero_()
    assert second.prototypes.norm(dim=1).min() > 0.9
    assert build_head("prototype", 3, 8).prototypes.norm(dim=1).min() > 0.9
    build_head("prototype", 3, 8, seed=1)
    assert len(placed) == 2


def test_meta_device_skips_placement_and_its_heads_can_be_reset_also_in_inference_mode(placed):
    with torch.device("meta"):
        build_head("prototype", 512, 100_000)
        head = build_head("prototype", 3, 8)
    assert placed == []
    with torch.inference_mode():
        expected = build_head("prototype", 3, 8).prototypes
    head = head.to_empty(device="cpu")
    head.reset_parameters()
    assert torch.equal(head.prototypes, expected)
    x = torch.randn(2, 3, requires_grad=True)
    build_head("prototype", 3, 8)(x, torch.tensor([0, 7])).loss.backward()
    assert x.grad.isfinite().all()


def in_parts(head, x, labels, parts):
    """Train on parts of a batch in one optimizer step."""
    for some in torch.arange(len(x)).split(parts):
        head.before_forward(0, some)
        head(x[some], labels[some])


def test_steps_on_parts_of_a_batch_and_processes_change_the_concentration_like_the_full_batch(head):
    other, elsewhere = build_head("prototype", 4, 7).double(), build_head("prototype", 4, 7).double()
    x, labels = noisy(head, 9, 0.4)
    head, x = head.double(), x.double()
    for _ in range(2):  # each with its own batches only
        before = head.class_concentration.clone()
        other(x, labels)
        in_parts(head, x[:7], labels[:7], [4, 3])
        elsewhere.class_concentration.copy_(before)
        in_parts(elsewhere, x[7:], labels[7:], 2)
        assert head.class_concentration == before
        head.after_step(lambda values: values + elsewhere._sums)  # a sum over processes
        elsewhere.after_step(lambda values: values)
        torch.testing.assert_close(head.class_concentration, other.class_concentration)


def test_per_example_vmap_losses_sum_to_the_batch_loss():
    head, x = build_head("prototype", 4, 7, reduction="sum").train(), torch.randn(5, 4)
    losses = torch.func.vmap(lambda one, label: head(one[None], label[None]).loss)(x, LABELS)
    assert head.class_concentration == 10.0
    torch.testing.assert_close(losses.sum(), head(x, LABELS).loss)
