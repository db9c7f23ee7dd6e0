import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_sphere.analogies import (
    SCORINGS,
    LanguageModel,
    ScoreCache,
    SearchResult,
    bootstrap_interval,
    make_questions,
    measure_questions,
    score_questions,
    search_configurations,
    selection_noise,
)
from hf_sphere.analogies.evaluation import AnalogyEvaluation, can_score, report_accuracy

PAIRS = [("cat", "dog"), ("red", "sea"), ("man", "king"), ("in", "out"), ("eat", "food")]
QUESTIONS = make_questions(PAIRS[:3], [PAIRS[1:3], PAIRS[2:5], PAIRS[3:5]], [0, 2, 1])


@pytest.fixture(scope="module")
def tiny(root):
    return LanguageModel.load(root / "tests" / "golden" / "analogy" / "tiny-bert")


@pytest.fixture
def in_pieces(monkeypatch):
    """Let every question with its 24 orders be a piece of its own."""
    monkeypatch.setattr(LanguageModel, "batch_tokens", 24 * 3)


@pytest.mark.parametrize("scoring", ["embedding_similarity", "hypothesis_bias", "marginal_bias", "perplexity", "pmi"])
def test_pieces_give_what_all_at_once_gives(tiny, in_pieces, scoring):
    told = []
    found = AnalogyEvaluation(tiny, batch_size=512).search(QUESTIONS, scoring, ["is-to-as"], told.append)
    measured = measure_questions(QUESTIONS, tiny, scoring, template="is-to-as", batch_size=512)
    expected = search_configurations(measured, QUESTIONS)
    assert told == [1, 1, 1]
    assert found.columns == expected.columns
    assert torch.equal(found.predictions, expected.predictions)
    assert torch.equal(found.num_choices, torch.tensor([2, 3, 2]))


@pytest.mark.parametrize("scoring", SCORINGS)
def test_without_a_grid_there_is_one_configuration_a_template(tiny, scoring):
    templates = ["{a} and {b}", "{b} of {a}"] if scoring == "relation_embedding" else ["is-to-what", "is-to-as"]
    found = AnalogyEvaluation(tiny, grid="none").search(QUESTIONS, scoring, templates)
    assert [found.configuration(number) for number in range(2)] == [
        {"scoring": scoring, "template": template} for template in templates
    ]
    for number, template in enumerate(templates):
        scores = score_questions(QUESTIONS, tiny, scoring, template=template)
        assert found.predictions[number].tolist() == scores.predictions.tolist()
        assert found.accuracy[number] == pytest.approx(scores.accuracy(QUESTIONS))


def test_the_published_grid_is_a_part_of_the_full_one(tiny):
    sizes = [
        len(AnalogyEvaluation(tiny, grid=grid).search(QUESTIONS, "perplexity", ["is-to-what"]))
        for grid in ("full", "published")
    ]
    assert sizes == [6 * 11 * 19, 6 * 11 * 15]


def test_work_is_counted_by_distinct_sentences_that_the_cache_lacks(tiny, tmp_path):
    cache = ScoreCache(tmp_path / "scores.sqlite")
    evaluation, two = AnalogyEvaluation(tiny, cache=cache), QUESTIONS[:2]
    sentences, sequences = evaluation.estimate_work(two, ["perplexity", "marginal_bias"], ["is-to-what"])
    assert sentences == 24 * (2 * 2 + 3 * 3)  # the perplexity's are among them
    assert sequences > sentences
    evaluation.search(two, "perplexity", ["is-to-what"])
    left, _ = evaluation.estimate_work(two, ["perplexity", "marginal_bias"], ["is-to-what"])
    assert left == sentences - 24 * (2 + 3)
    assert evaluation.estimate_work(two, ["perplexity"], ["is-to-what"]) == (0, 0)
    assert evaluation.estimate_work(two, ["embedding_similarity", "relation_embedding"], ["is-to-what"]) == (0, 0)


