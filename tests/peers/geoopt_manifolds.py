"""Generic tests of manifolds, after what geoopt promises of every one of its `Manifold`, run on our geometry.

geoopt's tests are in neither of its distributions, so that they are written here, with the checks, optimizers and
compositions that it installs. geoopt's own sphere takes them too, which shows that the tests are right.
"""

from typing import Any

import geoopt
import pytest
import torch
from torch import Tensor

from hf_sphere import geometry

NOT_APPLICABLE = {"test_step_is_undone_by_the_opposite_step[*-geoopt]": "geoopt transports by projections"}


class OurSphere(geoopt.Sphere):
    """geoopt's interface, with our functions for all but the inner product and the checks."""

    def projx(self, x: Tensor) -> Tensor:
        return geometry.project_to_sphere(x)

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        return geometry.project_to_tangent(x, u)

    egrad2rgrad = proju

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        return geometry.exp_map(x, u)

    retr = expmap

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        return geometry.log_map(x, y)

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return geometry.parallel_transport(x, y, v)

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        distance = geometry.geodesic_distance(x, y)
        return distance[..., None] if keepdim else distance


@pytest.fixture(params=[OurSphere, geoopt.SphereExact], ids=["ours", "geoopt"])
def manifold(request: Any) -> Any:
    return request.param()


@pytest.fixture(params=[(torch.float64, 3), (torch.float64, 10), (torch.float32, 2), (torch.float32, 50)], ids=str)
def case(request: Any, manifold: Any) -> tuple[Any, Tensor, Tensor, Tensor, Tensor]:
    """A manifold, four points, and two tangents and a vector at each."""
    dtype, dim = request.param
    vectors = torch.randn(4, 4, dim, dtype=dtype, generator=torch.Generator().manual_seed(2))
    x = vectors[0] / torch.linalg.vector_norm(vectors[0], dim=-1, keepdim=True)
    u, v = (vector - (vector * x).sum(-1, keepdim=True) * x for vector in vectors[1:3])
    return manifold, x, u / 3, v, vectors[3]


def assert_close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_projected_vector_is_the_nearest_point(case: Any) -> None:
    manifold, x, _, _, vector = case
    manifold.assert_check_point_on_manifold(manifold.projx(vector))
    assert_close(manifold.projx(3 * x), x)
    assert_close(manifold.projx(manifold.projx(vector)), manifold.projx(vector))


def test_projected_vector_is_the_nearest_tangent(case: Any) -> None:
    manifold, x, u, _, vector = case
    manifold.assert_check_vector_on_tangent(x, manifold.proju(x, vector))
    assert_close(manifold.proju(x, u), u)
    assert_close(manifold.inner(x, u, manifold.proju(x, vector)), manifold.inner(x, u, vector))


@pytest.mark.parametrize("method", ["expmap", "retr", "logmap", "proju", "dist", "transp", "transp_follow_retr"])
def test_batch_is_computed_point_by_point(case: Any, method: str) -> None:
    manifold, x, u, v, _ = case
    y = manifold.expmap(x, v)
    function = getattr(manifold, method)
    arguments = {"transp": (x, y, v), "transp_follow_retr": (x, u, v), "logmap": (x, y), "dist": (x, y)}.get(
        method, (x, u)
    )
    assert_close(function(*arguments), torch.stack([function(*one) for one in zip(*arguments, strict=True)]))
    first = [arguments[0][:1], *arguments[1:]]  # leading axes broadcast
    expected = [function(x[0], *rest) for rest in zip(*arguments[1:], strict=True)]
    assert_close(function(*first), torch.stack(expected))


@pytest.mark.parametrize("method", ["expmap", "retr"])
def test_step_ends_on_the_manifold_and_transports_to_its_tangents(case: Any, method: str) -> None:
    manifold, x, u, v, _ = case
    end, transported = getattr(manifold, f"{method}_transp")(x, u, v)
    manifold.assert_check_point_on_manifold(end)
    manifold.assert_check_vector_on_tangent(end, transported)
    assert_close(end, getattr(manifold, method)(x, u))
    assert_close(transported, getattr(manifold, f"transp_follow_{method}")(x, u, v))


def test_step_is_undone_by_the_opposite_step(case: Any) -> None:
    manifold, x, u, _, _ = case
    end, transported = manifold.retr_transp(x, u, u)
    start, returned = manifold.retr_transp(end, -transported, transported)
    assert_close(start, x)
    assert_close(returned, u)
    assert_close(manifold.norm(end, transported), manifold.norm(x, u))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (geoopt.optim.RiemannianSGD, {"lr": 0.1}),
        (geoopt.optim.RiemannianSGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
        (geoopt.optim.RiemannianAdam, {"lr": 0.05}),
        (geoopt.optim.RiemannianAdam, {"lr": 0.05, "amsgrad": True}),
    ],
)
def test_optimizer_of_geoopt_finds_the_leading_eigenvector(manifold: Any, kind: Any, options: dict[str, Any]) -> None:
    values = torch.diag(torch.arange(1.0, 6.0, dtype=torch.float64))
    start = manifold.projx(torch.ones(5, dtype=torch.float64))
    point = geoopt.ManifoldParameter(start, manifold=manifold)
    optimizer = kind([point], stabilize=10, **options)
    for _ in range(400):
        optimizer.zero_grad()
        (-point @ values @ point).backward()
        optimizer.step()
    manifold.assert_check_point_on_manifold(point.detach())
    torch.testing.assert_close(point.detach().abs(), torch.eye(5, dtype=torch.float64)[4], rtol=0, atol=1e-3)


def test_products_and_scalings_of_geoopt_accept_the_manifold(manifold: Any) -> None:
    product = geoopt.ProductManifold((manifold, 3), (geoopt.Scaled(manifold, 2.0), 4))
    x = product.projx(torch.randn(5, 7, dtype=torch.float64))
    u = product.proju(x, torch.randn(5, 7, dtype=torch.float64)) / 4
    product.assert_check_point_on_manifold(x)
    product.assert_check_vector_on_tangent(x, u)
    assert_close(product.logmap(x, product.expmap(x, u)), u)
    assert_close(product.dist(x, product.expmap(x, u)), torch.linalg.vector_norm(u, dim=-1))
