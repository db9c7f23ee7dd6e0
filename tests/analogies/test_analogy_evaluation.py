import pytest
import torch
from hypothesis import given, strategies as st

from hf_sphere.analogies import (
    Question,
    ScoreCache,
    SearchResult,
    make_questions,
    measure_questions,
    score_questions,
    scoring_names,
    search_configurations,
    selection_noise,
)
from hf_sphere.analogies.evaluation import (
    Scores,
    answer_questions,
    report_accuracy,
    search_templates,
    untuned_configuration,
)
from hf_sphere.analogies.scoring import base, scoring_class
from hf_sphere.analogies.scoring.base import Engine
from hf_sphere.analogies.search import bootstrap_interval, guessing_quantile

PAIRS = [("cat", "dog"), ("red", "sea"), ("man", "king"), ("in", "out"), ("eat", "food")]
QUESTIONS = make_questions(PAIRS[:3], [PAIRS[1:3], PAIRS[2:5], PAIRS[3:5]], [0, 2, 1])


@pytest.fixture
def in_pieces(monkeypatch):
    """Score each question, with its 24 permutations, in a separate chunk."""
    monkeypatch.setattr(base, "TEXTS_AT_ONCE", 24 * 2)


@pytest.mark.parametrize("scoring", ["embedding_similarity", "hypothesis_bias", "marginal_bias", "perplexity", "pmi"])
def test_chunked_scores_equal_scores_of_one_call(tiny_bert, in_pieces, scoring):
    told = []
    found = search_templates(Engine(tiny_bert, 512, progress=told.append), QUESTIONS, scoring, ["is-to-as"])
    measured = measure_questions(QUESTIONS, tiny_bert, scoring, template="is-to-as", batch_size=512)
    expected = search_configurations(measured, QUESTIONS)
    assert told == [1, 1, 1]
    assert found.columns == expected.columns
    assert torch.equal(found.predictions, expected.predictions)
    assert torch.equal(found.num_choices, torch.tensor([2, 3, 2]))


@pytest.mark.parametrize("scoring", scoring_names())
def test_without_a_grid_there_is_one_configuration_per_template(tiny_bert, scoring):
    templates = ["is-to-what", "is-to-as"]
    found = search_templates(Engine(tiny_bert), QUESTIONS, scoring, templates, "none")
    assert [found.configuration(number) for number in range(2)] == [
        {"scoring": scoring, "template": template} for template in templates
    ]
    for number, template in enumerate(templates):
        scores = score_questions(QUESTIONS, tiny_bert, scoring, template=template)
        assert found.predictions[number].tolist() == scores.predictions.tolist()
        assert found.accuracy[number] == pytest.approx(scores.accuracy(QUESTIONS))


@pytest.mark.parametrize("scoring", scoring_names())
def test_chunked_answers_of_a_configuration_equal_those_of_one_call(tiny_bert, in_pieces, scoring):
    told = []
    untuned = untuned_configuration(scoring, None)
    found = answer_questions(Engine(tiny_bert, progress=told.append), QUESTIONS, untuned)
    assert sum(told) == 3
    assert torch.equal(found.costs, score_questions(QUESTIONS, tiny_bert, scoring).costs)


def test_the_best_configuration_reproduces_its_answers_of_the_search(tiny_bert):
    found = search_templates(Engine(tiny_bert), QUESTIONS, "marginal_bias", ["is-to-what", "is-to-as"])
    for number in (found.best(), 0, len(found) - 1):
        answers = answer_questions(Engine(tiny_bert), QUESTIONS, found.configuration(number))
        assert answers.predictions.tolist() == found.predictions[number].tolist()


def test_only_the_permutations_that_a_configuration_needs_are_scored(tiny_bert, tmp_path):
    cache = ScoreCache(tmp_path / "scores.jsonl")
    for aggregation, count in (("index_3", 1), ("mean", 8)):
        configuration = {"scoring": "perplexity", "positive_aggregation": aggregation}
        answer_questions(Engine(tiny_bert, cache=cache), QUESTIONS[:1], configuration)
        assert len(cache) == 2 * count


@pytest.mark.parametrize(
    ("kind", "possible"),
    [
        ("masked", set(scoring_names())),
        ("causal", set(scoring_names()) - {"hypothesis_bias"}),
        ("embedding", {"embedding_similarity"}),
    ],
)
def test_supported_scorings_depend_on_the_model_kind(kind, possible):
    assert {scoring for scoring in scoring_names() if kind in scoring_class(scoring).kinds} == possible


def result_of(predictions: list[list[int]], answers: list[int], **columns: tuple) -> SearchResult:
    made, right = torch.tensor(predictions), torch.tensor(answers)
    return SearchResult(
        columns={"scoring": ("perplexity",) * len(made), "template": ("is-to-what",) * len(made), **columns},
        lowest=made == torch.arange(3)[:, None, None],
        answers=right,
        num_choices=torch.full_like(right, 3),
        accuracy=(made == right).double().mean(1),
    )


def scores_of(predictions: torch.Tensor) -> Scores:
    """Scores of questions with three choices that result in these predictions."""
    return Scores((torch.arange(3) != predictions[:, None]).double(), torch.full_like(predictions, 3))


def asked(answers: list[int]) -> list[Question]:
    """Questions with three choices and these answers."""
    return make_questions([PAIRS[0]] * len(answers), [PAIRS[1:4]] * len(answers), answers)


def test_the_report_is_for_the_best_configuration_on_validation():
    weights = {"negative_weight": (0.4, 0.0, 0.2)}
    validation = result_of([[0, 0], [0, 1], [1, 1]], [0, 1], **weights)
    answers, untuned = scores_of(torch.tensor([2, 0, 0])), scores_of(torch.tensor([0, 0, 0]))
    report = report_accuracy(validation, asked([2, 1, 0]), answers, untuned, num_repeats=20, seed=3)
    assert report["eval_accuracy"] == pytest.approx(2 / 3)
    assert report["untuned_accuracy"] == pytest.approx(1 / 3)
    assert report["validation_accuracy"] == 1
    assert report["configuration"] == {"scoring": "perplexity", "template": "is-to-what", "negative_weight": 0.0}
    assert (report["num_configurations"], report["num_tied"]) == (3, 1)
    assert (report["num_eval_questions"], report["num_validation_questions"]) == (3, 2)
    interval = bootstrap_interval(torch.tensor([True, False, True]))
    assert (report["eval_accuracy_low"], report["eval_accuracy_high"]) == interval
    noise = selection_noise(validation, num_repeats=20, seed=3)
    assert (report["validation_noise"], report["validation_noise_high"]) == (noise.mean, noise.quantile)
    assert report["selection_noise_high"] == guessing_quantile(torch.tensor([3, 3, 3])) == pytest.approx(2 / 3)


@given(seed=st.integers(0, 10**6), validation=st.integers(1, 12), test=st.integers(1, 12))
def test_reported_accuracies_and_levels_are_fractions(seed, validation, test):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(3, shape, generator=generator)

    search = result_of(draw(4, validation).tolist(), draw(validation).tolist())
    answers = (scores_of(draw(test)), scores_of(draw(test)))
    report = report_accuracy(search, asked(draw(test).tolist()), *answers, num_repeats=10, seed=seed)
    assert all(0 <= value <= 1 for name, value in report.items() if not name.startswith(("num_", "configuration")))
    assert report["eval_accuracy_low"] <= report["eval_accuracy"] <= report["eval_accuracy_high"]
    assert report["chance_level"] == pytest.approx(1 / 3)
    assert report["chance_level"] <= report["selection_noise_high"]
