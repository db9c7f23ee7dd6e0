import math
import warnings

import mpmath
import pytest
import torch
from clustered import other_unit as unit
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from hf_sphere.geometry import (
    exp_map,
    frechet_mean,
    geodesic_distance,
    log_map,
    parallel_transport,
    project_to_sphere,
    project_to_tangent,
    random_rotation,
    slerp,
)
from hf_sphere.geometry.manifold import divide_by_norms

ANGLES = [1e-6, 1e-4, 1e-2, 0.03, 0.1, 1.0, math.pi / 2, 3.0, math.pi - 1e-3, math.pi - 1e-6]


def pair(angle: float, dim: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """A point, a unit tangent, and the point at a distance, rounded once from 40 digits."""
    point = unit(dim)
    tangent = project_to_sphere(project_to_tangent(point, unit(dim)))
    with mpmath.workdps(40):
        cosine, sine = mpmath.cos(angle), mpmath.sin(angle)
        other = [float(cosine * p + sine * t) for p, t in zip(point.tolist(), tangent.tolist(), strict=True)]
    return point, tangent, torch.tensor(other, dtype=torch.float64)


def exact_distance(x: Tensor, y: Tensor) -> float:
    with mpmath.workdps(40):
        a, b = ([mpmath.mpf(v) for v in z.tolist()] for z in (x, y))
        norm = mpmath.sqrt(mpmath.fdot(a, a) * mpmath.fdot(b, b))
        return float(mpmath.acos(mpmath.fdot(a, b) / norm))


@pytest.mark.parametrize("angle", ANGLES)
class TestAccuracy:
    def test_distances_and_both_maps_are_exact_and_slerp_divides_the_distance(self, angle):
        x, tangent, y = pair(angle)
        found, exact = geodesic_distance(x, y).item(), exact_distance(x, y)
        assert found == pytest.approx(exact, rel=1e-9)
        assert math.pi - found == pytest.approx(math.pi - exact, rel=1e-9)
        end = exp_map(x, angle * tangent)
        torch.testing.assert_close(end, y, rtol=0, atol=1e-15)
        torch.testing.assert_close(end - x, y - x, rtol=1e-6, atol=1e-15)
        torch.testing.assert_close(log_map(x, y), angle * tangent, rtol=1e-6, atol=1e-9 * angle)
        assert torch.linalg.vector_norm(log_map(x, y)).item() == pytest.approx(angle, rel=1e-9)
        share = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
        points = slerp(x, y, share)
        torch.testing.assert_close(geodesic_distance(x, points), share * angle, rtol=1e-6, atol=1e-14)
        torch.testing.assert_close(points[2], y, rtol=0, atol=1e-14)

    def test_parallel_transport_rotates_the_tangent_along(self, angle):
        x, tangent, y = pair(angle)
        across = project_to_tangent(tangent, project_to_tangent(x, unit(5)))
        across = project_to_tangent(x, across)
        moved = parallel_transport(x, y, across + 2 * tangent)
        expected = across + 2 * (math.cos(angle) * tangent - math.sin(angle) * x)
        torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-9)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_parallel_transport_returns_tangents_at_the_other_point(self, angle, dtype):
        x, tangent, y = (values.to(dtype) for values in pair(angle))
        component = parallel_transport(x, y, tangent).double() @ y.double()
        assert component.abs() < 20 * torch.finfo(dtype).eps


class TestGradients:
    @pytest.mark.parametrize("angle", [1e-3, 0.0316, 0.1, 1.5, 3.0])
    def test_all_maps_pass_gradcheck(self, angle):
        x, tangent, y = (t.requires_grad_() for t in pair(angle))
        for function, inputs in (
            (project_to_sphere, (x,)),
            (project_to_tangent, (x, y)),
            (exp_map, (x, (angle * tangent).detach().requires_grad_())),
            (geodesic_distance, (x, y)),
            (lambda a, b: slerp(a, b, 0.3), (x, y)),
            (parallel_transport, (x, y, tangent)),
        ):
            assert gradcheck(function, inputs)

    @pytest.mark.parametrize("angle", [0.0, 1e-3, 0.0316, 1.5])
    def test_log_exp_and_transport_are_smooth_also_at_zero(self, angle):
        x, tangent, y = (t.requires_grad_() for t in pair(angle))
        step = (angle * tangent).detach().requires_grad_()
        assert gradcheck(log_map, (x, y))
        assert gradcheck(parallel_transport, (x, y, tangent))
        assert gradcheck(exp_map, (x, step))
        assert gradgradcheck(exp_map, (x, step))
        assert gradgradcheck(log_map, (x, y), atol=1e-4)

    def test_the_mean_is_differentiable(self):
        points = project_to_sphere(unit(4) + 0.5 * torch.randn(2, 6, 4, dtype=torch.float64)).requires_grad_()
        assert gradcheck(lambda p: frechet_mean(project_to_sphere(p)), points, atol=1e-5)


