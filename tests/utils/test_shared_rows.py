"""The check that nothing is tested on the rows to which it was fitted."""

import pytest
import torch

from hf_sphere.utils.shared_rows import Rows, SharedRowsError, check_disjoint

OTHER_DATA = 5 << 32


@pytest.fixture
def values() -> torch.Tensor:
    return torch.randn(400, 6, generator=torch.Generator().manual_seed(0))


def check(tested: Rows, fitted: Rows) -> None:
    check_disjoint(tested, fitted, "tested images", "images of the fit")


def test_equal_values_or_numbers_alone_are_no_shared_rows(values):
    rows = torch.arange(400)
    check(Rows.of(values[:200], rows[:200]), Rows.of(values[:200], rows[200:]))
    rows = torch.arange(200)
    check(Rows.of(values[:200], rows), Rows.of(values[200:], rows + OTHER_DATA))
    check(Rows.of(torch.zeros(50, 6)), Rows.of(torch.cat([values, torch.zeros(3, 6)])))
    check(Rows.of(values[:1].expand(50, -1)), Rows.of(values))


def test_bad_input_is_refused(values):
    message = "50 of the 200 tested images are among the 250 images of the fit, by their values"
    with pytest.raises(SharedRowsError, match=message):
        check(Rows.of(values[200:]), Rows.of(values[:250]))
    rows = torch.arange(400)
    with pytest.raises(SharedRowsError, match=r"1 of the 200 tested images are among the 201 images of the fit\. "):
        check(Rows.of(values[200:], rows[200:]), Rows.of(values[:201] + 1, rows[:201]))
    rows = torch.arange(200)
    with pytest.raises(SharedRowsError, match="200 of the 200 tested images"):
        check(Rows.of(values[:200], rows), Rows.of(values[:200], rows + OTHER_DATA))
    for known in (0, 1):
        sets = [Rows.of(values[:50], torch.arange(50) if number == known else None) for number in range(2)]
        with pytest.raises(SharedRowsError, match="50 of the 50"):
            check(*sets)


def test_a_few_duplicates_are_logged_and_one_input_may_be_that_of_the_fit(values, caplog):
    check(Rows.of(values[198:]), Rows.of(values[:200]))
    assert "2 of the 202 tested images are among the 200 images of the fit" in caplog.text
    check(Rows.of(values[:1]), Rows.of(values))
    with pytest.raises(SharedRowsError):
        check(Rows.of(values[:2]), Rows.of(values))
    values[:, 0] = 0.0  # of either sign, in any dtype
    negative = values.double() * torch.tensor([-1.0, 1, 1, 1, 1, 1])
    assert torch.equal(Rows.of(negative).digests, Rows.of(values).digests)


@pytest.mark.parametrize("width", [2, 3, 16, 84, 2048])
def test_most_values_that_differ_by_rounding_are_equal_and_near_values_are_not(width):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(500, width, generator=generator).relu()
    rounded = values * (1 + 3e-7 * torch.randn(500, width, generator=generator))
    assert torch.isin(Rows.of(rounded).digests, Rows.of(values).digests).double().mean() > 0.5
    # Ten thousand directions of one class, within 0.1 of each other.
    points = torch.eye(width)[0] + 0.1 * torch.rand(20_000 if width < 84 else 1000, width, generator=generator)
    one, two = torch.nn.functional.normalize(points, dim=1).chunk(2)
    check(Rows.of(one), Rows.of(two))
