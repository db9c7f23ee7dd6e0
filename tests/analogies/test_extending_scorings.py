"""Adding a scoring requires only a class and a row in a table."""

import sys

import pytest
from doubles import model_that_knows_all

from hf_sphere.analogies import (
    make_questions,
    measure_questions,
    prompts,
    score_questions,
    search_configurations,
    select_configuration,
)

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
MODEL = model_that_knows_all("embedding")
QUESTIONS = make_questions([("word", "language")], [[("a", "bbbb"), ("cc", "dd"), ("e", "fff")]], [1])


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
    assert score_questions(QUESTIONS, MODEL, toy).by_question() == [[3.0, 0.0, 2.0]]
    assert score_questions(QUESTIONS, MODEL, toy, scale=-1.0).predictions.tolist() == [0]
    result = search_configurations(measure_questions(QUESTIONS, MODEL, toy))
    assert len(result) == 2 * 6 * 11 * 19
    assert select_configuration(result).configuration == {
        **{"scoring": "toy", "negative_weight": 0.0, "scale": 1.0},
        **{"positive_aggregation": "mean", "negative_aggregation": "mean"},
    }
