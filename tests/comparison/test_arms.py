import math
from collections import Counter

import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from hf_sphere.comparison.arms import (
    OWN_NUMBERS,
    RATES,
    Division,
    apply_setting,
    describe_setting,
    make_arm,
    tune,
    tuning_epochs,
)
from hf_sphere.data.sources import draw_held_out, find_rows, held_out_names, read_split

SCALES = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
GROUPED = {"head": "arcface", "head_kwargs": {"scale": 20.0}}


def rows(count: int, start: int, classes: int = 8) -> Dataset:
    """Rows numbered from `start`, in groups of three rows of one class."""
    cells = {
        "row": range(start, start + count),
        "label": [n // 3 % classes for n in range(count)],
        "patient": [f"patient {start + n // 3}" for n in range(count)],
    }
    names = [f"class {n}" for n in range(classes)]
    features = Features({"row": Value("int64"), "label": ClassLabel(names=names), "patient": Value("string")})
    return Dataset.from_dict({name: list(column) for name, column in cells.items()}, features)


@pytest.fixture(scope="module")
def splits() -> DatasetDict:
    return DatasetDict(train=rows(240, 0), test=rows(96, 240))


def column(splits, part: str, name: str) -> set:
    return {*read_split(splits, part, "label")[name]}


@pytest.mark.parametrize("fraction", [0.2, 0.4, 0.7])
def test_groups_are_not_divided(splits, fraction):
    kept, held_out = held_out_names("train", fraction, 3, "patient")
    assert not column(splits, kept, "patient") & column(splits, held_out, "patient")
    assert column(splits, kept, "label") == column(splits, held_out, "label") == {*range(8)}
    assert len(column(splits, held_out, "row")) == pytest.approx(240 * fraction, abs=10)


def test_groups_of_any_size_are_held_out_for_some_seeds():
    sizes = [60, 40, *[10] * 20]
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    classes = torch.tensor(groups) % 2
    drawn = [draw_held_out(len(groups), 0.2, seed, classes, groups=groups) for seed in range(40)]
    counts = [sum(bool(held_out[groups.index(group)]) for held_out in drawn) for group in range(len(sizes))]
    assert min(counts) > 0  # 8 are expected
    assert max(counts) < 20


def test_each_seed_leaves_other_classes_out_which_are_the_same_in_two_parts(splits):
    drawn = set()
    for seed in range(9):
        names = [held_out_names(part, 0.25, seed, "label") for part in ("train", "test")]
        seen, unseen = ([column(splits, part, "label") for part in parts] for parts in zip(*names, strict=True))
        assert unseen[0] == unseen[1]
        assert len(unseen[0]) == 2
        assert seen == [{*range(8)} - unseen[0]] * 2
        drawn.add(frozenset(unseen[0]))
    assert len(drawn) > 5


@pytest.mark.parametrize("by", [None, "patient", "label"])
def test_the_rows_of_a_part_are_those_that_are_read(splits, by):
    for part in held_out_names(held_out_names("test", 0.25, 1, by)[0], 0.25, 2, by):
        assert find_rows(splits, part, "label").tolist() == read_split(splits, part, "label")["row"]


def test_an_unknown_group_column_is_named(splits):
    with pytest.raises(ValueError, match=r"no group column 'patents'; the data has the columns"):
        read_split(splits, held_out_names("train", 0.2, 0, "patents")[0], "label")


@pytest.mark.parametrize("left_out", [0.0, 0.25])
@pytest.mark.parametrize("group", [None, "patient"])
@pytest.mark.parametrize("test", [None, "test"])
def test_no_test_image_is_tuned_or_trained_on(splits, test, group, left_out):
    division = Division("train", test, 0.2, group, left_out, "label")

    def find(*names: str | None) -> torch.Tensor:
        return torch.cat([find_rows(splits, name, "label") for name in names if name is not None])

    def patients(found: torch.Tensor) -> set[int]:
        return {*(found // 3).tolist()}

    tuning, drawn = division.tuning(), set()
    for parts in map(division.of_seed, range(3)):
        trained, tested = find(parts.train), find(parts.test, parts.unseen)
        used = torch.cat([trained, find(tuning.test, tuning.unseen)])
        assert not torch.isin(tested, used).any()
        assert group is None or not patients(tested) & patients(used)
        assert not torch.isin(find(tuning.test, tuning.unseen), find(tuning.train)).any()
        drawn.add(frozenset(tested.tolist()) if test is None else frozenset(find(parts.test).tolist()))
        assert (parts.unseen is None) == (left_out == 0.0)
        if parts.unseen is not None:
            assert not column(splits, parts.unseen, "label") & column(splits, parts.train, "label")
    assert (len(drawn) > 1) == division.is_redrawn


def test_the_own_test_split_is_tested_whole(splits):
    assert find_rows(splits, Division("train", "test").of_seed(3).test, "label").tolist() == [*range(240, 336)]


def test_fixed_numbers_of_a_head_are_not_tuned():
    arm = make_arm("a", GROUPED, 1e-3)
    assert [*arm.grid] == ["learning_rate", "head_kwargs.margin"]
    assert arm.grid["learning_rate"] == (RATES, 1e-3)


def test_a_setting_is_merged_with_the_options_of_the_head():
    merged = apply_setting(GROUPED, {"learning_rate": 0.1, "head_kwargs.margin": 0.3})
    assert merged == {"head": "arcface", "learning_rate": 0.1, "head_kwargs": {"scale": 20.0, "margin": 0.3}}
    assert GROUPED["head_kwargs"] == {"scale": 20.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": [1.0]}, r"the grid of a must map options to lists of increasing numbers; got \[1.0\]"),
        ({"grid": {"learning_rate": [0.1, 0.01]}}, r"increasing numbers; got {'learning_rate': \[0.1, 0.01\]}"),
        ({"grid": {"learning_rate": "0.1"}}, "increasing numbers"),
        ({"grid": {"learning_rate": [0.1]}, "learning_rate": 0.1}, "a fixes learning_rate, which its grid has too"),
    ],
)
def test_a_wrong_arm_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_arm("a", {"head": "softmax", **options}, 1e-3)


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
    assert describe_setting(setting) == "learning_rate 0.003, log_temperature -2.08"


def test_settings_that_diverge_rank_last_and_nothing_is_returned_if_all_do():
    grid = {"learning_rate": (RATES, 1e-3)}
    assert tune(grid, Concave(3.0, limit=0.02), count=5, epochs=9)["setting"] == {"learning_rate": 0.01}
    assert tune(grid, lambda *_: None, count=5, epochs=9) is None
    tuned = tune({}, lambda *_: 3.0, count=5, epochs=9)  # the only setting without a grid
    assert (tuned["setting"], tuned["score"], tuned["count"], tuned["at_end"]) == ({}, 3.0, 1, [])
