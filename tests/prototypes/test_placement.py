import contextlib
import math

import pytest
import scipy.optimize
import torch
from doubles import spy
from hypothesis import given, strategies as st

from hf_sphere.geometry.codes import separation
from hf_sphere.prototypes import METHODS, place_prototypes
from hf_sphere.prototypes.methods import PlacementTask


@given(dim=st.integers(2, 40), data=st.data())
def test_up_to_twice_dim_points_are_placed_optimally(dim, data):
    count = data.draw(st.integers(2, 2 * dim))
    placed = place_prototypes(count, dim)
    assert placed.separation <= (-1 / (count - 1) if count <= dim + 1 else 0.0) + 1e-6
    assert placed.optimal


@pytest.mark.parametrize(
    ("count", "dim", "largest", "optimal"),
    [
        *((count, 2, math.cos(2 * math.pi / count) + 1e-9, True) for count in (3, 5, 17, 360)),
        (10, 3, 0.40440, True),
        (12, 3, 1 / math.sqrt(5) + 1e-6, True),
        (100, 22, 1 / 11 + 1e-6, True),
        (100, 25, 1 / 11 + 1e-6, False),
        (200, 25, 1 / 6 + 1e-6, False),
        (1000, 64, 1 / 8 + 1e-6, False),
    ],
)
def test_auto_reaches_the_known_separation(count, dim, largest, optimal):
    placed = place_prototypes(count, dim)
    assert placed.separation <= largest
    assert placed.optimal == optimal


@pytest.mark.parametrize("method", ["auto", "lbfgs", "slsqp", "sgd"])
@pytest.mark.parametrize(("count", "dim"), [(4, 3), (6, 3), (11, 3), (5, 2)])
def test_bound_never_exceeds_the_separation(count, dim, method):
    options = {"max_iterations": 200} if method == "sgd" else {"restarts": 1}
    options = {} if method == "auto" else options
    placed = place_prototypes(count, dim, method=method, **options)
    cosines = placed.prototypes @ placed.prototypes.T
    assert placed.bound <= placed.separation == pytest.approx(cosines.fill_diagonal_(-2).max().item(), abs=1e-12)
    assert placed.optimal == (placed.separation - placed.bound <= 1e-6)


def test_best_candidate_is_kept_instead_of_the_last():
    every = [separation(points).item() for points, _ in METHODS["sgd"](PlacementTask(30, 4), max_iterations=200)]
    assert min(every) < every[-1]
    assert place_prototypes(30, 4, method="sgd", max_iterations=200).separation == min(every)


def test_search_stops_at_the_bound(monkeypatch):
    solve = spy(monkeypatch, scipy.optimize, "minimize")
    place_prototypes(12, 3, method="slsqp", restarts=50)
    assert solve.call_count < 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({name: value}, f"{name} must be an integer of at least 2; got {value!r}")
            for name in ("num_classes", "dim")
            for value in (1, 2.0, None)
        ),
        ({"seed": 1.5}, "seed must be an integer from 0 to"),
        ({"method": "slsqp", "max_iterations": 0}, "max_iterations must be an integer of at least 1; got 0"),
        ({"class_names": ["cat", "dog"]}, "there are 2 class names for 4 prototypes"),
        ({"class_names": "abcd"}, "class_names must be a list of texts; got a single one: pass"),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        place_prototypes(**{"num_classes": 4, "dim": 3, **options})


def default_dtype(dtype: torch.dtype) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(dtype)
    return stack


@pytest.mark.parametrize(
    "environment",
    [
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: default_dtype(torch.float64),
        lambda: default_dtype(torch.bfloat16),
    ],
    ids=["device", "autocast", "float64", "bfloat16"],
)
@pytest.mark.parametrize("with_vectors", [True, False])
def test_default_device_and_dtype_and_autocast_do_not_matter(environment, with_vectors):
    vectors = torch.randn(9, 4) if with_vectors else None
    options = {"method": "lbfgs", "restarts": 1, "max_iterations": 5, "class_vectors": vectors}
    expected = place_prototypes(9, 3, **options).prototypes
    with environment():
        found = place_prototypes(9, 3, **options).prototypes
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("progress", "seconds"), [(None, 0), (False, 0), (False, 100), (True, 0)])
def test_progress_is_shown_only_on_request_or_by_a_long_search(capfd, monkeypatch, progress, seconds):
    import tqdm

    if seconds:
        clock = iter(range(0, 10**6, seconds))
        monkeypatch.setattr(tqdm.std, "time", lambda: float(next(clock)))
    place_prototypes(7, 3, method="sgd", max_iterations=10, progress=progress)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert [text in shown.err for text in ("placing", "largest cosine")] == [bool(progress)] * 2
    assert progress or shown.err == ""


def test_a_placement_is_described():
    text = str(place_prototypes(3, 5))
    for part in ("3 prototypes in 5 dimensions", "-0.5", "proved optimal", "regular simplex"):
        assert part in text
    placed = place_prototypes(13, 4, method="sgd", max_iterations=10)
    for value in (placed.separation, placed.bound):
        assert f"{value:.5f}"[:6] in str(placed)
    assert "proved" not in str(placed)
    assert repr(placed).startswith(f"Placement(separation={placed.separation}, bound={placed.bound}, method=")
    assert "tensor" not in repr(placed)
    placed = place_prototypes(6, 3, class_vectors=torch.randn(6, 4), ordering="assignment")
    assert f"{100 * placed.order.triplet_accuracy:.1f} % of triplets" in str(placed)
    assert f"{placed.order.rank_correlation:.3f}" in str(placed)
