"""Heads of cosines: their margins and scales, and etf."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor

from hf_sphere.nn import CosFaceHead, Head, build_head
from hf_sphere.nn.heads.cosine import cosine_and_sine

LABELS = torch.tensor([0, 3, 1, 2, 3])
MARGIN_HEADS = ["arcface", "cosface", "subcenter_arcface", "adaface"]
COSINE_HEADS = [*MARGIN_HEADS, "proxy_anchor"]
LEARNED_OR_FIXED = pytest.mark.parametrize("name", ["cosine", "arcface"])


def unit(x: Tensor) -> Tensor:
    return x.double() / x.double().norm(dim=-1, keepdim=True)


def cosines_of(x: Tensor, head: Head) -> Tensor:
    """Cosines (B, K) in float64 by definition."""
    return unit(x) @ unit(head.weight.detach()).T


def cross_entropy(cosines: Tensor, own: Tensor, scale: float) -> Tensor:
    """Cross-entropy (B,) of scaled cosines whose entries of the own classes are replaced."""
    logits = cosines.clone()
    logits[torch.arange(len(own)), LABELS] = own
    return F.cross_entropy(scale * logits, LABELS)


def class_weights(head: Head) -> Tensor:
    """Weights (K, d), the first ones of heads with several per class."""
    weight = head.weight.detach()
    return weight[:, 0] if weight.ndim == 3 else weight


def near_classes(head: Head) -> Tensor:
    """Embeddings near the weights of their classes, so that no angle with a margin exceeds pi."""
    return 10 * (torch.randn(5, 6) + 2 * F.normalize(class_weights(head), dim=-1)[LABELS])


def arcface_loss(x: Tensor, head: Head, margin: float) -> Tensor:
    """Cross-entropy with cos(theta + m), computed from the angle."""
    cosines = cosines_of(x, head)
    return cross_entropy(cosines, (cosines[range(5), LABELS].acos() + margin).cos(), 64.0)


@pytest.mark.parametrize("options", [{}, {"margin": 0.0}, {"margin": 0.3}, {"margin": 1.2}], ids=str)
def test_arcface_adds_the_margin_to_the_angle_after_the_warmup(options):
    head, margin = build_head("arcface", 6, 4, margin_warmup_epochs=3, **options), options.get("margin", 0.5)
    x = near_classes(head)
    for epoch, expected in ((None, margin), (0, 0.0), (2, 0.0), (3, margin), (99, margin), (1, 0.0)):
        if epoch is not None:
            head.set_epoch(epoch)
        torch.testing.assert_close(head(x, LABELS).loss.double(), arcface_loss(x, head, expected), rtol=1e-5, atol=1e-5)


def arcface_at(angle: float, margin: float = 0.5) -> tuple[Tensor, Tensor]:
    """Loss of an embedding at an angle to its class, with two antipodal classes, and its angular derivative."""
    head = build_head("arcface", 3, 2, margin=margin, scale=1.0).double()
    head.weight.data = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]], dtype=torch.float64)
    x = torch.tensor([math.cos(angle), math.sin(angle), 0.0], dtype=torch.float64, requires_grad=True)
    towards = torch.tensor([-math.sin(angle), math.cos(angle), 0.0], dtype=torch.float64)
    loss = head(x[None], torch.tensor([0])).loss
    loss.backward()
    return loss.detach(), x.grad @ towards


def plain_slope(angle: float, margin: float) -> float:
    """Derivative of log(1 + exp(l - cos(theta + m))) with respect to theta; l = -cos(theta) is the other logit."""
    guarded = angle >= math.pi - margin
    own = math.cos(angle) - margin * math.sin(margin) if guarded else math.cos(angle + margin)
    by_angle = math.sin(angle) + (math.sin(angle) if guarded else math.sin(angle + margin))
    return by_angle / (1 + math.exp(own + math.cos(angle)))


@pytest.mark.parametrize("margin", [0.1, 0.5, 1.5])
@pytest.mark.parametrize("angle", [1e-6, 1e-3, 0.5, 1.5, 3.1, math.pi - 1e-3, math.pi - 1e-6])
def test_gradient_is_accurate_at_all_angles(angle, margin):
    assert arcface_at(angle, margin)[1].item() == pytest.approx(plain_slope(angle, margin), rel=1e-6, abs=1e-9)


@given(st.floats(0, math.pi), st.floats(0, math.pi), st.floats(0, math.pi / 2))
def test_loss_increases_with_the_angle(first, second, margin):
    near, far = sorted((first, second))
    assert arcface_at(near, margin)[0] <= arcface_at(far, margin)[0] + 1e-12


def test_cosface_subtracts_the_margin_from_the_cosine_at_any_precision():
    head = build_head("cosface", 6, 4)
    x = near_classes(head)
    cosines = cosines_of(x, head)
    expected = cross_entropy(cosines, cosines[range(5), LABELS] - 0.35, 64.0)
    for own, of in ((torch.float32, torch.float32), (torch.float32, torch.float64), (torch.float64, torch.float32)):
        loss = head.to(own)(x.to(of), LABELS).loss
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)


def test_subcenter_arcface_uses_the_nearest_weight_of_each_class():
    head = build_head("subcenter_arcface", 6, 4, sub_centers=3, margin=0.3, scale=20.0)
    x = near_classes(head)
    cosines = torch.einsum("bd,kcd->bkc", unit(x), unit(head.weight.detach())).amax(-1)
    expected = cross_entropy(cosines, (cosines[range(5), LABELS].acos() + 0.3).cos(), 20.0)
    output = head(x, LABELS)
    torch.testing.assert_close(output.logits.double(), 20 * cosines, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_loss_of_one_or_two_classes_is_that_of_their_logits():
    for classes, expected in ((1, 0.0), (2, math.log1p(math.exp(-math.cos(0.5))))):
        head = build_head("arcface", 3, classes, margin=0.5, scale=1.0)
        head.weight.data = torch.eye(3)[:classes]
        assert head(torch.eye(3)[:1], torch.tensor([0])).loss.item() == pytest.approx(expected)


def adaface_at(mean: float, std: float, **options) -> Head:
    head = build_head("adaface", 6, 4, **options).eval()
    head.norm_mean.fill_(mean)
    head.norm_std.fill_(std)
    return head


@pytest.mark.parametrize(("mean", "std"), [(30.0, 10.0), (1.0, 1.0), (500.0, 1.0)])
def test_adaface_has_the_margins_of_its_formula(mean, std):
    head = adaface_at(mean, std, scale=20.0)
    x = near_classes(head)
    cosines = cosines_of(x, head)
    quality = (0.333 * (x.double().norm(dim=-1) - mean) / (std + 1e-3)).clamp(-1, 1)
    angles = (cosines[range(5), LABELS].acos() - 0.4 * quality).clamp(0, math.pi)
    expected = cross_entropy(cosines, angles.cos() - 0.4 - 0.4 * quality, 20.0)
    loss = head(x.requires_grad_(), LABELS).loss
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    assert ((x.grad * x).sum(-1) / x.norm(dim=-1)).abs().max() < 1e-4 * x.grad.norm()  # none along the embedding


def test_adaface_limits_the_angle_at_both_ends():
    for norm, sign in ((1000.0, 1.0), (1e-3, -1.0)):  # theta - m below 0, and theta + m above pi
        head = adaface_at(20.0, 1.0, scale=1.0)
        x = sign * norm * unit(head.weight.detach())[:1].float()
        own = sign - 0.4 * (1 + sign)
        others = cosines_of(x, head)[0, 1:]
        expected = torch.cat([torch.tensor([own]).double(), others]).logsumexp(0) - own
        torch.testing.assert_close(head(x, torch.tensor([0])).loss.double(), expected, rtol=1e-5, atol=1e-6)


def test_adaface_keeps_the_norms_of_embeddings_and_averages_them():
    x = 20 * torch.randn(5, 6)
    output = build_head("adaface", 6, 4)(x)
    torch.testing.assert_close(output.embeddings, x)
    torch.testing.assert_close(output.concentration, x.norm(dim=-1))
    head, x = build_head("adaface", 6, 4), 20 * torch.randn(5, 6)
    head(x, LABELS)
    norms = x.norm(dim=-1)
    torch.testing.assert_close(head.norm_mean, 0.99 * 20 + 0.01 * norms.mean())
    torch.testing.assert_close(head.norm_std, 0.99 * 100 + 0.01 * norms.std())
    for labels in ([0, -100], [-100, -100]):  # which needs two examples
        head = build_head("adaface", 6, 4)
        head(torch.randn(2, 6), torch.tensor(labels))
        assert (head.norm_mean, head.norm_std) == (20.0, 100.0)


def test_adaface_statistics_do_not_depend_on_how_a_step_is_divided():
    x, labels, found = 20 * torch.randn(8, 6), torch.arange(8) % 4, []
    for sizes in ([8], [3, 1, 4]):
        head = build_head("adaface", 6, 4)
        for part, own in zip(x.split(sizes), labels.split(sizes), strict=True):
            head.before_forward(0, torch.arange(len(part)))
            head(part, own)
        assert head.norm_mean == 20.0  # until the end of the step
        head.after_step(lambda values: values)
        found.append((head.norm_mean, head.norm_std))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["cosine", *MARGIN_HEADS])
def test_without_a_margin_the_loss_is_the_cross_entropy_of_the_logits(name):
    head, x = build_head(name, 6, 4, **{} if name == "cosine" else {"margin": 0.0}), torch.randn(5, 6)
    output = head(x, LABELS)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, LABELS))


@pytest.mark.parametrize("name", COSINE_HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [1.0, -1.0, 0.0])
def test_embeddings_at_a_class_its_antipode_or_zero_have_finite_gradients(name, dtype, length):
    head = build_head(name, 6, 4)
    x = (length * class_weights(head)).to(dtype).requires_grad_()
    loss = head(x, torch.arange(4)).loss
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()
    assert head.weight.grad.isfinite().all()
    if name == "arcface" and length and dtype == torch.float32:
        # The angular derivative is bounded by the sum over the own and other classes, times scale and batch size.
        assert (4 * x.grad.norm(dim=-1) * x.detach().norm(dim=-1)).max() < 2.0 * 64


@pytest.mark.parametrize("name", ["cosine", *COSINE_HEADS])
def test_the_default_scale_is_that_of_the_paper_and_learned_by_cosine_or_if_requested(name):
    default, learned = build_head(name, 6, 4), build_head(name, 6, 4, scale="learned")
    assert ("log_temperature" in dict(default.named_parameters())) == (name == "cosine")
    assert "log_temperature" in dict(learned.named_parameters())
    assert build_head(name, 6, 4, log_temperature=-1.0).inverse_temperature().item() == pytest.approx(math.e)
    expected = {"proxy_anchor": 32, "cosine": math.exp(2.773)}.get(name, 64)
    for head in (default, learned):
        assert head.inverse_temperature().item() == pytest.approx(expected)
        assert ("log_temperature" in head.parameter_options()) == (head is learned or name == "cosine")
    learned.log_temperature.data.fill_(9.0)
    learned.reset_parameters()
    learned.bfloat16().inverse_temperature().backward()  # also in half precision
    assert learned.log_temperature.grad.item() == pytest.approx(-expected, rel=0.01)


@LEARNED_OR_FIXED
@pytest.mark.parametrize(("dtype", "digits"), [(torch.float64, 1e-15), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)])
def test_numeric_scale_multiplies_the_cosines_is_exact_after_a_conversion_saved_and_not_trained(name, dtype, digits):
    for scale in (10.0, 64.0, 7.3, 0.5):
        head, x = build_head(name, 6, 4, scale=scale), torch.randn(5, 6)
        assert [key for key, _ in head.named_parameters()] == ["weight"]
        for training in (False, True):  # without a margin
            found = head.train(training)(x, LABELS).logits.double()
            torch.testing.assert_close(found, scale * cosines_of(x, head), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(head(x).embeddings, F.normalize(x, dim=-1))
        other = build_head(name, 6, 4, scale=2.0).to(dtype)
        other.load_state_dict(head.state_dict())
        assert other.inverse_temperature().item() == pytest.approx(scale, rel=0.02 if dtype.itemsize < 4 else 1e-6)
        other.reset_parameters()
        assert other.inverse_temperature().item() == pytest.approx(2.0, rel=1e-6)
        assert head.to(dtype).inverse_temperature().item() == pytest.approx(scale, rel=digits)


def plain_proxy_anchor(cosines: Tensor, labels: Tensor, margin: float, scale: float) -> Tensor:
    """Loss by its formula, one proxy at a time."""
    attraction, repulsion = [], []
    for proxy in range(cosines.shape[1]):
        own, others = cosines[labels == proxy, proxy], cosines[(labels != proxy) & (labels >= 0), proxy]
        if len(own):
            attraction.append((1 + (-scale * (own - margin)).exp().sum()).log())
        repulsion.append((1 + (scale * (others + margin)).exp().sum()).log())
    return torch.stack(attraction).mean() + torch.stack(repulsion).mean()


@pytest.mark.parametrize("labels", [[0, 3, 1, 2, 3], [1, 1, 1, 1, 1], [0, -100, 2, 2, -100]])
def test_proxy_anchor_loss_is_that_of_its_formula(labels):
    head, x, labels = build_head("proxy_anchor", 6, 4), torch.randn(5, 6), torch.tensor(labels)
    expected = plain_proxy_anchor(cosines_of(x, head), labels, 0.1, 32.0)
    torch.testing.assert_close(head(x, labels).loss.double(), expected, rtol=1e-5, atol=1e-5)


def test_etf_classes_form_a_regular_simplex_and_its_loss_is_the_dot_regression():
    head, x = build_head("etf", 6, 7), torch.randn(5, 6)
    cosines = head.directions() @ head.directions().T
    torch.testing.assert_close(cosines, 7 / 6 * torch.eye(7) - 1 / 6, rtol=0, atol=1e-6)
    own = (F.normalize(x, dim=-1) * head.prototypes[LABELS]).sum(-1)
    torch.testing.assert_close(head(x, LABELS).loss, (0.5 * (own - 1) ** 2).mean())
    assert not list(head.parameters())


def test_the_formula_of_the_gradient_of_cosine_and_sine_is_right_on_devices():
    x, w = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def angle(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return cosine_and_sine.on_devices(F.normalize(x, dim=-1), F.normalize(w, dim=-1))

    assert torch.autograd.gradcheck(angle, (x, w), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(angle, (x, w))
    x = torch.tensor([[1.0, 0.0]], requires_grad=True)  # equal vectors
    (grad,) = torch.autograd.grad(cosine_and_sine.on_devices(x, torch.tensor([[1.0, 0.0]]))[1].sum(), x)
    assert torch.equal(grad, torch.zeros(1, 2))


class _DoubleMargin(CosFaceHead):
    def target_logits(self, embeddings, directions):
        return super().target_logits(embeddings, directions) - self.inverse_temperature() * self.active_margin


class _OppositeTarget(CosFaceHead):
    def target_directions(self, embeddings, labels):
        return -super().target_directions(embeddings, labels)


@pytest.mark.parametrize("head", [_DoubleMargin, _OppositeTarget])
def test_a_subclass_of_cosface_trains_with_its_own_target(head):
    embeddings, labels = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    head = head(4, 3)
    points = head.transform(embeddings)
    target = head.target_logits(points, head.target_directions(points, labels))
    logits = head(embeddings).logits.scatter(1, labels[:, None], target[:, None])
    torch.testing.assert_close(head(embeddings, labels).loss, F.cross_entropy(logits, labels))
