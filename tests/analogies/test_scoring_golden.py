import json

import pytest
import torch

from hf_sphere.analogies.evaluation import measure_questions, score_questions
from hf_sphere.analogies.questions import make_questions


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
