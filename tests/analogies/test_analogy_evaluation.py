import json
import sys
import warnings
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from doubles import model_that_knows_all

from hf_sphere.analogies import (
    chance_level,
    make_questions,
    measure_questions,
    prompts,
    score_questions,
    scoring as scorings,
    scoring_names,
    search_configurations,
    select_configuration,
)
from hf_sphere.analogies.evaluation import PUBLISHED_GRID, Scores, evaluate_scoring, search_templates
from hf_sphere.analogies.scoring import Engine, Perplexity, scoring_class

PAIRS = [("cat", "dog"), ("red", "sea"), ("man", "king"), ("in", "out"), ("eat", "food")]
QUESTIONS = make_questions(PAIRS[:3], [PAIRS[1:3], PAIRS[2:5], PAIRS[3:5]], [0, 2, 1])
STEMS = [("犬", "鮪"), ("鯨", "麒")]
CHOICES = [[("麟", "鱗"), ("鶴", "龍")], [("鶴", "鼈"), ("鷹", "麟"), ("鮪", "鱗")]]
UNKNOWN = make_questions(STEMS, CHOICES, answers=[0, 0])
"""Of words that the tokenizer does not know, which make choices tie; a tie counts as guessing does."""


@pytest.mark.parametrize("scoring", scoring_names())
def test_chunked_scores_equal_scores_of_one_call(tiny_bert, monkeypatch, scoring):
    expected = search_configurations(measure_questions(QUESTIONS, tiny_bert, scoring, template="is-to-as"))
    costs = score_questions(QUESTIONS, tiny_bert, scoring).costs
    monkeypatch.setattr(scorings, "QUESTIONS_AT_ONCE", 1)
    found = search_templates(Engine(tiny_bert), QUESTIONS, scoring, ["is-to-as"])
    assert found.configurations == expected.configurations
    assert torch.equal(found.accuracy, expected.accuracy)
    torch.testing.assert_close(score_questions(QUESTIONS, tiny_bert, scoring).costs, costs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scoring", scoring_names())
@pytest.mark.parametrize("grid", ["none", "published"])
def test_the_search_of_several_templates_is_the_search_of_each(tiny_bert, scoring, grid):
    templates = ["is-to-what", "is-to-as"]
    found = search_templates(Engine(tiny_bert), QUESTIONS, scoring, templates, grid)
    if grid == "none":
        configurations = [{"scoring": scoring, "template": template} for template in templates]
        accuracy = [score_questions(QUESTIONS, tiny_bert, **one).accuracy(QUESTIONS) for one in configurations]
    else:
        measured = (measure_questions(QUESTIONS, tiny_bert, scoring, template=template) for template in templates)
        first, second = (search_configurations(measurements, grid=PUBLISHED_GRID) for measurements in measured)
        configurations = [*first.configurations, *second.configurations]
        accuracy = [*first.accuracy.tolist(), *second.accuracy.tolist()]
    assert (found.configurations, found.accuracy.tolist()) == (configurations, accuracy)


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


def test_the_report_is_for_the_best_configuration_on_validation(tiny_bert):
    templates = ["is-to-what", "is-to-as"]
    test = make_questions(PAIRS[:2], [PAIRS[2:5], PAIRS[2:4]], [1, 0])
    report = evaluate_scoring(Engine(tiny_bert), (QUESTIONS, test), "pmi", templates)
    selected = select_configuration(search_templates(Engine(tiny_bert), QUESTIONS, "pmi", templates))
    assert report["configuration"] == selected.configuration
    assert (report["validation_accuracy"], report["num_tied"]) == (selected.accuracy, selected.tied)
    assert (report["num_configurations"], report["num_eval_questions"]) == (2 * 31_350, 2)
    scores = score_questions(test, tiny_bert, **selected.configuration)
    untuned = score_questions(test, tiny_bert, "pmi", template="is-to-what")
    assert (report["eval_accuracy"], report["untuned_accuracy"]) == (scores.accuracy(test), untuned.accuracy(test))
    assert report["predictions"] == scores.predictions.tolist()
    assert report["chance_level"] == pytest.approx(5 / 12)


def test_the_interval_has_the_quantiles_of_resamples_in_which_ties_are_broken_at_random(monkeypatch):
    correct = torch.tensor([1.0] * 30 + [1 / 3] * 60 + [0.0] * 10, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    resampled = torch.bernoulli(correct[torch.randint(100, (20_000, 100), generator=generator)], generator=generator)
    expected = resampled.mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    monkeypatch.setattr(Scores, "correct", lambda scores, questions: correct)
    questions = make_questions([("a", "b")] * 100, [[("c", "d")]] * 100, [0] * 100)
    toy = Mock(language_model=model_that_knows_all())
    monkeypatch.setattr(Perplexity, "question_terms", lambda *args: [torch.ones(1, len(args[2]), 1)] * len(args[1]))
    report = evaluate_scoring(toy, (questions, questions), "perplexity", [None], "none")
    assert [report["eval_accuracy_low"], report["eval_accuracy_high"]] == pytest.approx(expected, abs=0.0101)


@pytest.mark.filterwarnings("ignore:the tokenizer of .* does not know the words:UserWarning")
@pytest.mark.parametrize("scoring", scoring_names())
@pytest.mark.parametrize("batch_size", [1, None])
def test_unknown_words_are_guessed_with_every_configuration(tiny_bert, scoring, batch_size):
    for answers in ((0, 0), (1, 2)):
        questions = [replace(one, answer=answer) for one, answer in zip(UNKNOWN, answers, strict=True)]
        scores = score_questions(questions, tiny_bert, scoring, batch_size=batch_size)
        assert scores.accuracy(questions) == pytest.approx(chance_level(questions)) == pytest.approx(5 / 12)
        assert all(len(set(costs)) == 1 for costs in scores.by_question())  # exactly equal
    accuracy = search_configurations(measure_questions(UNKNOWN, tiny_bert, scoring, batch_size=batch_size)).accuracy
    assert accuracy.tolist() == pytest.approx([5 / 12] * len(accuracy))


@pytest.mark.parametrize("scoring", ["perplexity", "embedding_similarity"])
def test_unknown_words_are_named_once(tiny_bert, scoring):
    with pytest.warns(UserWarning, match=r"does not know the words 犬, 鮪, .*龍\. Choices .* counts 1/k") as caught:
        score_questions([*QUESTIONS, *UNKNOWN], tiny_bert, scoring)
    assert len(caught) == 1
    assert "king" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score_questions(QUESTIONS, tiny_bert, "pmi")


@pytest.fixture(scope="module")
def golden(golden_folder):
    """Published cases by template: questions with reference values."""
    questions, cases = json.loads((golden_folder / "questions.json").read_text()), dict[str, list]()
    words = {(one["config"], one["split"], one["index"]): one for one in questions}
    for case in json.loads((golden_folder / "scores.json").read_text())["questions"]:
        question = words[case["config"], case["split"], case["index"]]
        (made,) = make_questions([question["stem"]], [question["choice"]])
        cases.setdefault(case["template"], []).append((made, case))
    return cases


def test_perplexities_and_predictions_match_the_publication(tiny_bert, golden):
    for template, cases in golden.items():
        questions, expected = zip(*cases, strict=True)
        measured = measure_questions(questions[::4], tiny_bert, template=template)
        for case, question, values in zip(expected[::4], questions[::4], measured.terms[0], strict=True):
            both = torch.tensor(case["positive_perplexities"]), torch.tensor(case["negative_perplexities"])
            published = torch.cat(both, dim=1).double()
            torch.testing.assert_close(values[:, : len(question.choices)].T, published, rtol=1e-5, atol=0)
        scores = score_questions(questions, tiny_bert, template=template)
        assert scores.predictions.tolist() == [case["perplexity_index_0_prediction"] for case in expected]


@pytest.mark.parametrize("number", range(3))
def test_marginal_bias_and_predictions_match_the_publication(tiny_bert, golden, number):
    for template, cases in golden.items():
        questions, expected = zip(*cases, strict=True)
        published = [case["marginal_bias_index_0"][number] for case in expected]
        weights = {name: published[0][name] for name in ("weight_head", "weight_tail")}
        scores = score_questions(questions, tiny_bert, "marginal_bias", template=template, **weights)
        for costs, case in zip(scores.by_question(), published, strict=True):
            assert costs == pytest.approx(case["score"], abs=1e-4)
        assert scores.predictions.tolist() == [case["prediction"] for case in published]


TOY = '''
from dataclasses import dataclass

import torch

from hf_sphere.analogies.scoring import Scoring


@dataclass(frozen=True, kw_only=True)
class Toy(Scoring):
    """Difference in length of the two words of a choice, without a model."""

    name = "toy"
    grid = {"scale": (1.0, -1.0)}

    scale: float = 1.0

    def question_terms(self, questions, permutations, engine):
        for question in questions:
            words = [(*question.stem, *pair) for pair in question.choices]
            yield torch.tensor([[[len(four[p[2]]) - len(four[p[3]]) for four in words] for p in permutations]]).double()

    def permutation_costs(self, terms):
        return self.scale * terms[0].abs()
'''
EMBEDDING_MODEL = model_that_knows_all("embedding")
OF_LENGTHS = make_questions([("word", "language")], [[("a", "bbbb"), ("cc", "dd"), ("e", "fff")]], [1])


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Add a scoring in a module outside of the package."""
    (tmp_path / "toy_scoring.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(prompts.SCORINGS, "toy", "toy_scoring:Toy")
    yield "toy"
    sys.modules.pop("toy_scoring", None)


def test_a_new_scoring_is_found_by_its_name_scores_questions_and_can_be_searched(toy):
    assert toy in prompts.scoring_names()
    assert score_questions(OF_LENGTHS, EMBEDDING_MODEL, toy).by_question() == [[3.0, 0.0, 2.0]]
    assert score_questions(OF_LENGTHS, EMBEDDING_MODEL, toy, scale=-1.0).predictions.tolist() == [0]
    result = search_configurations(measure_questions(OF_LENGTHS, EMBEDDING_MODEL, toy))
    assert len(result) == 2 * 6 * 11 * 19
    assert select_configuration(result).configuration == {
        **{"scoring": "toy", "negative_weight": 0.0, "scale": 1.0},
        **{"positive_aggregation": "mean", "negative_aggregation": "mean"},
    }
