"""Can a placement method be added in a separate file?"""

import runpy

import pytest

from hf_sphere.geometry.codes import separation
from hf_sphere.prototypes import METHODS, place_prototypes
from hf_sphere.prototypes.methods import Task

SOURCE = """
from hf_sphere.prototypes.methods import Candidate, register_method


@register_method()
def {name}(task, *, draws=2):
    for draw in range(draws):
        yield Candidate(task.random_points(), f"draw {{draw}}")
"""


@pytest.fixture
def add_method(tmp_path):
    """Write a method to a temporary module, run the module, and return the method."""
    known = dict(METHODS)

    def add(name):
        (tmp_path / "random_search.py").write_text(SOURCE.format(name=name))
        return runpy.run_path(tmp_path / "random_search.py")[name]

    yield add
    METHODS.clear()
    METHODS.update(known)


def test_new_method_is_found_by_name(add_method):
    add_method("random_search")
    drawn = [Task(5, 3, seed=4).random_points()]
    assert place_prototypes(5, 3, method="random_search", draws=1, seed=4).separation == separation(drawn[0]).item()


def test_best_candidate_of_a_new_method_is_returned(add_method):
    method = add_method("random_search")
    drawn = [separation(points).item() for points, _ in method(Task(5, 3), draws=9)]
    assert place_prototypes(5, 3, method="random_search", draws=9).separation == min(drawn)


def test_unknown_option_of_a_new_method_is_reported(add_method):
    add_method("random_search")
    with pytest.raises(ValueError, match="'random_search' has no option restarts; its options are: draws"):
        place_prototypes(5, 3, method="random_search", restarts=2)


def test_methods_stay_in_alphabetical_order(add_method):
    add_method("a_search")
    assert list(METHODS) == sorted(METHODS)
    assert "a_search" in METHODS