class TestAntipodes:
    def test_one_of_the_shortest_paths_is_used_consistently(self):
        x = unit(7, 4)
        tangent = log_map(x, -x)
        torch.testing.assert_close(torch.linalg.vector_norm(tangent, dim=-1), torch.full((7,), math.pi).double())
        torch.testing.assert_close(exp_map(x, tangent), -x, rtol=0, atol=1e-15)
        torch.testing.assert_close(parallel_transport(x, -x, tangent), -tangent, rtol=0, atol=1e-14)
        torch.testing.assert_close(geodesic_distance(x, slerp(x, -x, 0.5)), torch.full((7,), math.pi / 2).double())
        assert (geodesic_distance(x, -x) == math.pi).all()

    @pytest.mark.parametrize("counts", [(1, 1), (3, 2)])
    def test_the_mean_of_antipodal_points_is_reported(self, counts):
        x, (first, second) = unit(4), counts
        with pytest.warns(UserWarning, match="may not be unique"):
            mean = frechet_mean(torch.cat([x.expand(first, 4), -x.expand(second, 4)]))
        assert geodesic_distance(x, mean).item() == pytest.approx(second / (first + second) * math.pi, abs=1e-9)


class TestFrechetMean:
    def test_the_gradient_vanishes_for_scattered_points(self):
        points = unit(50, 16)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mean = frechet_mean(points)
        assert log_map(mean, points).mean(0).abs().max() < 1e-12

    def test_slow_convergence_is_reported(self, monkeypatch):
        monkeypatch.setattr("hf_sphere.geometry.manifold.MAX_ITERATIONS", 2)
        with pytest.warns(UserWarning, match="did not converge in 2 steps"):
            frechet_mean(unit(20, 3))


def test_projection_survives_extreme_norms_and_keeps_zeros():
    x = torch.tensor([[3e300, 4e300], [3e-300, 4e-300], [0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([[0.6, 0.8], [0.6, 0.8], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(project_to_sphere(x), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_dtypes_are_computed_in_float32(dtype):
    x, y = unit(5).to(dtype), unit(5).to(dtype)
    for function in (geodesic_distance, log_map, exp_map):
        assert function(x, y).dtype == dtype
        torch.testing.assert_close(function(x, y), function(x.float(), y.float()).to(dtype))


def test_bad_input_is_refused_by_the_maps_and_the_mean():
    wrong = [
        torch.cat([unit(4, 3), torch.full((1, 3), v, dtype=torch.float64)]) for v in (0.0, math.nan, math.inf, 1e300)
    ]
    for points in (*wrong, torch.empty(0, 3), torch.ones(3)):
        with pytest.raises(ValueError, match="n >= 1 and finite norms above 0"):
            frechet_mean(points)
    with pytest.raises(TypeError, match="floating-point"):
        log_map(torch.tensor([1, 0]), torch.tensor([0, 1]))
    with pytest.raises(TypeError, match=r"got ndarray. Convert it with torch.as_tensor\(\)"):
        frechet_mean(unit(3, 4).numpy())


def test_maps_compile_without_graph_breaks():
    x, y = unit(3, 5), unit(3, 5)
    compiled = torch.compile(slerp, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, y, 0.3), slerp(x, y, 0.3))


def test_random_rotations_are_rotations_whose_angles_in_the_plane_are_uniform():
    rotation = random_rotation(5, (20,), dtype=torch.float64)
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(5, dtype=torch.float64).expand(20, 5, 5))
    torch.testing.assert_close(torch.linalg.det(rotation), torch.ones(20, dtype=torch.float64))
    rotation = random_rotation(2, (20_000,), generator=torch.Generator().manual_seed(0))
    angles = torch.atan2(rotation[:, 1, 0], rotation[:, 0, 0])
    assert ((torch.histc(angles, 10, -math.pi, math.pi) - 2000).abs() < 5 * 2000**0.5).all()


@pytest.mark.parametrize("short", [torch.inf, 1e-12])
def test_the_formula_of_the_gradient_of_directions_is_right_on_devices(short):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: divide_by_norms.on_devices(x, short), x, check_batched_grad=True)
    assert gradgradcheck(lambda x: divide_by_norms.on_devices(x, short), x)


@pytest.mark.parametrize("function", [divide_by_norms, divide_by_norms.on_devices])
def test_zero_vectors_have_neither_direction_nor_gradient(function):
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    directions, _ = function(x, torch.inf)
    (grad,) = torch.autograd.grad(directions[:, 0].sum(), x)
    torch.testing.assert_close(directions.detach(), torch.tensor([[0.0, 0.0], [0.6, 0.8]]))
    torch.testing.assert_close(grad, torch.tensor([[0.0, 0.0], [0.128, -0.096]]))
