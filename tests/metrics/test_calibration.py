import itertools
import json

import pytest
import torch
from hypothesis import given, strategies as st

from hf_sphere.metrics import calibration_errors, expected_calibration_error, reliability_bins

HALF_RIGHT = torch.tensor([True, False] * 50)


@pytest.fixture(scope="module")
def answers(root):
    """Confidences and correctness of the golden logits, with reference values."""
    from safetensors.torch import load_file

    folder = root / "tests" / "golden"
    tensors = load_file(folder / "metrics.safetensors")
    confidences, predicted = tensors["logits"].softmax(-1).max(-1)
    return (
        confidences,
        predicted == tensors["targets"],
        json.loads((folder / "metrics.json").read_text())["calibration"],
    )


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
    bins = reliability_bins(
        numerators.to(dtype) / len(numerators), numerators > 3, num_bins=num_bins, binning="equal_width"
    )
    assert bins.count.tolist() == [4] * num_bins
    above = torch.tensor([0.2, 0.2000000001], dtype=torch.float64)  # just above the end of a bin, so in the next
    assert reliability_bins(above, [1, 1], num_bins=5, binning="equal_width").count.tolist() == [1, 1, 0, 0, 0]
