"""Words that a tokenizer does not know make choices tie, and a tie counts as guessing does."""

import warnings
from dataclasses import replace

import pytest

from hf_sphere.analogies import (
    chance_level,
    make_questions,
    measure_questions,
    score_questions,
    scoring_names,
    search_configurations,
)

STEMS = [("犬", "鮪"), ("鯨", "麒")]
CHOICES = [[("麟", "鱗"), ("鶴", "龍")], [("鶴", "鼈"), ("鷹", "麟"), ("鮪", "鱗")]]
QUESTIONS = make_questions(STEMS, CHOICES, answers=[0, 0])
KNOWN = make_questions(
    [("word", "language"), ("cat", "dog")], [[("note", "music"), ("paint", "tale")], [("in", "out"), ("sun", "day")]]
)

ignored = pytest.mark.filterwarnings("ignore:the tokenizer of .* does not know the words:UserWarning")


@ignored
@pytest.mark.parametrize("scoring", scoring_names())
@pytest.mark.parametrize("batch_size", [1, None])
def test_unknown_words_are_guessed_with_every_configuration(tiny_bert, scoring, batch_size):
    for answers in ((0, 0), (1, 2)):
        questions = [replace(one, answer=answer) for one, answer in zip(QUESTIONS, answers, strict=True)]
        scores = score_questions(questions, tiny_bert, scoring, batch_size=batch_size)
        assert scores.accuracy(questions) == pytest.approx(chance_level(questions)) == pytest.approx(5 / 12)
        assert all(len(set(costs)) == 1 for costs in scores.by_question())  # exactly equal
    accuracy = search_configurations(measure_questions(QUESTIONS, tiny_bert, scoring, batch_size=batch_size)).accuracy
    assert accuracy.tolist() == pytest.approx([5 / 12] * len(accuracy))


@pytest.mark.parametrize("scoring", ["perplexity", "embedding_similarity"])
def test_unknown_words_are_named_once(tiny_bert, scoring):
    with pytest.warns(UserWarning, match=r"does not know the words 犬, 鮪, .*龍\. Choices .* counts 1/k") as caught:
        score_questions([*KNOWN, *QUESTIONS], tiny_bert, scoring)
    assert len(caught) == 1
    assert "music" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score_questions(KNOWN, tiny_bert, "pmi")
