import math

import numpy as np
import pytest
import torch

from hf_sphere.geometry.codes import CATALOGUE, polygon, separation, separation_bound
from hf_sphere.geometry.codes.bounds import PROVED_OPTIMA, levenshtein_cosine

DIMS = [1, 2, 3, 4, 5, 8, 16, 24, 50, 64, 65, 512]

# Codes with their cosines, the first ones proved optimal by Levenshtein's bound (Cohn and Kumar, "Universally optimal
# distribution of points on spheres", 2007, table 1).
SHARP = [
    (12, 3, 1 / math.sqrt(5)),
    (16, 5, 1 / 5),
    (27, 6, 1 / 4),
    (56, 7, 1 / 3),
    (240, 8, 1 / 2),
    (112, 21, 1 / 9),
    (162, 21, 1 / 7),
    (100, 22, 1 / 11),
    (275, 22, 1 / 6),
    (891, 22, 1 / 4),
    (552, 23, 1 / 5),
    (4600, 23, 1 / 3),
    (196560, 24, 1 / 2),
    (2752, 301, 1 / 49),
]
OTHERS = [(10, 4, 1 / 6), (24, 4, 1 / 2), (120, 4, (1 + 5**0.5) / 4), (4224, 64, 1 / 8), (66048, 256, 1 / 16)]


def spread_points(num_points: int, dim: int) -> torch.Tensor:
    """Return points found by minimizing an annealed log-sum-exp of the cosines."""
    best = torch.randn(num_points, dim, dtype=torch.float64)
    for _ in range(6):
        points = torch.randn(num_points, dim, dtype=torch.float64, requires_grad=True)
        for sharpness in (20.0, 100.0, 1000.0):
            optimizer = torch.optim.LBFGS([points], max_iter=100, line_search_fn="strong_wolfe")

            def loss(points=points, optimizer=optimizer, sharpness=sharpness):
                optimizer.zero_grad()
                unit = points / points.norm(dim=-1, keepdim=True)
                cosines = (unit @ unit.T)[~torch.eye(num_points, dtype=torch.bool)]
                value = torch.logsumexp(sharpness * cosines, 0) / sharpness
                value.backward()
                return value

            optimizer.step(loss)
        if separation(points) < separation(best):
            best = points.detach()
    return best


@pytest.mark.parametrize("num_points", range(2, 13))
def test_few_points_have_the_rankin_bound(num_points):
    expected = -1 / (num_points - 1) if num_points <= 7 else 0.0
    assert separation_bound(num_points, 6) == expected
    assert separation_bound(num_points, 1) == (-1.0 if num_points == 2 else 1.0)


@pytest.mark.parametrize("num_points", [2, 3, 5, 8, 1001])
def test_polygon_attains_the_bound_in_dimension_2(num_points):
    assert separation_bound(num_points, 2) == pytest.approx(separation(polygon(num_points)).item(), abs=1e-12)


@pytest.mark.parametrize(("size", "dim", "cosine"), [*SHARP, *OTHERS])
def test_published_codes_are_listed_and_sharp_ones_attain_the_levenshtein_bound(size, dim, cosine):
    (found,) = [code for code in CATALOGUE if (code.dim, code.size) == (dim, size)]
    assert found.cosine == pytest.approx(cosine, abs=1e-15)
    assert (abs(levenshtein_cosine(size, dim) - cosine) < 1e-12) == ((size, dim, cosine) in SHARP)


@pytest.mark.parametrize("code", CATALOGUE, ids=lambda code: f"{code.size}-{code.dim}")
def test_only_optimal_catalogue_codes_attain_the_bound(code):
    excess = code.cosine - separation_bound(code.size, code.dim)
    assert abs(excess) < 1e-12 if code.optimal else excess > 1e-7


@pytest.mark.parametrize(
    ("count", "cosine"), [(count, cosine) for count, dim, cosine, _ in PROVED_OPTIMA if dim == 3 and count < 11]
)
def test_descent_reaches_but_never_beats_proved_optima(count, cosine):
    found = separation(spread_points(count, 3)).item()
    assert separation_bound(count, 3) <= found < cosine + 2e-3


def test_closed_form_optima_match_the_table():
    digits = {count: cosine for count, dim, cosine, _ in PROVED_OPTIMA if dim == 3}
    tribonacci = max(np.roots([1, -1, -1, -1]).real)
    snub_cube = sorted(
        abs(np.array([1, 1 / tribonacci, tribonacci]) @ corner) / (1 + tribonacci**-2 + tribonacci**2)
        for corner in ([1 / tribonacci, tribonacci, 1], [tribonacci, -1, 1 / tribonacci])
    )[-1]
    exact = {7: 1 - 4 / math.sqrt(3) * math.cos(7 * math.pi / 18), 8: (2 * math.sqrt(2) - 1) / 7, 24: snub_cube}
    assert all(0 <= exact[size] - digits[size] < 1e-11 for size in exact)


def test_bound_increases_with_the_number_of_points():
    numbers = [*range(2, 12), 16, 17, 33, 34, 100, 101, 240, 4224, 100000, 100001, 10**6]
    for dim in DIMS:
        bounds = [separation_bound(number, dim) for number in numbers]
        assert bounds == sorted(bounds)


@pytest.mark.parametrize("num_points", [2, 5, 9, 13, 25, 64, 130, 1000, 30000, 100000])
def test_bound_decreases_with_the_dimension(num_points):
    bounds = [separation_bound(num_points, dim) for dim in DIMS]
    assert bounds == sorted(bounds, reverse=True)
