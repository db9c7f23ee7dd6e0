import math

import pytest
import torch

from hf_sphere.geometry.codes import (
    CATALOGUE,
    cross_polytope,
    fit_code,
    polygon,
    separation,
    separation_bound,
    simplex,
)


@pytest.mark.parametrize(("num_points", "dim"), [(2, 1), (2, 5), (3, 2), (10, 9), (10, 30), (1000, 999)])
def test_simplex_cosines_are_minus_one_over_k_minus_one(num_points, dim):
    points = simplex(num_points, dim)
    expected = torch.full((num_points, num_points), -1 / (num_points - 1), dtype=torch.float64).fill_diagonal_(1.0)
    assert points.shape == (num_points, dim)
    torch.testing.assert_close(points @ points.T, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_points", [2, 3, 4, 7, 100])
def test_neighboring_polygon_vertices_have_equal_angles(num_points):
    points = polygon(num_points)
    cosines = (points * points.roll(1, 0)).sum(-1)
    torch.testing.assert_close(cosines, torch.full_like(cosines, math.cos(2 * math.pi / num_points)))
    assert separation(points).item() == pytest.approx(math.cos(2 * math.pi / num_points), abs=1e-12)


@pytest.mark.parametrize("num_points", range(8, 13))
def test_cross_polytope_has_signed_unit_vectors_of_separation_0(num_points):
    points = cross_polytope(num_points, 6)
    assert separation(points) == 0.0
    assert (points.abs().sum(-1) == 1).all()
    assert len(points.unique(dim=0)) == num_points


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: simplex(5, 3), "2 to 4 points; got 5"),
        (lambda: cross_polytope(9, 4), "2 to 8 points; got 9"),
        (lambda: fit_code(CATALOGUE[0], 13, 3), r"has 12 points; got num_points=13. Choose 1 to 12"),
        (lambda: fit_code(CATALOGUE[0], 5, 2), "needs 3 dimensions; got dim=2"),
        (lambda: separation_bound(1, 3), "num_points must be an integer of at least 2; got 1"),
        (lambda: separation_bound(5, 0), "dim must be an integer of at least 1; got 0"),
        (lambda: separation(torch.ones(1, 4)), r"shape \(K, d\) with K >= 2"),
        (lambda: separation(torch.eye(3)[:, :2]), "finite and non-zero; 1 of 3 are not, the first at index 2"),
        (lambda: separation(torch.full((2, 2), torch.nan)), "finite and non-zero; 2 of 2 are not"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
