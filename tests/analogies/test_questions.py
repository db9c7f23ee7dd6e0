import pytest
from datasets import Dataset

from hf_sphere.analogies.questions import (
    Question,
    answers_of,
    chance_level,
    check_questions,
    load_questions,
    make_questions,
)

STEM = ("word", "language")
CHOICES = (("paint", "portrait"), ("note", "music"), ("tale", "story"))


@pytest.fixture
def folder(tmp_path):
    """Two configurations in the layout of the Hub."""
    rows = {"stem": [STEM, STEM], "answer": [1, 0], "choice": [CHOICES, CHOICES[:2]], "prefix": ["parts", "kinds"]}
    for config in ("sat", "u2"):
        (tmp_path / config).mkdir()
        Dataset.from_dict(rows).to_parquet(tmp_path / config / "test-00000-of-00001.parquet")
    return tmp_path


def test_a_parquet_folder_loads_like_a_hub_repository(folder):
    assert load_questions(str(folder), "u2", "test") == [
        Question(STEM, CHOICES, 1, "parts"),
        Question(STEM, CHOICES[:2], 0, "kinds"),
    ]


def test_groups_are_optional(folder):
    Dataset.from_dict({"stem": [STEM], "answer": [1], "choice": [CHOICES]}).to_parquet(
        folder / "sat" / "test-00000-of-00001.parquet"
    )
    assert load_questions(str(folder), "sat") == [Question(STEM, CHOICES, 1)]


def test_datasets_have_the_published_sizes(real_data):
    folder = str(real_data("relbert/analogy_questions"))
    sizes = {"sat": (37, 337), "u2": (24, 228), "u4": (48, 432), "google": (50, 500), "bats": (199, 1799)}
    for config, expected in sizes.items():
        assert tuple(len(load_questions(folder, config, split)) for split in ("validation", "test")) == expected


def test_a_missing_column_is_named(folder):
    Dataset.from_dict({"stem": [STEM], "label": [1]}).to_parquet(folder / "sat" / "test-00000-of-00001.parquet")
    with pytest.raises(ValueError, match=r"columns stem, choice, answer.*has stem, label"):
        load_questions(str(folder), "sat")


def test_the_chance_level_is_the_mean_of_one_over_the_number_of_choices():
    questions = [Question(STEM, CHOICES), Question(STEM, CHOICES[:2]), Question(STEM, CHOICES[:1])]
    assert chance_level(questions) == pytest.approx((1 / 3 + 1 / 2 + 1) / 3, abs=1e-15)


@pytest.mark.parametrize(
    ("question", "problem"),
    [
        (Question(STEM, ()), "has no choices"),
        (Question(("word",), CHOICES), "instead of a pair of two words"),
        (Question("ab", CHOICES), "has 'ab' instead of a pair"),
        (Question(STEM, (*CHOICES, ("a", "b", "c"))), "instead of a pair of two words"),
        (Question(STEM, (*CHOICES, ("note", " "))), "has ' ' instead of a word"),
        (Question(("word", None), CHOICES), "has None instead of a word"),
        (Question(STEM, CHOICES, 3), "has the answer 3; allowed are 0 to 2"),
        (Question(STEM, CHOICES, -1), "has the answer -1"),
        (Question(STEM, CHOICES, 1.5), r"has the answer 1\.5"),
    ],
)
def test_the_error_for_an_invalid_question_names_its_index(question, problem):
    with pytest.raises(ValueError, match=rf"(?s)question 1, .*{problem}"):
        check_questions([Question(STEM, CHOICES, 0), question])


def test_missing_answers_raise_only_where_they_are_needed():
    questions = [Question(STEM, CHOICES, 2), Question(STEM, CHOICES)]
    check_questions(questions)
    with pytest.raises(ValueError, match=r"question 1, .* has no answer"):
        answers_of(questions)


def test_columns_can_be_lists():
    made = make_questions([list(STEM)], [[list(pair) for pair in CHOICES]], [1], ["parts"])
    assert made == [Question(STEM, CHOICES, 1, "parts")]


def test_bad_input_is_refused(folder):
    with pytest.raises(ValueError, match=r"no configuration 'bats' in .*; it has: sat, u2"):
        load_questions(str(folder), "bats")
    with pytest.raises(ValueError, match="there are no questions"):
        check_questions([])
    with pytest.raises(ValueError, match="got 2 stems, 1 lists of choices, 2 answers and 2 groups"):
        make_questions([STEM, STEM], [CHOICES], [0, 0])
    for stem in ("ab", None):
        with pytest.raises(ValueError, match="instead of a pair"):
            make_questions([stem], [CHOICES])
