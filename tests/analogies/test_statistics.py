import pytest
import scipy.stats
import torch

from hf_sphere.analogies import statistics
from hf_sphere.analogies.search import SearchResult
from hf_sphere.analogies.statistics import bootstrap_interval, selection_noise


def result_of(predictions, num_choices):
    """A search whose configurations answer so."""
    answers = torch.zeros_like(num_choices)
    return SearchResult(
        columns={"number": tuple(range(len(predictions)))},
        predictions=predictions.to(torch.int8),
        answers=answers,
        num_choices=num_choices,
        accuracy=(predictions == answers).double().mean(dim=1),
    )


def random_result(num_configurations, num_choices):
    return result_of((torch.rand(num_configurations, len(num_choices)) * num_choices).long(), num_choices)


@pytest.mark.parametrize(("right", "total", "confidence"), [(30, 100, 0.95), (110, 337, 0.95), (5, 37, 0.8)])
def test_the_bootstrap_interval_holds_the_quantiles_of_the_binomial_distribution(right, total, confidence):
    correct = torch.arange(total) < right
    low, high = bootstrap_interval(correct, confidence=confidence, num_resamples=100_000)
    expected = scipy.stats.binom(total, right / total).interval(confidence)
    assert low * total == pytest.approx(expected[0], abs=1)
    assert high * total == pytest.approx(expected[1], abs=1)


def test_the_bootstrap_interval_depends_on_its_seed_alone():
    correct = torch.arange(337) < 100
    first = bootstrap_interval(correct, num_resamples=100, seed=1)
    torch.manual_seed(5)
    assert bootstrap_interval(correct, num_resamples=100, seed=1) == first
    assert bootstrap_interval(correct, num_resamples=100, seed=2) != first


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_answers_that_are_all_alike_leave_no_room(right):
    assert bootstrap_interval(torch.full((20,), right)) == (right, right)


@pytest.mark.parametrize(
    ("correct", "options", "message"),
    [
        (torch.zeros(0), {}, "must have the shape"),
        (torch.zeros(2, 2), {}, r"got the shape \(2, 2\)"),
        (torch.tensor([0.5]), {}, "boolean or 0 and 1"),
        (torch.ones(3), {"confidence": 95}, "confidence must be between 0 and 1"),
        (torch.ones(3), {"num_resamples": 0}, "num_resamples at least 1"),
    ],
)
def test_bad_answers_are_refused(correct, options, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(correct, **options)


@pytest.mark.parametrize("rows_at_a_time", [1, 7, 2048])
def test_noise_is_what_a_plain_loop_over_random_answers_finds(monkeypatch, rows_at_a_time):
    monkeypatch.setattr(statistics, "ROWS_AT_A_TIME", rows_at_a_time)
    validation = random_result(30, torch.tensor([5, 3, 4, 2, 5, 5]))
    test = random_result(30, torch.tensor([4, 4, 3, 5]))
    drawn = {"validation": [], "test": []}
    draw = statistics._draw_answers

    def remember(num_choices, num_repeats, generator):
        answers = draw(num_choices, num_repeats, generator)
        drawn["validation" if num_choices is validation.num_choices else "test"] = answers.tolist()
        return answers

    monkeypatch.setattr(statistics, "_draw_answers", remember)
    noise = selection_noise(validation, test, num_repeats=40)

    best, reached = [], []
    for answers, others in zip(drawn["validation"], drawn["test"], strict=True):
        accuracies = [sum(map(int.__eq__, row, answers)) / len(answers) for row in validation.predictions.tolist()]
        best.append(max(accuracies))
        row = test.predictions[accuracies.index(max(accuracies))].tolist()
        reached.append(sum(map(int.__eq__, row, others)) / len(others))
    assert noise.validation_mean == pytest.approx(sum(best) / 40, abs=1e-12)
    assert noise.test_mean == pytest.approx(sum(reached) / 40, abs=1e-12)
    quantiles = torch.tensor([best, reached], dtype=torch.float64).quantile(0.95, dim=1).tolist()
    assert [noise.validation_quantile, noise.test_quantile] == pytest.approx(quantiles, abs=1e-12)


def test_each_question_has_its_own_number_of_answers():
    counts = torch.tensor([2, 3, 5])
    answers = statistics._draw_answers(counts, 30_000, torch.Generator().manual_seed(0))
    for question, count in enumerate(counts.tolist()):
        frequencies = torch.bincount(answers[:, question], minlength=count) / len(answers)
        assert len(frequencies) == count
        torch.testing.assert_close(frequencies, torch.full((count,), 1 / count), rtol=0, atol=0.015)


def test_one_configuration_alone_reaches_chance():
    counts = torch.full((200,), 4)
    noise = selection_noise(random_result(1, counts), random_result(1, counts), num_repeats=1000)
    assert noise.validation_mean == pytest.approx(0.25, abs=0.005)
    assert noise.test_mean == pytest.approx(0.25, abs=0.005)


def test_the_best_of_many_is_lucky_on_validation_and_guesses_on_test():
    few, many = (random_result(count, torch.full((37,), 5)) for count in (10, 3000))
    test = random_result(3000, torch.full((337,), 5))
    noise = selection_noise(many, test)
    assert selection_noise(few, few).validation_mean < noise.validation_mean
    assert noise.validation_mean > 0.4
    assert noise.validation_quantile > noise.validation_mean
    assert noise.test_mean == pytest.approx(0.2, abs=0.01)


def test_choosing_on_the_reported_questions_reports_the_luck():
    result = random_result(3000, torch.full((300,), 5))
    noise = selection_noise(result, result)
    assert noise.test_mean == noise.validation_mean > 0.26


def test_configurations_that_answer_alike_are_no_luck():
    counts = torch.full((100,), 5)
    alike = result_of(random_result(1, counts).predictions.expand(3000, -1), counts)
    assert selection_noise(alike, alike).validation_mean == pytest.approx(0.2, abs=0.01)


def test_noise_depends_on_its_seed_alone():
    result = random_result(50, torch.full((20,), 3))
    first = selection_noise(result, result, num_repeats=20, seed=1)
    assert selection_noise(result, result, num_repeats=20, seed=1) == first
    assert selection_noise(result, result, num_repeats=20, seed=2) != first
    assert "best on validation reaches" in str(first)


def test_a_search_on_other_configurations_is_refused():
    counts = torch.full((20,), 3)
    with pytest.raises(ValueError, match=r"on validation \(5\) and on test \(6\) differ"):
        selection_noise(random_result(5, counts), random_result(6, counts))
    with pytest.raises(ValueError, match="num_repeats must be at least 1; got 0"):
        selection_noise(random_result(5, counts), random_result(5, counts), num_repeats=0)
