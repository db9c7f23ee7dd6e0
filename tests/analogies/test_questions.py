import json

import pytest
from datasets import Dataset
from hypothesis import given, strategies as st

from hf_sphere.analogies.prompts import NEGATIVE_PERMUTATIONS, PERMUTATIONS, POSITIVE_PERMUTATIONS, TEMPLATES, fill
from hf_sphere.analogies.questions import Question, answers_of, chance_level, load_questions, make_questions

STEM = ("word", "language")
CHOICES = (("paint", "portrait"), ("note", "music"), ("tale", "story"))


def test_a_parquet_folder_loads_like_a_hub_repository(tmp_path):
    # Two configurations in the layout of the Hub
    rows = {"stem": [STEM, STEM], "answer": [1, 0], "choice": [CHOICES, CHOICES[:2]], "prefix": ["parts", "kinds"]}
    for config in ("sat", "u2"):
        (tmp_path / config).mkdir()
        Dataset.from_dict(rows).to_parquet(tmp_path / config / "test-00000-of-00001.parquet")
    expected = [Question(STEM, CHOICES, 1), Question(STEM, CHOICES[:2], 0)]
    assert load_questions(str(tmp_path), "u2", "test") == expected
    rows = Dataset.from_dict({"stem": [STEM], "answer": [1], "choice": [CHOICES]})
    rows.to_parquet(tmp_path / "sat" / "test-00000-of-00001.parquet")
    assert load_questions(str(tmp_path), "sat") == [Question(STEM, CHOICES, 1)]


def test_datasets_have_the_published_sizes(real_data):
    folder = str(real_data("relbert/analogy_questions"))
    sizes = {"sat": (37, 337), "u2": (24, 228), "u4": (48, 432), "google": (50, 500), "bats": (199, 1799)}
    for config, expected in sizes.items():
        assert tuple(len(load_questions(folder, config, split)) for split in ("validation", "test")) == expected


def test_the_chance_level_is_the_mean_of_one_over_the_number_of_choices():
    questions = [Question(STEM, CHOICES), Question(STEM, CHOICES[:2]), Question(STEM, CHOICES[:1])]
    assert chance_level(questions) == pytest.approx((1 / 3 + 1 / 2 + 1) / 3, abs=1e-15)


def test_missing_answers_raise_only_where_they_are_needed_and_columns_can_be_lists():
    made = make_questions([list(STEM)] * 2, [[list(pair) for pair in CHOICES]] * 2, [1, None])
    assert made == [Question(STEM, CHOICES, 1), Question(STEM, CHOICES)]
    with pytest.raises(ValueError, match=r"question 1, .* has no answer"):
        answers_of(made)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ((STEM, ()), "at least one choice"),
        ((("word",), CHOICES), "pairs of two words"),
        (("ab", CHOICES), "pairs of two words .*'ab'"),
        ((STEM, (*CHOICES, ("note", " "))), "pairs of two words"),
        ((("word", None), CHOICES), "pairs of two words"),
        ((STEM, CHOICES, 3), "has the answer 3; allowed are 0 to 2"),
        ((STEM, CHOICES, -1), "has the answer -1"),
        ((STEM, CHOICES, 1.5), r"has the answer 1\.5"),
    ],
)
def test_an_invalid_question_is_refused(parts, problem):
    with pytest.raises(ValueError, match=problem):
        Question(*parts)
    with pytest.raises(ValueError, match=problem):
        make_questions([parts[0]], [parts[1]], [*parts[2:]] or None)


WORDS = ("word", "language", "note", "music")


def test_templates_and_permutations_are_the_published_ones_in_their_order(golden_folder):
    published = json.loads((golden_folder / "scores.json").read_text())
    assert published["templates"] == TEMPLATES
    for kind, ours in (("positive", POSITIVE_PERMUTATIONS), ("negative", NEGATIVE_PERMUTATIONS)):
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


WRONG = ["is-to", "{a} {b} {c}", "{a} {b} {c} {d} {a}", "{a} {b} {c} {e}", "{a} {b} {c} {d", "{a!r} {b} {c} {d}"]


@pytest.mark.parametrize("template", [*WRONG, "{a} {b} {c} {d} {e}"])
def test_a_template_without_the_four_fields_is_rejected(template):
    with pytest.raises(ValueError, match=r"is not a template\. Use one of is-to-what, is-to-as, rel-same"):
        fill(template, WORDS)
