import math

import pytest
import torch

from hf_sphere.geometry.codes import cross_polytope, polygon, separation, simplex


@pytest.mark.parametrize(("num_points", "dim"), [(2, 1), (2, 5), (3, 2), (10, 9), (10, 30), (1000, 999)])
def test_simplex_cosines_are_minus_one_over_k_minus_one(num_points, dim):
    points = simplex(num_points, dim)
    expected = torch.full((num_points, num_points), -1 / (num_points - 1), dtype=torch.float64).fill_diagonal_(1.0)
    assert points.shape == (num_points, dim)
    torch.testing.assert_close(points @ points.T, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_points", range(5, 13))
def test_cross_polytope_of_more_than_dim_plus_one_points_has_separation_0(num_points):
    assert separation(cross_polytope(num_points, 6)) == 0.0


def test_cross_polytope_has_all_signed_unit_vectors():
    points = cross_polytope(8, 4)
    assert (points.abs().sum(-1) == 1).all()
    assert len(points.unique(dim=0)) == 8


@pytest.mark.parametrize("num_points", [2, 3, 4, 7, 100])
def test_neighboring_polygon_vertices_have_equal_angles(num_points):
    points = polygon(num_points)
    cosines = (points * points.roll(1, 0)).sum(-1)
    torch.testing.assert_close(cosines, torch.full_like(cosines, math.cos(2 * math.pi / num_points)))
    assert separation(points).item() == pytest.approx(math.cos(2 * math.pi / num_points), abs=1e-12)


def test_bad_input_is_refused():
    for num_points in (1, 5, 0):
        with pytest.raises(ValueError, match=f"2 to 4 points; got {num_points}"):
            simplex(num_points, 3)
    for num_points in (1, 9):
        with pytest.raises(ValueError, match=f"2 to 8 points; got {num_points}"):
            cross_polytope(num_points, 4)
    with pytest.raises(ValueError, match="at least 2 points; got 1"):
        polygon(1)