def test_work_of_many_questions_is_extrapolated(tiny):
    evaluation = AnalogyEvaluation(tiny, grid="none")
    some = make_questions([PAIRS[0]] * 6, [PAIRS[1:3]] * 6)
    sentences, _ = evaluation.estimate_work(some, ["perplexity"], ["is-to-what"])
    assert sentences == 2 * 3  # the two that are looked at are the same


@pytest.mark.parametrize(
    ("kind", "possible"),
    [
        ("masked", set(SCORINGS)),
        ("causal", set(SCORINGS) - {"hypothesis_bias"}),
        ("embedding", {"embedding_similarity", "relation_embedding"}),
    ],
)
def test_models_can_do_what_their_kind_can(tiny, monkeypatch, kind, possible):
    monkeypatch.setattr(tiny, "kind", kind)
    assert {scoring for scoring in SCORINGS if can_score(tiny, scoring)} == possible


def result_of(predictions: list[list[int]], answers: list[int], **columns: tuple) -> SearchResult:
    made, right = torch.tensor(predictions, dtype=torch.int8), torch.tensor(answers)
    return SearchResult(
        columns={"scoring": ("perplexity",) * len(made), "template": ("is-to-what",) * len(made), **columns},
        predictions=made,
        answers=right,
        num_choices=torch.full_like(right, 3),
        accuracy=(made == right).double().mean(1),
    )


WEIGHTS = {"negative_weight": (0.4, 0.0, 0.2)}


def test_the_report_is_of_the_best_on_validation():
    validation = result_of([[0, 0], [0, 1], [1, 1]], [0, 1], **WEIGHTS)
    test = result_of([[2, 1, 0], [2, 0, 0], [0, 0, 0]], [2, 1, 0], **WEIGHTS)
    report, answers = report_accuracy(validation, test, num_shuffles=20, seed=3)
    assert answers.tolist() == [2, 0, 0]
    assert report["eval_accuracy"] == pytest.approx(2 / 3)  # not that of the best on test, 1
    assert report["validation_accuracy"] == 1
    assert report["configuration"]["negative_weight"] == 0.0
    assert (report["num_configurations"], report["num_tied"]) == (3, 1)
    assert (report["num_eval_questions"], report["num_validation_questions"]) == (3, 2)
    interval = bootstrap_interval(torch.tensor([True, False, True]), seed=3)
    assert (report["eval_accuracy_low"], report["eval_accuracy_high"]) == interval
    noise = selection_noise(validation, test, num_repeats=20, seed=3)
    assert (report["selection_noise"], report["selection_noise_high"]) == (noise.test_mean, noise.test_quantile)
    assert report["validation_noise"] == noise.validation_mean


def test_untuned_is_the_first_configuration_with_the_defaults():
    columns = {"negative_weight": (0.4, 0.0, 0.0), "positive_aggregation": ("index_0", "mean", "index_0")}
    validation = result_of([[0, 0], [0, 0], [0, 0]], [1, 1], **columns)
    test = result_of([[0, 0], [1, 1], [1, 0]], [1, 1], **columns)
    assert report_accuracy(validation, test, num_shuffles=5)[0]["untuned_accuracy"] == 0.5


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), validation=st.integers(1, 12), test=st.integers(1, 12))
def test_accuracies_chance_and_noise_are_shares(seed, validation, test):
    generator = torch.Generator().manual_seed(seed)
    weights = {"negative_weight": (0.0, 0.2, 0.4, 0.6)}
    first, second = (
        result_of(
            torch.randint(3, (4, count), generator=generator).tolist(),
            torch.randint(3, (count,), generator=generator).tolist(),
            **weights,
        )
        for count in (validation, test)
    )
    report, _ = report_accuracy(first, second, num_shuffles=10, seed=seed)
    assert all(0 <= value <= 1 for name, value in report.items() if not name.startswith(("num_", "configuration")))
    assert report["eval_accuracy_low"] <= report["eval_accuracy"] <= report["eval_accuracy_high"]
    assert report["chance_level"] == pytest.approx(1 / 3)
