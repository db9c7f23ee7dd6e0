import pytest
import torch
from hypothesis import given, strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from hf_sphere.metrics import detection_scores

NUMBERS = st.lists(st.integers(0, 12), min_size=1, max_size=50)


@given(inside=NUMBERS, outside=NUMBERS)
def test_auroc_is_the_fraction_of_ordered_pairs_with_ties_counted_half(inside, outside):
    pairs = [(a > b) + (a == b) / 2 for a in inside for b in outside]
    scores = detection_scores(torch.tensor(inside), torch.tensor(outside))
    assert scores["auroc"] == pytest.approx(sum(pairs) / len(pairs), abs=1e-15)


@given(inside=NUMBERS, outside=NUMBERS)
def test_fpr_uses_the_highest_threshold_with_95_percent_tpr(inside, outside):
    kept = [t for t in inside if 100 * sum(a >= t for a in inside) >= 95 * len(inside)]
    expected = sum(b >= max(kept) for b in outside) / len(outside)
    assert detection_scores(torch.tensor(inside), torch.tensor(outside))["fpr_at_95_tpr"] == expected


@pytest.mark.parametrize(("name", "reference"), [("auroc", roc_auc_score), ("aupr", average_precision_score)])
def test_areas_match_scikit_learn(name, reference):
    inside, outside = (torch.randn(3000) + 0.5).round(decimals=2), torch.randn(2000).round(decimals=2)
    expected = reference([1] * 3000 + [0] * 2000, torch.cat([inside, outside]).numpy())
    assert detection_scores(inside, outside)[name] == pytest.approx(expected, abs=1e-12)


def test_perfect_reversed_and_constant_scores_have_known_results():
    for inside, outside, auroc, fpr, aupr in (
        ([2.0, 3.0], [0.0, 1.0], 1.0, 0.0, 1.0),
        ([0.0, 1.0], [2.0, 3.0], 0.0, 1.0, (1 / 2 + 1 / 3) / 2),
        ([1.0, 1.0], [1.0], 0.5, 1.0, 2 / 3),
    ):
        scores = detection_scores(torch.tensor(inside), torch.tensor(outside))
        assert scores == {"auroc": auroc, "fpr_at_95_tpr": fpr, "aupr": pytest.approx(aupr, abs=1e-15)}
    # One of twenty scores may be below the threshold.
    assert detection_scores(torch.arange(20.0), torch.tensor([0.0, 0.5, 1.0, 1.5]))["fpr_at_95_tpr"] == 0.5


def test_lists_keep_the_precision_of_python():
    assert detection_scores([16777217.0, 16777219.0], [16777216.0, 16777218.0])["auroc"] == 0.75
    with pytest.raises(ValueError, match="inside must be exact in float64"):
        detection_scores([2**53 + 1], [2**53])
