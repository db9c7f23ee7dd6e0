import json

import pytest
from hypothesis import given, strategies as st

from hf_sphere.analogies.prompts import NEGATIVE_PERMUTATIONS, PERMUTATIONS, POSITIVE_PERMUTATIONS, TEMPLATES, fill

WORDS = ("word", "language", "note", "music")


@pytest.fixture(scope="module")
def published(root):
    return json.loads((root / "tests" / "golden" / "analogy" / "scores.json").read_text())


def test_templates_match_the_publication(published):
    assert published["templates"] == TEMPLATES


@pytest.mark.parametrize(("kind", "ours"), [("positive", POSITIVE_PERMUTATIONS), ("negative", NEGATIVE_PERMUTATIONS)])
def test_permutations_have_the_published_order(published, kind, ours):
    assert published[kind].split() == ["".join("abcd"[word] for word in permutation) for permutation in ours]


def test_positive_permutations_have_the_extremes_or_the_means_outside():
    assert len(set(PERMUTATIONS)) == 24
    for permutation in PERMUTATIONS:
        outside = {permutation[0], permutation[3]}
        assert (permutation in POSITIVE_PERMUTATIONS) == (outside in ({0, 3}, {1, 2}))


@given(st.sampled_from(PERMUTATIONS), st.sampled_from([*TEMPLATES, "{d}{a} ({b}), {c}"]))
def test_spans_locate_the_words_of_the_question(permutation, template):
    sentence = fill(template, WORDS, permutation, hidden=(2,))
    assert tuple(sentence.text[start:end] for start, end in sentence.spans) == WORDS
    assert sentence.hidden == (2,)


def test_a_permutation_sets_the_position_of_each_word_which_may_repeat_and_contain_braces():
    assert fill("is-to-what", WORDS, (1, 3, 0, 2)).text == "language is to music what word is to note"
    sentence = fill("{a}, {b}; {c}, {d}", ("{b}", "x", "{b}", "}"))
    assert sentence.text == "{b}, x; {b}, }"
    assert sentence.spans == ((0, 3), (5, 6), (8, 11), (13, 14))


@pytest.mark.parametrize(
    "template",
    [
        "is-to",
        "{a} {b} {c}",
        "{a} {b} {c} {d} {a}",
        "{a} {b} {c} {e}",
        "{a} {b} {c} {d",
        "{a!r} {b} {c} {d}",
        "{a} {b} {c} {d} {e}",
    ],
)
def test_a_template_without_the_four_fields_is_rejected(template):
    with pytest.raises(ValueError, match=r"is not a template\. Use one of is-to-what, is-to-as, rel-same"):
        fill(template, WORDS)
