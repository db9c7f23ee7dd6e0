"""Can a placement method be added?"""

import pytest

from hf_sphere.geometry.codes import separation
from hf_sphere.prototypes import METHODS, place_prototypes
from hf_sphere.prototypes.methods import Candidate, PlacementTask


def random_search(task, *, draws=2):
    for draw in range(draws):
        yield Candidate(task.random_points(), f"draw {draw}")


@pytest.fixture(autouse=True)
def add_method(monkeypatch):
    monkeypatch.setitem(METHODS, "random_search", random_search)


def test_best_candidate_of_a_new_method_is_found_by_its_name():
    drawn = [PlacementTask(5, 3, seed=4).random_points()]
    assert place_prototypes(5, 3, method="random_search", draws=1, seed=4).separation == separation(drawn[0]).item()
    drawn = [separation(points).item() for points, _ in random_search(PlacementTask(5, 3), draws=9)]
    assert place_prototypes(5, 3, method="random_search", draws=9).separation == min(drawn)
    with pytest.raises(ValueError, match="'random_search' has no option restarts; its options are: draws"):
        place_prototypes(5, 3, method="random_search", restarts=2)
