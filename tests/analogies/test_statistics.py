import itertools
import math

import pytest
import scipy.stats
import torch
from hypothesis import assume, given, strategies as st

from hf_sphere.analogies.search import bootstrap_interval, guessing_quantile


def draw_answers(num_choices, generator=None, *shape):
    return (torch.rand(*shape, len(num_choices), generator=generator, dtype=torch.float64) * num_choices).long()


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
    validation, test = draw_answers(counts[:20], generator, 200), draw_answers(counts, generator, 200)
    reached = []
    for _ in range(4000):
        answers, others = draw_answers(counts[:20], generator), draw_answers(counts, generator)
        chosen = (validation == answers).sum(dim=1).argmax()
        reached.append(int((test[chosen] == others).sum()))
    right, level = torch.tensor(reached), round(guessing_quantile(counts) * len(counts))
    assert (right <= level).double().mean() > 0.95 - 0.015
    assert (right < level).double().mean() < 0.95 + 0.015
    assert float(right.double().mean()) == pytest.approx(float((1 / counts).sum()), abs=0.2)
