import json

import pytest
import torch
import torch.nn.functional as F

from hf_sphere.analogies.evaluation import measure_questions, score_questions
from hf_sphere.analogies.prompts import TEMPLATES
from hf_sphere.analogies.questions import make_questions


@pytest.fixture(scope="module")
def golden(root):
    """Published cases by template: questions with reference values."""
    folder = root / "tests" / "golden" / "analogy"
    cases: dict[str, list] = {}
    words = {
        (one["config"], one["split"], one["index"]): one for one in json.loads((folder / "questions.json").read_text())
    }
    for case in json.loads((folder / "scores.json").read_text())["questions"]:
        question = words[case["config"], case["split"], case["index"]]
        (made,) = make_questions([question["stem"]], [question["choice"]])
        cases.setdefault(case["template"], []).append((made, case))
    return cases


def test_perplexities_and_predictions_match_the_publication(tiny_bert, golden):
    for template, cases in golden.items():
        questions, expected = zip(*cases, strict=True)
        measured = measure_questions(questions[::4], tiny_bert, template=template)
        for case, question, values in zip(expected[::4], questions[::4], measured.terms[0], strict=True):
            published = torch.tensor(
                [positive + negative for positive, negative in zip(
                    case["positive_perplexities"], case["negative_perplexities"], strict=True
                )],
                dtype=torch.float64,
            )  # fmt: skip
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


def test_hypothesis_bias_masks_every_token_of_a_hidden_word(tiny_bert, golden):
    question = golden["she-to-as"][0][0]
    (costs,) = score_questions(
        [question], tiny_bert, "hypothesis_bias", weight_head=0.2, weight_tail=-0.4
    ).by_question()

    def perplexity(head, tail, hidden):
        """Plain pseudo-perplexity in float32, one mask at a time."""
        word = {"a": question.stem[0], "b": question.stem[1], "c": head, "d": tail}
        masks = " ".join(["[MASK]"] * len(tiny_bert.tokenizer.tokenize(word[hidden]))) if hidden else ""
        text = TEMPLATES["is-to-what"].format(**(word | ({hidden: masks} if hidden else {})))
        ids = tiny_bert.tokenizer(text, return_tensors="pt").input_ids[0]
        losses = []
        for place in range(1, len(ids) - 1):
            if ids[place] != tiny_bert.tokenizer.mask_token_id:
                masked = ids.clone()
                masked[place] = tiny_bert.tokenizer.mask_token_id
                with torch.no_grad():
                    losses.append(F.cross_entropy(tiny_bert.model.eval()(masked[None]).logits[0, place], ids[place]))
        return torch.stack(losses).double().mean().exp()

    sentence, head, tail = (
        torch.stack([perplexity(*pair, hidden) for pair in question.choices]) for hidden in ("", "c", "d")
    )
    logs = [(values / values.sum()).log() for values in (sentence, head, tail)]
    assert costs == pytest.approx((logs[0] - 0.2 * logs[1] + 0.4 * logs[2]).tolist(), abs=1e-5)
