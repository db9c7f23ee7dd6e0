import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.nn import Head, build_head

LABELS = torch.tensor([0, 3, 1, 2, 3])
CURVATURES = pytest.mark.parametrize("curvature", [1e-5, 0.1, 1.0, 4.0])


def make(curvature: float = 1.0, dim: int = 6, classes: int = 4, **options) -> Head:
    return build_head("hyperbolic", dim, classes, curvature=curvature, **options)


def embeddings(curvature: float, count: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    """Embeddings with norms of up to three radii of the ball; beyond 3.8 the head clips at the boundary."""
    lengths = torch.linspace(0.1, 3.0, count, dtype=dtype) / math.sqrt(max(curvature, 0.1))
    return lengths[:, None] * F.normalize(torch.randn(count, 6, dtype=dtype), dim=-1)


def into_ball(vectors: Tensor, c: float) -> Tensor:
    """Exponential map at the center."""
    scaled = math.sqrt(c) * vectors.norm(dim=-1, keepdim=True)
    return scaled.tanh() / scaled * vectors


def moebius_sum(x: Tensor, y: Tensor, c: float) -> Tensor:
    xy, xx, yy = (x * y).sum(-1, keepdim=True), x.square().sum(-1, keepdim=True), y.square().sum(-1, keepdim=True)
    return ((1 + 2 * c * xy + c * yy) * x + (1 - c * xx) * y) / (1 + 2 * c * xy + c**2 * xx * yy)


def plain_logits(x: Tensor, head: Head) -> Tensor:
    """Equation 25 of Ganea et al. in float64, with normals transported from the center to the points.

    |a| lambda_p / 2 is the norm of the normal at the center, so a distance is multiplied by twice that norm.
    """
    c, root = head.curvature, math.sqrt(head.curvature)
    x = into_ball(x.double(), c)
    offsets, normals = into_ball(head.offsets.detach().double(), c), head.weight.detach().double()
    moved = moebius_sum(-offsets, x[:, None], c)
    lengths = normals.norm(dim=-1)
    inner = 2 * root * (moved * normals).sum(-1) / ((1 - c * moved.square().sum(-1)) * lengths)
    return 2 * lengths / root * inner.asinh()


@CURVATURES
def test_logits_and_their_cross_entropy_match_the_formula_also_in_float32(curvature):
    head, x = make(curvature).double(), embeddings(curvature)
    torch.testing.assert_close(head(x).logits, plain_logits(x, head), rtol=1e-9, atol=1e-9)
    head, x = make(curvature), embeddings(curvature, 50, torch.float32)
    torch.testing.assert_close(head(x).logits.double(), plain_logits(x, head), rtol=1e-4, atol=1e-4)
    expected = F.cross_entropy(plain_logits(x[:5], head), LABELS)
    torch.testing.assert_close(head(x[:5], LABELS).loss.double(), expected, rtol=1e-4, atol=1e-4)


def test_zero_curvature_limit_is_a_linear_classifier():
    """asinh(r) is r and the conformal factor at the center is 2, so the logit reduces to 4 <x - p, a>."""
    head, x = make(1e-12).double(), torch.randn(5, 6, dtype=torch.float64)
    linear = 4 * ((x[:, None] - head.offsets) * head.weight).sum(-1)
    torch.testing.assert_close(head(x).logits, linear, rtol=1e-6, atol=1e-6)


def test_logit_is_a_signed_hyperbolic_distance_to_the_hyperplane_and_directions_are_its_normals():
    head = make().double()
    assert head.metric() == {"distance": "hyperbolic", "curvature": 1.0}
    torch.testing.assert_close(head.directions(), F.normalize(head.weight.detach(), dim=-1))
    torch.testing.assert_close(head(head.offsets).logits.diag(), torch.zeros(4, dtype=torch.float64))
    assert (head(head.offsets + 0.1 * head.weight).logits.diag() > 0).all()
    assert (head(head.offsets - 0.1 * head.weight).logits.diag() < 0).all()


@CURVATURES
def test_gradients_pass_gradcheck(curvature):
    head, x = make(curvature).double(), embeddings(curvature)
    inputs = [x.requires_grad_(), head.weight, head.offsets]
    assert torch.autograd.gradcheck(lambda x, *_: head(x).logits, inputs)


@CURVATURES
@pytest.mark.parametrize("length", [0.0, 1e-30, 1e-6, 1.0, 1e3, 1e6, 1e15])
def test_points_lie_inside_the_ball_and_logits_and_gradients_stay_finite(length, curvature):
    head, axes = make(curvature), F.normalize(torch.randn(5, 6), dim=-1)
    x = (length * axes).requires_grad_()
    output = head(x, LABELS)
    output.loss.backward()
    points = output.embeddings
    assert (points.norm(dim=-1) * math.sqrt(curvature) < 0.9995).all()
    torch.testing.assert_close(points, points.norm(dim=-1, keepdim=True) * axes)
    assert output.logits.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in (x.grad, head.weight.grad, head.offsets.grad))
    assert x.grad.abs().max() < 100
    head.zero_grad()
    head.offsets.data *= length
    head(torch.randn(5, 6), LABELS).loss.backward()
    assert all(gradient.isfinite().all() for gradient in (head.weight.grad, head.offsets.grad))


def test_zero_embedding_has_the_gradient_of_the_formula():
    """The map into the ball is 0 / 0 at the origin, where its derivative is 1."""
    head = make().double()
    zero, near = (torch.full((5, 6), value, dtype=torch.float64, requires_grad=True) for value in (0.0, 1e-7))
    head(zero, LABELS).loss.backward()
    F.cross_entropy(plain_logits(near, head), LABELS).backward()
    torch.testing.assert_close(zero.grad, near.grad, rtol=0, atol=1e-6)
