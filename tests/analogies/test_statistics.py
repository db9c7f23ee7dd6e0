import dataclasses
import itertools
import math

import pytest
import scipy.stats
import torch
from hypothesis import assume, given, strategies as st

from hf_sphere.analogies import search
from hf_sphere.analogies.search import SearchResult, bootstrap_interval, guessing_quantile, selection_noise


def result_of(predictions, num_choices):
    """A search result with these predictions."""
    answers = torch.zeros_like(num_choices)
    return SearchResult(
        columns={"number": tuple(range(len(predictions)))},
        lowest=predictions == torch.arange(int(num_choices.max()))[:, None, None],
        answers=answers,
        num_choices=num_choices,
        accuracy=(predictions == answers).double().mean(dim=1),
    )


def draw_answers(num_choices, generator=None, *shape):
    return (torch.rand(*shape, len(num_choices), generator=generator, dtype=torch.float64) * num_choices).long()


def random_result(num_configurations, num_choices, generator=None):
    return result_of(draw_answers(num_choices, generator, num_configurations), num_choices)


@pytest.mark.parametrize(("right", "total"), [(30, 100), (110, 337), (5, 37)])
def test_the_bootstrap_interval_matches_the_quantiles_of_resamples(right, total):
    correct = torch.arange(total) < right
    generator = torch.Generator().manual_seed(0)
    resampled = correct[torch.randint(total, (20_000, total), generator=generator)].double().mean(1)
    expected = resampled.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    assert bootstrap_interval(correct) == pytest.approx(expected, abs=1.01 / total)


def test_the_bootstrap_breaks_ties_at_random():
    correct = torch.tensor([1.0] * 30 + [1 / 3] * 60 + [0.0] * 10, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    resampled = torch.bernoulli(correct[torch.randint(100, (20_000, 100), generator=generator)], generator=generator)
    expected = resampled.mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    assert bootstrap_interval(correct) == pytest.approx(expected, abs=0.0101)


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_the_interval_of_identical_outcomes_is_a_point(right):
    assert bootstrap_interval(torch.full((20,), right)) == (right, right)


def test_bad_input_is_refused():
    correct = {"must have the shape": torch.zeros(0), r"got \(2, 2\)": torch.zeros(2, 2)}
    for message, outcomes in (correct | {"boolean, or between 0 and 1": torch.tensor([1.5])}).items():
        with pytest.raises(ValueError, match=message):
            bootstrap_interval(outcomes)
    for num_choices, message in (
        (torch.zeros(0), r"of the shape \(Q,\)"),
        (torch.ones(2, 2), r"of the shape \(Q,\)"),
        (torch.tensor([3, 0]), r"must be at least 1.*got tensor\(\[3, 0\]\)"),
    ):
        with pytest.raises(ValueError, match=message):
            guessing_quantile(num_choices)
    with pytest.raises(ValueError, match="num_repeats must be at least 1; got 0"):
        selection_noise(random_result(5, torch.full((20,), 3)), num_repeats=0)


@pytest.mark.parametrize(("total", "choices"), [(1, 5), (37, 5), (337, 5), (228, 4), (1799, 4)])
def test_the_guessing_quantile_of_equal_choice_counts_is_binomial(total, choices):
    found = guessing_quantile(torch.full((total,), choices))
    assert found * total == pytest.approx(scipy.stats.binom(total, 1 / choices).ppf(0.95), abs=1e-9)


@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=7))
def test_the_guessing_quantile_matches_a_sum_over_all_outcomes(counts):
    totals = [0.0] * (len(counts) + 1)
    for outcome in itertools.product((False, True), repeat=len(counts)):
        chances = (1 / count if right else 1 - 1 / count for right, count in zip(outcome, counts, strict=True))
        totals[sum(outcome)] += math.prod(chances)
    below = list(itertools.accumulate(totals))
    assume(all(abs(value - 0.95) > 1e-9 for value in below))
    expected = next(number for number, value in enumerate(below) if value > 0.95) / len(counts)
    assert guessing_quantile(torch.tensor(counts)) == expected


def test_with_random_scores_the_chosen_configuration_is_at_chance_on_test_questions():
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([2, 3, 4, 5, 5, 5, 4, 3] * 5)
    validation, test = random_result(200, counts[:20], generator), random_result(200, counts, generator)
    reached = []
    for _ in range(4000):
        answers, others = draw_answers(counts[:20], generator), draw_answers(counts, generator)
        chosen = (validation.predictions == answers).sum(dim=1).argmax()
        reached.append(int((test.predictions[chosen] == others).sum()))
    right, level = torch.tensor(reached), round(guessing_quantile(counts) * len(counts))
    assert (right <= level).double().mean() > 0.95 - 0.015
    assert (right < level).double().mean() < 0.95 + 0.015
    assert float(right.double().mean()) == pytest.approx(float((1 / counts).sum()), abs=0.2)


@pytest.mark.parametrize("rows_at_a_time", [1, 7, 2048])
def test_selection_noise_matches_a_loop_over_random_answers(monkeypatch, rows_at_a_time):
    monkeypatch.setattr(search, "ROWS_AT_A_TIME", rows_at_a_time)
    result = random_result(30, torch.tensor([5, 3, 4, 2, 5, 5]))
    noise = selection_noise(result, num_repeats=40, seed=7)

    rows = result.predictions.tolist()
    drawn = draw_answers(result.num_choices, torch.Generator().manual_seed(7), 40).tolist()
    best = [max(sum(map(int.__eq__, row, answers)) for row in rows) / len(answers) for answers in drawn]
    assert noise.mean == pytest.approx(sum(best) / 40, abs=1e-12)
    assert noise.quantile == pytest.approx(float(torch.tensor(best, dtype=torch.float64).quantile(0.95)), abs=1e-12)


def test_the_noise_of_a_configuration_whose_choices_all_tie_is_the_chance_level():
    counts = torch.tensor([2, 3, 4, 4])
    alone = random_result(1, counts)
    exists = (torch.arange(4)[:, None] < counts)[:, None]
    noise = selection_noise(dataclasses.replace(alone, lowest=exists), num_repeats=20)
    chance = (1 / 2 + 1 / 3 + 1 / 4 + 1 / 4) / 4
    assert (noise.mean, noise.quantile) == (pytest.approx(chance), pytest.approx(chance))


def test_the_noise_of_one_configuration_is_the_chance_level():
    counts = torch.full((200,), 4)
    noise = selection_noise(random_result(1, counts), num_repeats=1000)
    assert noise.mean == pytest.approx(0.25, abs=0.005)
    assert noise.quantile == pytest.approx(guessing_quantile(counts), abs=0.0075)


def test_the_best_of_many_random_configurations_beats_chance():
    few, many = (selection_noise(random_result(count, torch.full((37,), 5))) for count in (10, 3000))
    assert 0.2 < few.mean < many.mean
    assert many.mean > 0.4
    assert many.quantile > many.mean


def test_identical_configurations_add_no_selection_noise():
    counts = torch.full((100,), 5)
    alike = result_of(random_result(1, counts).predictions.expand(3000, -1), counts)
    assert selection_noise(alike).mean == pytest.approx(0.2, abs=0.01)


def test_selection_noise_depends_only_on_its_seed():
    result = random_result(50, torch.full((20,), 3))
    first = selection_noise(result, num_repeats=20, seed=1)
    assert selection_noise(result, num_repeats=20, seed=1) == first
    assert selection_noise(result, num_repeats=20, seed=2) != first
