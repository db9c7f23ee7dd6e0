import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hf_sphere.geometry.codes import (
    CATALOGUE,
    cross_polytope,
    find_code,
    fit_code,
    polygon,
    separation,
    separation_bound,
    simplex,
)
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


@pytest.mark.parametrize("num_points", range(2, 13))
def test_few_points_have_the_rankin_bound(num_points):
    expected = -1 / (num_points - 1) if num_points <= 7 else 0.0
    assert separation_bound(num_points, 6) == expected
    assert separation_bound(num_points, 1) == (-1.0 if num_points == 2 else 1.0)


@pytest.mark.parametrize(("size", "dim", "cosine"), [*SHARP, *OTHERS])
def test_published_codes_are_listed_and_sharp_ones_attain_the_levenshtein_bound(size, dim, cosine):
    (found,) = [code for code in CATALOGUE if (code.dim, code.size) == (dim, size)]
    assert found.cosine == pytest.approx(cosine, abs=1e-15)
    assert (abs(levenshtein_cosine(size, dim) - cosine) < 1e-12) == ((size, dim, cosine) in SHARP)


@pytest.mark.parametrize("code", CATALOGUE, ids=lambda code: f"{code.size}-{code.dim}")
def test_only_optimal_catalogue_codes_attain_the_bound(code):
    excess = code.cosine - separation_bound(code.size, code.dim)
    assert abs(excess) < 1e-12 if code.optimal else excess > 1e-7


def test_closed_form_optima_match_the_table():
    digits = {count: cosine for count, dim, cosine, _ in PROVED_OPTIMA if dim == 3}
    tribonacci = max(np.roots([1, -1, -1, -1]).real)
    snub_cube = sorted(
        abs(np.array([1, 1 / tribonacci, tribonacci]) @ corner) / (1 + tribonacci**-2 + tribonacci**2)
        for corner in ([1 / tribonacci, tribonacci, 1], [tribonacci, -1, 1 / tribonacci])
    )[-1]
    exact = {7: 1 - 4 / math.sqrt(3) * math.cos(7 * math.pi / 18), 8: (2 * math.sqrt(2) - 1) / 7, 24: snub_cube}
    assert all(0 <= exact[size] - digits[size] < 1e-11 for size in exact)


def test_bound_increases_with_the_number_of_points_and_decreases_with_the_dimension():
    numbers = [*range(2, 14), 16, 17, 25, 33, 34, 64, 100, 101, 130, 240, 1000, 4224, 30000, 100000, 100001, 10**6]
    bounds = np.array([[separation_bound(number, dim) for number in numbers] for dim in DIMS])
    assert (np.diff(bounds, axis=1) >= 0).all()
    assert (np.diff(bounds, axis=0) <= 0).all()


MODERATE = [code for code in CATALOGUE if code.size * code.dim < 1_200_000 and code.dim < 295]
LARGE = [code for code in CATALOGUE if code.size == 66048 or code.size == 196560 or code.size == 2752]


@pytest.mark.parametrize("code", MODERATE, ids=lambda code: f"{code.size}-{code.dim}")
def test_codes_have_the_listed_shape_and_largest_cosine(code):
    points = code.build()
    assert (points.shape, points.dtype) == ((code.size, code.dim), torch.float64)
    torch.testing.assert_close(points.norm(dim=-1), torch.ones(code.size, dtype=torch.float64), rtol=0, atol=1e-12)
    largest = max((rows @ points.T).topk(2).values[:, 1].max().item() for rows in points.split(512))
    assert largest == pytest.approx(code.cosine, abs=1e-9)


@pytest.mark.parametrize("code", LARGE, ids=lambda code: f"{code.size}-{code.dim}")
def test_sampled_points_of_large_codes_have_the_listed_largest_cosine(code):
    points = code.build()
    chosen = torch.randint(code.size, (20,), generator=torch.Generator().manual_seed(1))
    two_largest = (points[chosen] @ points.T).topk(2).values
    torch.testing.assert_close(two_largest[:, 0], torch.ones(20, dtype=torch.float64))
    assert two_largest[:, 1].max().item() == pytest.approx(code.cosine, abs=1e-9)


@pytest.mark.parametrize(
    ("dim", "size", "degree", "shared", "shared_else"),
    [
        (4, 10, 3, 0, 1),
        (5, 16, 5, 0, 2),
        (6, 27, 10, 1, 5),
        (21, 112, 30, 2, 10),
        (21, 162, 56, 10, 24),
        (22, 100, 22, 0, 6),
        (22, 275, 112, 30, 56),
        (52, 325, 68, 3, 17),
    ],
)
def test_distant_pairs_form_the_strongly_regular_graph(dim, size, degree, shared, shared_else):
    points = next(code for code in CATALOGUE if (code.dim, code.size) == (dim, size)).build()
    adjacency = (points @ points.T < -1e-6).double()
    identity, ones = torch.eye(size, dtype=torch.float64), torch.ones(size, size, dtype=torch.float64)
    expected = degree * identity + shared * adjacency + shared_else * (ones - identity - adjacency)
    assert torch.equal(adjacency @ adjacency, expected)


