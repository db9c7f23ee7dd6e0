import itertools
import json

import pytest
import torch
from hypothesis import given, strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from hf_sphere.metrics import (
    accuracy_by_certainty,
    area_under_risk_coverage,
    calibration_errors,
    detection_scores,
    expected_calibration_error,
    reliability_bins,
    risk_coverage,
)

HALF_RIGHT = torch.tensor([True, False] * 50)


@pytest.fixture(scope="module")
def answers(root):
    """Confidences and correctness of the golden logits, with reference values."""
    from safetensors.torch import load_file

    folder = root / "tests" / "golden"
    tensors = load_file(folder / "metrics.safetensors")
    confidences, predicted = tensors["logits"].softmax(-1).max(-1)
    known = json.loads((folder / "metrics.json").read_text())["calibration"]
    return confidences, predicted == tensors["targets"], known


def plain_error(confidences, correct, edges, norm):
    """Reference error over the bins (edge, next edge]; the first bin is closed."""
    total = 0.0
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        inside = [
            (confidence, right)
            for confidence, right in zip(confidences, correct, strict=True)
            if (low < confidence or (number == 0 and confidence == low)) and confidence <= high
        ]
        if inside:
            gap = abs(sum(right for _, right in inside) - sum(confidence for confidence, _ in inside)) / len(inside)
            total += len(inside) * gap**norm
    return (total / len(confidences)) ** (1 / norm)


@pytest.mark.parametrize("num_bins", [10, 15, 50])
@pytest.mark.parametrize("norm", [1, 2])
def test_the_equal_mass_error_matches_the_paper(answers, num_bins, norm):
    confidences, correct, known = answers
    error = expected_calibration_error(confidences, correct, num_bins=num_bins, norm=norm, binning="equal_mass")
    assert error == pytest.approx(known[f"bins{num_bins}_norm{norm}"], abs=1e-12)


def test_the_named_errors_match_their_papers(answers):
    confidences, correct, known = answers
    errors = calibration_errors(confidences, correct)
    assert errors["calibration_error_equal_width_l1"] == expected_calibration_error(confidences, correct)
    width = plain_error(confidences.tolist(), correct.tolist(), [number / 15 for number in range(16)], 1)
    assert errors == {
        "calibration_error_equal_mass_l2": pytest.approx(known["bins15_norm2"], abs=1e-12),
        "calibration_error_equal_width_l1": pytest.approx(width, abs=1e-12),
    }
    assert calibration_errors(confidences.float(), correct.long()) == pytest.approx(errors, abs=1e-6)


@given(
    answers=st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=40),
    num_bins=st.sampled_from([1, 2, 5, 10, 20]),
    norm=st.sampled_from([1, 2, 3.5]),
)
def test_equal_width_bins_are_half_open_intervals(answers, num_bins, norm):
    confidences, correct = [number / 20 for number, _ in answers], [right for _, right in answers]
    error = expected_calibration_error(
        torch.tensor(confidences, dtype=torch.float64),
        torch.tensor(correct),
        num_bins=num_bins,
        norm=norm,
        binning="equal_width",
    )
    edges = [number / num_bins for number in range(num_bins + 1)]
    assert error == pytest.approx(plain_error(confidences, correct, edges, norm), abs=1e-12)


@given(answers=st.integers(1, 60), num_bins=st.integers(1, 20), seed=st.integers(0, 1000))
def test_sizes_of_equal_mass_bins_differ_by_at_most_two(answers, num_bins, seed):
    confidences = torch.rand(answers, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    bins = reliability_bins(confidences, confidences > 0.5, num_bins=num_bins)
    assert bins.count.sum() == answers
    assert bins.count.max() - bins.count.min() <= 2  # 2 because of rounding in the published program
    filled = bins.count > 0
    assert (bins.confidence[filled].diff() > 0).all()
    assert bins.confidence[~filled].isnan().all()


@pytest.mark.parametrize("binning", ["equal_mass", "equal_width"])
def test_bins_do_not_depend_on_the_order_of_tied_predictions(binning):
    confidences = torch.randint(0, 4, (200,)) / 3
    correct = torch.rand(200) < confidences
    errors = set()
    for _ in range(5):
        order = torch.randperm(200)
        errors.add(round(expected_calibration_error(confidences[order], correct[order], binning=binning), 12))
    assert len(errors) == 1


def test_bins_of_a_constant_confidence_have_the_mean_accuracy():
    bins = reliability_bins(torch.full((100,), 0.75), HALF_RIGHT, num_bins=4)
    torch.testing.assert_close(bins.confidence, torch.full((4,), 0.75, dtype=torch.float64))
    torch.testing.assert_close(bins.accuracy, torch.full((4,), 0.5, dtype=torch.float64))
    assert bins.count.tolist() == [25] * 4
    for confidence, binning in itertools.product((0.0, 0.5, 1.0), ("equal_mass", "equal_width")):
        error = expected_calibration_error(torch.full((100,), confidence), HALF_RIGHT, binning=binning)
        assert error == pytest.approx(abs(confidence - 0.5), abs=1e-12)


def tenths(dtype):
    """Confidences k / 15 and between, with the error .5175 of the right bins."""
    confidences = torch.tensor([0.6] * 10 + [0.64] * 10 + [0.2] * 10 + [0.23] * 10, dtype=dtype)
    return confidences, [1] * 10 + [0] * 10 + [1] * 10 + [0] * 10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_confidence_at_the_end_of_a_bin_is_in_it_in_every_dtype_and_list(dtype):
    confidences, correct = tenths(dtype)
    assert expected_calibration_error(confidences, correct) == pytest.approx(0.5175, abs=1e-3)
    if dtype in (torch.float64, torch.float32):
        assert expected_calibration_error(confidences.tolist(), correct) == pytest.approx(0.5175, abs=1e-7)


@pytest.mark.parametrize("num_bins", [3, 7, 10, 15, 49])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fractions_are_in_their_bins(num_bins, dtype):
    numerators = torch.arange(1, 4 * num_bins + 1)
    confidences = numerators.to(dtype) / len(numerators)
    bins = reliability_bins(confidences, numerators > 3, num_bins=num_bins, binning="equal_width")
    assert bins.count.tolist() == [4] * num_bins
    above = torch.tensor([0.2, 0.2000000001], dtype=torch.float64)  # just above the end of a bin, so in the next
    assert reliability_bins(above, [1, 1], num_bins=5, binning="equal_width").count.tolist() == [1, 1, 0, 0, 0]


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


def test_accuracy_by_certainty_begins_with_the_least_certain_group_and_ties_share_theirs():
    correct = torch.tensor([True, False, True, True, False])
    groups = accuracy_by_certainty(torch.tensor([0.9, 0.1, 0.7, 0.5, 0.3]), correct, num_groups=2)
    assert groups == pytest.approx([1 / 3, 1.0])  # groups of three and two
    assert accuracy_by_certainty(torch.ones(4), torch.tensor([1, 1, 1, 0]), num_groups=2) == [0.75, 0.75]
    assert accuracy_by_certainty(torch.tensor([2.0, 1.0]), torch.tensor([1, 0])) == [0.0, 1.0]  # two groups at most


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


def test_lists_keep_the_precision_of_python():
    assert detection_scores([16777217.0, 16777219.0], [16777216.0, 16777218.0])["auroc"] == 0.75
    with pytest.raises(ValueError, match="inside must be exact in float64"):
        detection_scores([2**53 + 1], [2**53])
