import math
from collections import Counter

import pytest

from hf_sphere.comparison.arms import OWN_NUMBERS, RATES, describe_setting, make_arm, tune, tuning_epochs

SCALES = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class Concave:
    """A score with one maximum on the logarithms of one or two options; settings above a limit diverge."""

    def __init__(self, *best: float, limit: float = math.inf) -> None:
        self.best, self.limit, self.calls = best, limit, list[tuple[tuple[float, ...], int]]()

    def __call__(self, setting, epochs):
        values = tuple(setting.values())
        self.calls.append((values, epochs))
        if values[0] > self.limit:
            return None
        return -sum(math.log(value / best) ** 2 for value, best in zip(values, self.best, strict=True))


@pytest.mark.parametrize("best", RATES)
def test_the_optimum_is_found_anywhere_on_the_grid(best):
    tuned = tune({"learning_rate": (RATES, 1e-3)}, Concave(best), count=12, epochs=18)
    assert (tuned["setting"], tuned["score"]) == ({"learning_rate": best}, 0.0)
    assert tuned["at_end"] == (["learning_rate"] if best in (RATES[0], RATES[-1]) else [])


@pytest.mark.parametrize(("rate", "scale"), [(1e-5, 128.0), (3.0, 4.0), (3e-3, 16.0)])
def test_the_optimum_of_two_numbers_is_found_outside_of_the_first_window(rate, scale):
    grid = {"learning_rate": (RATES, 3e-3), "scale": (SCALES, 32.0)}
    assert tune(grid, Concave(rate, scale), count=12, epochs=18)["setting"] == {"learning_rate": rate, "scale": scale}


def test_the_settings_are_counted_once_each():
    score = Concave(1.0, 4.0)
    tuned = tune({"learning_rate": (RATES, 3e-3), "scale": (SCALES, 32.0)}, score, count=12, epochs=18)
    assert tuned["count"] == len({values for values, _ in score.calls})
    assert max(Counter(score.calls).values()) == 1


@pytest.mark.parametrize("best", [1e-5, 3e-3, 3.0])
@pytest.mark.parametrize("count", [1, 2, 12])
def test_tuning_takes_as_many_epochs_as_estimated(best, count):
    grid, score = {"learning_rate": (RATES, 3e-3), "scale": (SCALES, 32.0)}, Concave(best, 4.0)
    tune(grid, score, count=count, epochs=12)
    fewest, most = tuning_epochs(grid, count, 12)
    assert fewest <= sum(epochs for _, epochs in score.calls) <= most


@pytest.mark.parametrize("head", ["softmax", "arcface"])  # with one number of its own, and with two
def test_every_arm_starts_with_the_same_number_of_settings(head):
    score = Concave(*[1.0] * (1 + len(OWN_NUMBERS[head])))
    tune(make_arm(head, {"head": head}, 1e-3).grid, lambda *args: 0 * (score(*args) or 0), count=12, epochs=18)
    assert {epochs: count for epochs, count in Counter(e for _, e in score.calls).items() if epochs < 18} == {
        2: 12,
        6: 4,
    }


@pytest.mark.parametrize(
    ("values", "best", "at_end"), [((0.0, 1.0), 0, []), ((1.0, 2.0), 0, ["a"]), ((0.0, 1.0), 1, ["a"])]
)
def test_the_end_of_a_grid_is_named_unless_it_is_zero(values, best, at_end):
    tuned = tune({"a": (values, 0.0)}, lambda setting, epochs: -abs(setting["a"] - values[best]), count=2, epochs=1)
    assert tuned["at_end"] == at_end


def test_a_learned_scale_is_described_by_its_start():
    setting = {"learning_rate": 0.003, "head_kwargs.log_temperature": -2.0794}
    assert describe_setting(setting) == "learning_rate 0.003, log_temperature -2.08 (initial scale 8)"


def test_settings_that_diverge_rank_last_and_nothing_is_returned_if_all_do():
    grid = {"learning_rate": (RATES, 1e-3)}
    assert tune(grid, Concave(3.0, limit=0.02), count=5, epochs=9)["setting"] == {"learning_rate": 0.01}
    assert tune(grid, lambda *_: None, count=5, epochs=9) is None
    tuned = tune({}, lambda *_: 3.0, count=5, epochs=9)  # the only setting without a grid
    assert (tuned["setting"], tuned["score"], tuned["count"], tuned["at_end"]) == ({}, 3.0, 1, [])
