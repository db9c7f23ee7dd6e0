import math

import pytest
import torch
import torch.nn.functional as F

from hf_sphere.geometry.codes import CATALOGUE, find_code, fit_code, separation

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


def test_modifying_a_built_code_does_not_change_the_next_one():
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
    ],
)
def test_find_code_returns_the_best_listed_code(num_points, dim, cosine):
    code = find_code(num_points, dim)
    assert code.size >= num_points
    assert code.dim <= dim
    assert code.cosine == pytest.approx(cosine, abs=1e-12)


@pytest.mark.parametrize(("num_points", "dim"), [(13, 3), (10**7, 512), (5, 1)])
def test_find_code_returns_none_if_no_code_fits(num_points, dim):
    assert find_code(num_points, dim) is None


def test_no_code_is_listed_twice():
    assert len({(code.size, code.dim) for code in CATALOGUE}) == len(CATALOGUE) == len({c.name for c in CATALOGUE})


def test_subset_padded_with_zeros_keeps_the_cosine():
    code = find_code(100, 25)
    points = fit_code(code, 90, 25, torch.Generator().manual_seed(0))
    assert points.shape == (90, 25)
    assert (points[:, code.dim :] == 0).all()
    assert separation(points).item() == pytest.approx(code.cosine, abs=1e-9)


def test_generator_determines_the_chosen_points():
    code = find_code(1000, 64)
    first, again = (fit_code(code, 1000, 64, torch.Generator().manual_seed(3)) for _ in range(2))
    other = fit_code(code, 1000, 64, torch.Generator().manual_seed(4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(fit_code(code, 30, 64), F.pad(code.build()[:30], (0, 64 - code.dim)))
    assert len(other.unique(dim=0)) == 1000
