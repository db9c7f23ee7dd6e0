import pytest
import torch

from hf_sphere.analogies import (
    make_questions,
    measure_questions,
    score_questions,
    scoring_names,
    search_configurations,
    select_configuration,
)
from hf_sphere.analogies.benchmarks import BenchmarkRun
from hf_sphere.analogies.evaluation import search_templates
from hf_sphere.analogies.scoring import base, scoring_class
from hf_sphere.analogies.scoring.base import Engine
from hf_sphere.analogies.search import PUBLISHED_GRID, bootstrap_interval, guessing_quantile

PAIRS = [("cat", "dog"), ("red", "sea"), ("man", "king"), ("in", "out"), ("eat", "food")]
QUESTIONS = make_questions(PAIRS[:3], [PAIRS[1:3], PAIRS[2:5], PAIRS[3:5]], [0, 2, 1])


@pytest.mark.parametrize("scoring", scoring_names())
def test_chunked_scores_equal_scores_of_one_call(tiny_bert, monkeypatch, scoring):
    expected = search_configurations(measure_questions(QUESTIONS, tiny_bert, scoring, template="is-to-as"))
    costs = score_questions(QUESTIONS, tiny_bert, scoring).costs
    monkeypatch.setattr(base, "QUESTIONS_AT_ONCE", 1)
    told = []
    found = search_templates(Engine(tiny_bert, progress=told.append), QUESTIONS, scoring, ["is-to-as"])
    assert told == [1, 1, 1]
    assert found.configurations == expected.configurations
    assert torch.equal(found.accuracy, expected.accuracy)
    torch.testing.assert_close(score_questions(QUESTIONS, tiny_bert, scoring).costs, costs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scoring", scoring_names())
@pytest.mark.parametrize("grid", ["none", "published"])
def test_the_search_of_several_templates_is_the_search_of_each(tiny_bert, scoring, grid):
    templates = ["is-to-what", "is-to-as"]
    found = search_templates(Engine(tiny_bert), QUESTIONS, scoring, templates, grid)
    if grid == "none":
        assert found.configurations == [{"scoring": scoring, "template": template} for template in templates]
        scores = [score_questions(QUESTIONS, tiny_bert, **one).accuracy(QUESTIONS) for one in found.configurations]
        assert found.accuracy.tolist() == pytest.approx(scores)
        return
    measured = (measure_questions(QUESTIONS, tiny_bert, scoring, template=template) for template in templates)
    each = [search_configurations(measurements, grid=PUBLISHED_GRID) for measurements in measured]
    assert found.configurations == [*each[0].configurations, *each[1].configurations]
    assert found.accuracy.tolist() == [*each[0].accuracy.tolist(), *each[1].accuracy.tolist()]


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


def test_the_report_is_for_the_best_configuration_on_validation(tiny_bert, tmp_path):
    templates = ["is-to-what", "is-to-as"]
    test = make_questions(PAIRS[:2], [PAIRS[2:5], PAIRS[2:4]], [1, 0])
    run = BenchmarkRun(Engine(tiny_bert), "full", {"few": (QUESTIONS, test)}, {"pmi": templates}, tmp_path, True)
    report = run.compute("few", "pmi")
    searched = search_templates(Engine(tiny_bert), QUESTIONS, "pmi", templates)
    selected = select_configuration(searched)
    assert report["configuration"] == selected.configuration
    assert (report["validation_accuracy"], report["num_tied"]) == (selected.accuracy, selected.tied)
    assert (report["num_configurations"], report["num_eval_questions"]) == (2 * 31_350, 2)
    scores = score_questions(test, tiny_bert, **selected.configuration)
    untuned = score_questions(test, tiny_bert, "pmi", template="is-to-what")
    assert (report["eval_accuracy"], report["untuned_accuracy"]) == (scores.accuracy(test), untuned.accuracy(test))
    assert report["predictions"] == scores.predictions.tolist()
    assert (report["eval_accuracy_low"], report["eval_accuracy_high"]) == bootstrap_interval(scores.correct(test))
    assert report["chance_level"] == pytest.approx(5 / 12)
    assert report["selection_noise_high"] == guessing_quantile(torch.tensor([3, 2]))
