import pytest
from datasets import Dataset

from hf_sphere.analogies.questions import Question, answers_of, chance_level, load_questions, make_questions

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


def test_a_parquet_folder_loads_like_a_hub_repository_with_or_without_groups(folder):
    expected = [Question(STEM, CHOICES, 1, "parts"), Question(STEM, CHOICES[:2], 0, "kinds")]
    assert load_questions(str(folder), "u2", "test") == expected
    rows = Dataset.from_dict({"stem": [STEM], "answer": [1], "choice": [CHOICES]})
    rows.to_parquet(folder / "sat" / "test-00000-of-00001.parquet")
    assert load_questions(str(folder), "sat") == [Question(STEM, CHOICES, 1)]


def test_datasets_have_the_published_sizes(real_data):
    folder = str(real_data("relbert/analogy_questions"))
    sizes = {"sat": (37, 337), "u2": (24, 228), "u4": (48, 432), "google": (50, 500), "bats": (199, 1799)}
    for config, expected in sizes.items():
        assert tuple(len(load_questions(folder, config, split)) for split in ("validation", "test")) == expected


def test_the_chance_level_is_the_mean_of_one_over_the_number_of_choices():
    questions = [Question(STEM, CHOICES), Question(STEM, CHOICES[:2]), Question(STEM, CHOICES[:1])]
    assert chance_level(questions) == pytest.approx((1 / 3 + 1 / 2 + 1) / 3, abs=1e-15)


def test_missing_answers_raise_only_where_they_are_needed_and_columns_can_be_lists():
    made = make_questions([list(STEM)] * 2, [[list(pair) for pair in CHOICES]] * 2, [1, None], ["parts", None])
    assert made == [Question(STEM, CHOICES, 1, "parts"), Question(STEM, CHOICES)]
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
