import itertools

import pytest
import torch
from hypothesis import given, strategies as st

from hf_sphere.metrics import accuracy_by_certainty, area_under_risk_coverage, risk_coverage


def test_risk_is_the_error_rate_of_the_most_confident_predictions_and_the_area_its_mean():
    answers = torch.tensor([0.2, 0.9, 0.5, 0.7]), torch.tensor([False, True, True, False])
    coverage, risk = risk_coverage(*answers)
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert risk.tolist() == [0.0, 1 / 2, 1 / 3, 2 / 4]
    assert area_under_risk_coverage(*answers) == pytest.approx((0 + 1 / 2 + 1 / 3 + 2 / 4) / 4, abs=1e-15)
    concentrations = torch.tensor([1e6, -3.0, float("inf")])  # any real numbers
    assert risk_coverage(concentrations, torch.tensor([True, False, True]))[1].tolist() == [0.0, 0.0, 1 / 3]


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6))
def test_tied_predictions_have_the_mean_risk_over_their_orders(answers):
    expected, orders = torch.zeros(len(answers), dtype=torch.float64), 0
    for order in itertools.permutations(answers):
        ranked = sorted(order, key=lambda answer: -answer[0])  # stable: ties stay in this order
        wrong = torch.tensor([not right for _, right in ranked], dtype=torch.float64)
        expected += wrong.cumsum(0) / torch.arange(1, len(answers) + 1)
        orders += 1
    confidences, correct = (torch.tensor(column) for column in zip(*answers, strict=True))
    torch.testing.assert_close(risk_coverage(confidences, correct)[1], expected / orders, rtol=0, atol=1e-12)


def test_the_best_order_has_the_smallest_area_and_the_worst_the_largest():
    correct = torch.tensor([True] * 7 + [False] * 3)
    ranks = torch.arange(10.0)
    areas = [area_under_risk_coverage(torch.randperm(10), correct) for _ in range(20)]
    assert area_under_risk_coverage(-ranks, correct) <= min(areas)
    assert area_under_risk_coverage(ranks, correct) >= max(areas)


def test_accuracy_by_certainty_begins_with_the_least_certain_group_and_ties_share_theirs():
    correct = torch.tensor([True, False, True, True, False])
    groups = accuracy_by_certainty(torch.tensor([0.9, 0.1, 0.7, 0.5, 0.3]), correct, num_groups=2)
    assert groups == pytest.approx([1 / 3, 1.0])  # groups of three and two
    assert accuracy_by_certainty(torch.ones(4), torch.tensor([1, 1, 1, 0]), num_groups=2) == [0.75, 0.75]
    assert accuracy_by_certainty(torch.tensor([2.0, 1.0]), torch.tensor([1, 0])) == [0.0, 1.0]  # two groups at most
