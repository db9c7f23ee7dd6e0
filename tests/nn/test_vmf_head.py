import math

import pytest
import torch
import torch.nn.functional as F
from case_selection import some_rows
from torch import Tensor

from hf_sphere import SphereVisionConfig, SphereVisionForImageClassification
from hf_sphere.geometry import log_vmf_normalizer, mean_resultant_length, sampling
from hf_sphere.geometry.sampling import keyed_integers
from hf_sphere.nn import Head, VMFHead, build_head
from hf_sphere.nn.heads.vmf import find_confidence

LABELS = torch.tensor([0, 3, 1, 2, 3])


def make(dim: int = 6, classes: int = 4, **options) -> Head:
    return build_head("vmf", dim, classes, **{"log_temperature": 0.0, "kappa_confidence": 0.4, **options})


def spread(count: int, dim: int, concentration: float) -> Tensor:
    """Embeddings with random directions and a common concentration."""
    return concentration * F.normalize(torch.randn(count, dim), dim=-1)


def draw_in_three_dimensions(vectors: Tensor, count: int, seed: int = 0) -> Tensor:
    """Samples (count, N, 3) of vMF distributions (N, 3), drawn by inverting the distribution function."""
    generator = torch.Generator().manual_seed(seed)
    kappa = vectors.norm(dim=-1)
    mean = vectors / kappa[:, None]
    uniform = torch.rand(count, len(vectors), dtype=torch.float64, generator=generator)
    cosine = 1 + (uniform + (1 - uniform) * (-2 * kappa).exp()).log() / kappa
    around = torch.randn(count, *vectors.shape, dtype=torch.float64, generator=generator)
    across = F.normalize(around - (around * mean).sum(-1, keepdim=True) * mean, dim=-1)
    return cosine[..., None] * mean + (1 - cosine.square()).clamp_min(0).sqrt()[..., None] * across


# The loss


