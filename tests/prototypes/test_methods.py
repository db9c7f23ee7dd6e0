import pytest
import torch
import torch.nn.functional as F

from hf_sphere.geometry.codes import separation, separation_bound
from hf_sphere.prototypes import METHODS, methods as placement_methods, place_prototypes
from hf_sphere.prototypes.methods import Candidate, PlacementTask
from hf_sphere.prototypes.ordering import TripletRanking

SHORT = {
    "lbfgs": {"restarts": 1, "max_iterations": 10},
    "sgd": {"max_iterations": 50},
    "sgd_as_published": {"max_iterations": 50},
    "slsqp": {"restarts": 1},
    "auto": {"restarts": 1},
}
"""Options that make a method finish quickly."""
SIZES = {"closed_form": (7, 4), "auto": (20, 4), "catalogue": (20, 4)}
"""Numbers of points and dimensions; the catalogue has a code for (20, 4)."""


def place(name, seed=0):
    count, dim = SIZES.get(name, (11, 3))
    return place_prototypes(count, dim, method=name, seed=seed, **SHORT.get(name, {})).prototypes


@pytest.mark.parametrize("name", METHODS)
def test_every_method_returns_unit_vectors_in_float64_that_only_the_seed_determines(name):
    before = torch.get_rng_state()
    points = place(name, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert points.dtype == torch.float64
    torch.testing.assert_close(points.norm(dim=1), torch.ones(len(points), dtype=torch.float64), rtol=0, atol=1e-12)
    torch.rand(3)  # random numbers drawn in between have no effect
    assert torch.equal(points, place(name, seed=5))
    assert torch.allclose(points, place(name, seed=2)) == (name == "closed_form")


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"catalogue"}))
def test_two_points_in_the_plane_end_up_opposite(name):
    options = {"max_iterations": 200} if name.startswith("sgd") else {}
    assert place_prototypes(2, 2, method=name, **options).separation == pytest.approx(-1.0, abs=1e-6)


@pytest.mark.parametrize(("name", "is_published"), [("sgd", False), ("sgd_as_published", True)])
def test_sgd_matches_torch_sgd_or_the_published_program_which_makes_an_optimizer_each_step(name, is_published):
    start, *found = (points for points, _ in METHODS[name](PlacementTask(12, 3, seed=4), max_iterations=25))
    points = start.clone().requires_grad_()
    optimizer, expected = torch.optim.SGD([points], lr=0.1, momentum=0.9), []
    for _ in range(25):
        if is_published:
            optimizer = torch.optim.SGD([points], lr=0.1, momentum=0.9)
        optimizer.zero_grad()
        (points @ points.T - 2 * torch.eye(12)).max(dim=1).values.mean().backward()
        optimizer.step()
        with torch.no_grad():
            points.copy_(F.normalize(points, dim=1))
        expected.append(points.detach().clone())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "count", "dim", "digits"),
    [
        *(("slsqp", *size, 1e-9) for size in ((7, 3), (8, 3), (9, 3), (10, 3), (12, 3), (10, 4), (16, 5))),
        *(("lbfgs", *size, 1e-5) for size in ((4, 3), (6, 3), (12, 3), (27, 6))),
    ],
)
def test_searches_reach_but_never_beat_the_proved_optimum(method, count, dim, digits):
    placement = place_prototypes(count, dim, method=method, **{"restarts": 3} if method == "lbfgs" else {})
    assert placement.optimal or method == "lbfgs"
    assert -1e-9 < placement.separation - separation_bound(count, dim) < digits


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("count", "dim"), [(2, 2), (3, 2), (5, 2), (4, 5), (6, 3), (8, 4)])
def test_slsqp_handles_degenerate_optima(count, dim, seed):
    placement = place_prototypes(count, dim, method="slsqp", restarts=2, seed=seed)
    assert placement.prototypes.isfinite().all()


def test_more_restarts_are_never_worse():
    options = {"method": "lbfgs", "max_iterations": 20}
    reached = [place_prototypes(13, 3, restarts=restarts, **options).separation for restarts in (1, 2, 4)]
    assert reached == sorted(reached, reverse=True)
    assert place_prototypes(12, 7, method="catalogue").prototypes.shape == (12, 7)  # padded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "adam"}, "method must be one of auto, catalogue, closed_form, lbfgs, sgd, .*; got 'adam'"),
        ({"momentum": 0.9}, "method 'auto' has no option momentum; its options are: restarts"),
        ({"method": "closed_form", "restarts": 3}, "'closed_form' has no option restarts; its options are: none"),
        ({"method": "sgd_as_published", "momentum": 0.9, "beta": 1}, "beta, momentum; its .* are: max_iterations"),
        ({"method": "lbfgs", "restarts": 0}, "restarts must be an integer of at least 1; got 0"),
        ({"restarts": 0}, "restarts must be an integer of at least 1; got 0"),
        (
            {"method": "slsqp", "num_classes": 101, "dim": 4},
            r"at most 400 coordinates; 101 points in 4 dimensions have 404\. Use .*'lbfgs'",
        ),
        ({"method": "closed_form"}, r"no closed form for 13 points in 3 dimensions .* Use method 'auto'"),
        ({"method": "catalogue"}, "no code with at least 13 points in at most 3 dimensions"),
    ],
)
def test_invalid_method_or_option_error_names_it(options, message):
    with pytest.raises(ValueError, match=message):
        place_prototypes(**{"num_classes": 13, "dim": 3, **options})


@pytest.mark.parametrize(
    ("task", "methods"),
    [
        (PlacementTask(100_000, 512), ["catalogue"]),  # a search would be slow
        (PlacementTask(10_000, 6), ["lbfgs"]),  # there is no code
        (
            PlacementTask(4, 3, TripletRanking(F.normalize(torch.randn(4, 6)))),
            ["lbfgs"],
        ),  # others do not use class vectors
    ],
    ids=["catalogue", "search", "ranking"],
)
def test_auto_chooses_the_methods_by_the_task(monkeypatch, task, methods):
    for name in ("closed_form", "catalogue", "slsqp", "lbfgs"):
        monkeypatch.setattr(placement_methods, name, lambda *_, name=name, **options: [name])
    assert [*METHODS["auto"](task)] == methods


def random_search(task, *, draws=2):
    for draw in range(draws):
        yield Candidate(task.random_points(), f"draw {draw}")


def test_best_candidate_of_a_new_method_is_found_by_its_name(monkeypatch):
    monkeypatch.setitem(METHODS, "random_search", random_search)
    drawn = [PlacementTask(5, 3, seed=4).random_points()]
    assert place_prototypes(5, 3, method="random_search", draws=1, seed=4).separation == separation(drawn[0]).item()
    drawn = [separation(points).item() for points, _ in random_search(PlacementTask(5, 3), draws=9)]
    assert place_prototypes(5, 3, method="random_search", draws=9).separation == min(drawn)
    with pytest.raises(ValueError, match="'random_search' has no option restarts; its options are: draws"):
        place_prototypes(5, 3, method="random_search", restarts=2)
