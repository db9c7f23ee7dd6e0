import pytest
import torch

from hf_sphere.geometry.codes import separation


def test_separation_is_the_largest_off_diagonal_entry_of_the_gram_matrix():
    points = torch.randn(50, 7, dtype=torch.float64)
    unit = points / points.norm(dim=-1, keepdim=True)
    gram = unit @ unit.T - 3 * torch.eye(50, dtype=torch.float64)
    torch.testing.assert_close(separation(points), gram.max())


def test_blockwise_computation_covers_all_pairs():
    points = torch.randn(5000, 6, dtype=torch.float64)  # 839 rows per block
    points[4321] = 2 * points[17] + 1e-9 * points[3]
    assert separation(points) > 1 - 1e-12


@pytest.mark.parametrize(
    ("given", "computed"), [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.half, torch.float32)]
)
def test_result_is_at_least_float32(given, computed):
    result = separation(torch.eye(3, dtype=given))
    assert (result.dtype, result.shape) == (computed, ())


def test_autocast_does_not_lower_the_precision():
    points = torch.randn(40, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = separation(points)
    assert inside == separation(points)


def test_gradients_pass_gradcheck():
    points = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(separation, points)