def given(points: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decompose one point (B, d) per embedding into direction, cosine, sine and tangents, as drawn by the head."""
    direction = F.normalize(at, dim=-1)
    cosine = (points * direction).sum(-1)
    across = points - cosine[:, None] * direction
    return direction, cosine[None], across.norm(dim=-1)[None], F.normalize(across, dim=-1)[None]


@pytest.mark.parametrize("case", ["case0", "case1", "case2"])
def test_loss_for_fixed_samples_matches_the_reference(case, golden, monkeypatch):
    values = golden("vmf_softmax_loss")
    z, weights, samples, labels, expected = (
        values[f"{case}.{name}"] for name in ("z", "class_weights", "samples", "labels", "per_example_loss")
    )
    head = make(z.shape[1], len(weights), log_temperature=values.cases[case]["log_temperature"]).double()
    head.weight.data = weights

    def loss_of(index: int, sample: int) -> float:
        drawn = given(samples[[index], sample], z[[index]])
        monkeypatch.setattr(head, "_draw", lambda points, keys: drawn)
        return head(z[[index]], labels[[index]]).loss.item()

    count = samples.shape[1]
    losses = [sum(loss_of(index, sample) for sample in range(count)) / count for index in range(len(z))]
    assert losses == pytest.approx(expected.tolist(), abs=1e-6)
    assert sum(losses) / len(losses) == pytest.approx(values.cases[case]["loss"], abs=1e-6)


def integrated_loss(kappa: Tensor, weights: Tensor, beta: Tensor) -> Tensor:
    """Expected loss of an embedding of the first class with concentration kappa, in three dimensions.

    All class vectors lie on the axis of the embedding with signed lengths, so the integral over the sphere reduces to
    an integral over the cosine t to the axis, with density kappa exp(kappa t) / (2 sinh(kappa)).
    """
    t = torch.linspace(-1, 1, 20_001, dtype=torch.float64)
    together = (weights.square() + beta.square() + 2 * beta * weights * t[:, None]).sqrt()
    terms = (log_vmf_normalizer(weights.abs(), 3) - log_vmf_normalizer(together, 3)).logsumexp(1)
    total = torch.trapezoid(terms * kappa * (kappa * t).exp() / (2 * kappa.sinh()), t)
    means = (1 / x.tanh() - 1 / x for x in (kappa, weights[0]))
    return total - beta * math.prod(means)


class TestInExpectation:
    """Value and gradients of the loss as an integral over the sphere."""

    @pytest.fixture(
        params=[(40_000, 1, False), (40_000, 1, True), (1, 30_000, True), (3, 10_000, True)],
        ids=["prediction", "many points", "one point of many", "three points of many"],
    )
    def sampled(self, request) -> tuple[Tensor, list[Tensor]]:
        """Loss of the head and gradients with respect to embedding norm, class norms and beta."""
        num_samples, batch, training = request.param
        axis = F.normalize(torch.randn(3, dtype=torch.float64), dim=0)
        # Use means, as prediction with this many samples is slow; the loss is the same.
        head = make(3, 3, log_temperature=-math.log(3.0), num_samples=num_samples, prediction="mean").double()
        head.train(training)
        head.weight.data = torch.tensor([6.0, -2.0, 1.0], dtype=torch.float64)[:, None] * axis
        z = (4.0 * axis)[None].requires_grad_()
        loss = head(z.expand(batch, 3), torch.zeros(batch, dtype=torch.long)).loss
        loss.backward()
        by_beta = -head.log_temperature.grad / 3.0
        return loss.detach(), [z.grad[0] @ axis, head.weight.grad @ axis, by_beta]

    def test_loss_and_gradient_match_the_integral(self, sampled):
        inputs = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (4.0, [6.0, -2.0, 1.0], 3.0)]
        value = integrated_loss(*inputs)
        value.backward()
        integral = value.detach(), [x.grad for x in inputs]
        torch.testing.assert_close(sampled[0], integral[0], rtol=0, atol=0.01)
        for found, expected in zip(sampled[1], integral[1], strict=True):
            torch.testing.assert_close(found, expected, rtol=0.03, atol=3e-3)


def test_loss_bounds_the_expected_cross_entropy_from_above():
    head = make(3, 4, log_temperature=-2.0, num_samples=2000).double().eval()
    z = 3 * torch.randn(5, 3, dtype=torch.float64)
    head.weight.data *= 2
    with torch.no_grad():
        points, classes = (draw_in_three_dimensions(of, 4000, seed) for seed, of in enumerate((z, head.weight)))
        logits = math.exp(2.0) * torch.einsum("snd,skd->snk", points, classes)
        expected = F.cross_entropy(logits.flatten(0, 1), LABELS.repeat(4000))
        assert expected < head(z, LABELS).loss < 2 * expected


# Samples by place


PLACES = torch.arange(5)


def announced_loss(head: Head, z: Tensor, *, seed: int = 1, places: Tensor = PLACES) -> Tensor:
    head.before_forward(seed, places)
    return head(z, LABELS[: len(z)]).loss


def test_announced_samples_are_reproducible_once_and_others_are_of_the_global_generator():
    head, z = make(), spread(5, 6, 4.0)
    before = torch.get_rng_state()
    first = announced_loss(head, z)
    assert torch.equal(announced_loss(head, z), first)
    assert torch.equal(torch.get_rng_state(), before)
    resampled = [head(z, LABELS).loss for _ in range(2)]
    torch.set_rng_state(before)
    assert torch.equal(head(z, LABELS).loss, resampled[0])
    assert len({first.item(), *(loss.item() for loss in resampled)}) == 3


def test_another_seed_or_place_gives_other_samples():
    head, z = make(), spread(1, 6, 4.0).expand(5, 6)
    for other in ({"seed": 2}, {"places": torch.arange(1, 6)}):
        assert not torch.equal(announced_loss(head, z), announced_loss(head, z, **other))
    _, cosine, _, tangents = head._draw(z, keyed_integers(1, PLACES))
    assert len(cosine[0].unique()) == len(tangents[0, :, 0].unique()) == 5


def test_loss_of_a_batch_is_the_mean_over_its_parts_at_the_same_places():
    head, z = make().double(), spread(5, 6, 4.0).double()
    whole = announced_loss(head, z)
    parts = []
    for some in ([4], [0, 2], [1, 3]):
        head.before_forward(1, PLACES[some])
        parts.append(len(some) * head(z[some], LABELS[some]).loss)
    torch.testing.assert_close(sum(parts) / 5, whole)


def test_places_of_another_number_of_examples_are_not_used():
    """A model may pass two views of each image to its head."""
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        losses.append(announced_loss(make(), spread(5, 6, 4.0), places=torch.arange(3)))
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


@pytest.mark.slow
def test_inductor_draws_the_same_samples():
    head, z = make(), spread(5, 6, 4.0)
    torch.compiler.reset()
    compiled = torch.compile(head._draw, fullgraph=True)
    for seed in range(2):
        keys = keyed_integers(seed, PLACES)
        torch.testing.assert_close(compiled(z, keys), head._draw(z, keys), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("concentration", [0.0, 1e-6, 1e2, 1e6])
@pytest.mark.parametrize("training", [True, False])
def test_embeddings_of_any_norm_have_a_finite_loss_and_gradient(training, concentration):
    head, z = make(log_temperature=-5.0).train(training), spread(5, 6, concentration).requires_grad_()
    output = head(z, LABELS)
    output.loss.backward()
    assert all(value.isfinite().all() for value in (output.loss, output.logits, z.grad, head.weight.grad))


# Prediction


@pytest.mark.parametrize("limit", [1, 4 * 102 * 3])
def test_predictions_do_not_depend_on_the_samples_of_the_classes_at_once(limit, monkeypatch):
    head, z = make().eval(), spread(5, 6, 4.0)
    expected = head(z).logits
    monkeypatch.setattr(sampling, "LARGEST_CACHED_NOISE", limit)
    torch.testing.assert_close(head(z).logits, expected)


@pytest.mark.parametrize("chosen", [[2], [4, 0], [4, 3, 2, 1, 0], [1, 1, 1, 1]])
def test_eval_predictions_and_losses_do_not_depend_on_the_batch(chosen):
    head, z = make(num_samples=50).eval(), spread(5, 6, 4.0)
    before = torch.get_rng_state()
    torch.testing.assert_close(head(z[chosen]).logits, head(z).logits[chosen])
    torch.testing.assert_close(head(z).logits.exp().sum(-1), torch.ones(5))
    assert torch.equal(torch.get_rng_state(), before)
    alone = [head(z[[index]], LABELS[[index]]).loss for index in chosen]
    torch.testing.assert_close(head(z[chosen], LABELS[chosen]).loss, torch.stack(alone).mean())


def test_eval_probabilities_are_the_mean_softmax_over_samples():
    head = make(3, 4, log_temperature=-1.5, num_samples=5_000).double().eval()
    head.weight.data *= torch.tensor([1.0, 2.0, 5.0, 20.0])[:, None]
    z = torch.randn(5, 3, dtype=torch.float64) * torch.tensor([0.1, 1.0, 3.0, 10.0, 100.0])[:, None]
    with torch.no_grad():
        points, classes = (draw_in_three_dimensions(of, 20_000, seed) for seed, of in enumerate((z, head.weight)))
        expected = (math.exp(1.5) * torch.einsum("snd,skd->snk", points, classes)).softmax(-1).mean(0)
        torch.testing.assert_close(head(z).logits.exp(), expected, rtol=0, atol=0.02)


@pytest.mark.parametrize(("training", "prediction"), [(True, "samples"), (True, "mean"), (False, "mean")])
def test_mean_logits_are_the_cosine_times_the_resultant_lengths(training, prediction):
    head, z = make(log_temperature=-2.0, prediction=prediction).train(training), spread(5, 6, 4.0)
    cosine = F.normalize(z, dim=-1) @ F.normalize(head.weight, dim=-1).T
    lengths = mean_resultant_length(z.norm(dim=-1), 6)[:, None] * mean_resultant_length(head.weight.norm(dim=-1), 6)
    torch.testing.assert_close(head(z).logits, math.exp(2.0) * cosine * lengths)


@pytest.mark.parametrize("prediction", ["samples", "mean"])
def test_prediction_is_the_class_of_the_nearest_direction_with_a_confidence_that_grows_with_the_norm(prediction):
    head = make(8, 5, num_samples=200, log_temperature=-2.0, kappa_confidence=0.9, prediction=prediction).eval()
    assert head(50 * head.directions()).logits.argmax(-1).tolist() == list(range(5))
    for axis in head.directions():
        lengths = torch.tensor([0.1, 4.0, 16.0, 64.0])
        confidence = head(lengths[:, None] * axis).logits.softmax(-1).amax(-1)
        assert (confidence.diff() > 0).all()
        assert confidence[0] < 0.35  # of five classes
    assert "6 -> 4 classes, num_samples=10, kappa_confidence=0.4, prediction='samples'" in repr(make())


# Initialization


@pytest.mark.parametrize("dim", [2, 16, 128, 512])
@pytest.mark.parametrize("confidence", [0.1, 0.4, 0.7, 0.9])
def test_initial_confidence_sets_the_class_weight_norms_and_so_the_mean_cosine(confidence, dim):
    head = make(dim, 20, kappa_confidence=confidence)
    expected = confidence * (dim - 1) / (1 - confidence**2)
    assert head.initial_concentration == pytest.approx(expected)
    torch.testing.assert_close(head.weight.norm(dim=-1), torch.full((20,), expected))
    if dim >= 128:
        assert mean_resultant_length(torch.tensor(expected), dim).item() == pytest.approx(confidence, rel=0.02)


@some_rows("classes")
@pytest.mark.parametrize(("classes", "dim"), [(8, 256), (100, 128), (500, 512)])
def test_the_automatic_confidence_allows_confident_predictions(classes, dim):
    head = make(dim, classes, kappa_confidence="auto", log_temperature=-2.773, num_samples=200).eval()
    head.initialize_from_data(torch.randn(100, dim))
    embeddings = head.weight[:4].detach() / head.embedding_scale
    right = head(embeddings).logits.softmax(-1)[range(4), range(4)]
    assert right.min() > 0.9
    weaker = make(dim, classes, kappa_confidence=0.6 * head.kappa_confidence, log_temperature=-2.773).eval()
    weaker.initialize_from_data(torch.randn(100, dim))
    assert weaker(weaker.weight[:4].detach() / weaker.embedding_scale).logits.softmax(-1).max() < 0.9


def test_the_automatic_confidence_is_that_of_the_formula_within_limits():
    assert find_confidence(8, -math.log(16)) == pytest.approx(math.sqrt(math.log(7 * 9_999) / 16))
    assert (find_confidence(2, -5.0), find_confidence(10**7, -2.773)) == (0.4, 0.95)


def test_a_trained_head_is_loaded_with_its_scale(tmp_path):
    config = SphereVisionConfig(
        backbone="linear_embedding", backbone_kwargs={"width": 4}, num_channels=1, image_size=2, embedding_dim=3,
        head="vmf", num_labels=4, value_range=[0.0, 1.0],
    )  # fmt: skip
    model = SphereVisionForImageClassification(config).eval()
    model.head.initialize_from_data(5 * torch.randn(50, 3))
    model.save_pretrained(tmp_path)
    loaded = SphereVisionForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(loaded.head.embedding_scale, model.head.embedding_scale)
    assert loaded.head.embedding_scale != 1.0
    output = model(torch.randn(3, 1, 2, 2))
    torch.testing.assert_close(output.concentration, output.embeddings.norm(dim=-1))


def test_the_gradient_of_a_zero_embedding_is_that_of_a_short_one():
    head = build_head("vmf", 6, 4, num_samples=20_000)
    head.initialize_from_data(torch.randn(50, 6))
    gradients = []
    for length in (0.0, 0.1):
        z = (length * F.normalize(torch.randn(20, 6), dim=-1)).requires_grad_()
        head(z, torch.zeros(20, dtype=torch.long)).loss.backward()
        gradients.append(20 * z.grad.mean(dim=0))
    torch.testing.assert_close(*gradients, rtol=0.1, atol=0.3)


@pytest.mark.parametrize("scale", [1e-37, 1e-3, 1.0, 1e3, 1e36])
@pytest.mark.parametrize("dim", [16, 512])
def test_initialization_from_data_gives_embeddings_the_initial_concentration_until_a_reset(dim, scale):
    """The norm of Gaussian coordinates is sqrt(pi / 2) times that of constants of the same mean absolute value."""
    head, z = make(dim, 3), scale * torch.randn(2000, dim)
    for _ in range(2):
        head.initialize_from_data(z)
        size = (head.embedding_scale * z).abs().mean().item()
        assert size * dim**0.5 == pytest.approx(head.initial_concentration)
        output = head(z)
        torch.testing.assert_close(output.concentration, output.embeddings.norm(dim=-1))
        ratio = output.concentration.mean().item() / head.initial_concentration
        assert ratio == pytest.approx(math.sqrt(math.pi / 2), rel=0.03)
    assert head(z[:8], torch.arange(8) % 3).loss.isfinite()
    head.log_temperature.data.fill_(3.0)
    head.reset_parameters()
    assert (head.embedding_scale, head.log_temperature, head.needs_data_initialization) == (1.0, 0.0, True)


@pytest.mark.parametrize("size", [0.0, 1e-39, 1e-40, 1e-42, 1e-44, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_embeddings_whose_scale_would_not_be_finite_are_rejected_without_changes(size, dtype):
    head = make()
    with pytest.raises(ValueError, match=r"embeddings with a mean absolute value of \S+ cannot be scaled"):
        head.initialize_from_data(torch.full((4, 6), size, dtype=dtype))
    assert head.embedding_scale == 1.0


# Validation and printing


def test_training_without_data_dependent_initialization_warns_once(caplog):
    head, x, labels = make(), torch.randn(8, 6), torch.arange(8) % 4
    head.eval()(x)
    initialized = make()
    initialized.initialize_from_data(torch.randn(100, 6))
    assert not initialized.needs_data_initialization
    initialized(x, labels)
    assert not caplog.records
    for _ in range(2):
        head.train()(x, labels)
    assert ["initialize_from_data" in record.message for record in caplog.records] == [True]


class _OtherLogits(VMFHead):
    def compute_logits(self, embeddings):
        return super().compute_logits(embeddings) + 5.0


class _OtherLoss(VMFHead):
    def loss_in_blocks(self, embeddings, labels):
        return super().loss_in_blocks(embeddings, labels)


@pytest.mark.parametrize("head", [_OtherLogits, _OtherLoss])
def test_subclasses_keep_the_loss(head):
    losses = []
    for each in (VMFHead, head):
        torch.manual_seed(0)
        losses.append(each(6, 4)(torch.randn(5, 6), LABELS).loss)
    torch.testing.assert_close(*losses)