def test_leech_vectors_form_a_spherical_11_design():
    points = next(code for code in CATALOGUE if code.dim == 24).build()
    cosines = points @ points[1000]
    for power in range(12):
        moment = 0.0 if power % 2 else math.prod((2 * i + 1) / (24 + 2 * i) for i in range(power // 2))
        assert (cosines**power).mean().item() == pytest.approx(moment, abs=1e-12)


def test_no_code_is_listed_twice_and_modifying_a_built_one_does_not_change_the_next():
    assert len({(code.size, code.dim) for code in CATALOGUE}) == len(CATALOGUE) == len({c.name for c in CATALOGUE})
    code = CATALOGUE[0]
    code.build().zero_()
    assert code.build().norm(dim=-1).min() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("num_points", "dim", "cosine"),
    [
        (100, 25, 1 / 11),
        (200, 25, 1 / 6),
        (200, 50, 1 / 18),
        (1000, 64, 1 / 10),
        (4000, 64, 1 / 8),
        (60000, 256, 1 / 16),
        *((*none, None) for none in ((13, 3), (10**7, 512), (5, 1))),
    ],
)
def test_find_code_returns_the_best_listed_code_or_none(num_points, dim, cosine):
    code = find_code(num_points, dim)
    assert (code and code.cosine) == (cosine and pytest.approx(cosine, abs=1e-12))
    assert code is None or (code.size >= num_points and code.dim <= dim)


def test_a_generator_determines_the_chosen_points_and_zeros_keep_the_cosine():
    code = find_code(100, 25)
    points = fit_code(code, 90, 25, torch.Generator().manual_seed(0))
    assert points.shape == (90, 25)
    assert (points[:, code.dim :] == 0).all()
    assert separation(points).item() == pytest.approx(code.cosine, abs=1e-9)
    code = find_code(1000, 64)
    first, again = (fit_code(code, 1000, 64, torch.Generator().manual_seed(3)) for _ in range(2))
    other = fit_code(code, 1000, 64, torch.Generator().manual_seed(4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(fit_code(code, 30, 64), F.pad(code.build()[:30], (0, 64 - code.dim)))
    assert len(other.unique(dim=0)) == 1000


@pytest.mark.parametrize(("num_points", "dim"), [(2, 1), (2, 5), (3, 2), (10, 9), (10, 30), (1000, 999)])
def test_simplex_cosines_are_minus_one_over_k_minus_one(num_points, dim):
    points = simplex(num_points, dim)
    expected = torch.full((num_points, num_points), -1 / (num_points - 1), dtype=torch.float64).fill_diagonal_(1.0)
    assert points.shape == (num_points, dim)
    torch.testing.assert_close(points @ points.T, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_points", [2, 3, 4, 7, 1001])
def test_neighboring_polygon_vertices_have_equal_angles_and_attain_the_bound(num_points):
    points = polygon(num_points)
    cosines = (points * points.roll(1, 0)).sum(-1)
    torch.testing.assert_close(cosines, torch.full_like(cosines, math.cos(2 * math.pi / num_points)))
    assert separation(points).item() == pytest.approx(math.cos(2 * math.pi / num_points), abs=1e-12)
    assert separation_bound(num_points, 2) == pytest.approx(separation(points).item(), abs=1e-12)


@pytest.mark.parametrize("num_points", range(8, 13))
def test_cross_polytope_has_signed_unit_vectors_of_separation_0(num_points):
    points = cross_polytope(num_points, 6)
    assert separation(points) == 0.0
    assert (points.abs().sum(-1) == 1).all()
    assert len(points.unique(dim=0)) == num_points


def test_separation_is_the_largest_cosine_of_all_pairs_also_in_blocks():
    points = torch.randn(50, 7, dtype=torch.float64)
    unit = points / points.norm(dim=-1, keepdim=True)
    gram = unit @ unit.T - 3 * torch.eye(50, dtype=torch.float64)
    torch.testing.assert_close(separation(points), gram.max())
    points = torch.randn(5000, 6, dtype=torch.float64)  # 839 rows per block
    points[4321] = 2 * points[17] + 1e-9 * points[3]
    assert separation(points) > 1 - 1e-12


@pytest.mark.parametrize(
    ("given", "computed"), [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.half, torch.float32)]
)
def test_separation_is_at_least_float32(given, computed):
    result = separation(torch.eye(3, dtype=given))
    assert (result.dtype, result.shape) == (computed, ())


def test_separation_passes_gradcheck_and_autocast_does_not_lower_its_precision():
    points = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(separation, points)
    points = torch.randn(40, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = separation(points)
    assert inside == separation(points)


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
