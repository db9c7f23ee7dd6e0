import pytest
import torch
from doubles import model_that_knows_all
from hypothesis import given, strategies as st

from hf_sphere.analogies import scoring as scorings
from hf_sphere.analogies.evaluation import (
    PUBLISHED_GRID,
    measure_questions,
    score_questions,
    search_configurations,
    select_configuration,
)
from hf_sphere.analogies.questions import Question

MODEL = model_that_knows_all()
SCORINGS_OF_SENTENCES = ["hypothesis_bias", "marginal_bias", "perplexity", "pmi"]


def questions_of(seed, count=12, choices=(5, 3, 4)):
    """Questions with different numbers of choices and random answers."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        size = choices[number % len(choices)]
        pairs = tuple((f"c{seed}{number}{choice}", f"d{seed}{number}{choice}") for choice in range(size))
        made.append(Question(("a", f"b{number}"), pairs, int(torch.randint(size, (), generator=generator))))
    return made


@pytest.fixture(autouse=True, scope="module")
def _model():
    """Random perplexities, deterministic for each text."""
    drawn: dict[object, float] = {}
    generator = torch.Generator().manual_seed(0)

    def perplexities(language_model, asked, **_):
        for sentence in asked:
            if sentence not in drawn:
                drawn[sentence] = 1 + float(torch.rand((), generator=generator, dtype=torch.float64))
        return torch.tensor([drawn[sentence] for sentence in asked], dtype=torch.float64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorings, "perplexities", perplexities)
        yield


def search(questions, scoring="perplexity", **options):
    return search_configurations(measure_questions(questions, MODEL, scoring), **options)


@pytest.fixture(scope="module")
def searched(_model):
    questions = questions_of(1)
    return questions, {scoring: search(questions, scoring) for scoring in SCORINGS_OF_SENTENCES}


@pytest.mark.parametrize("scoring", SCORINGS_OF_SENTENCES)
@given(data=st.data())
def test_a_search_matches_each_configuration_alone(searched, scoring, data):
    questions, results = searched
    result = results[scoring]
    number = data.draw(st.integers(0, len(result) - 1))
    alone = score_questions(questions, MODEL, **result.configurations[number])
    assert float(result.accuracy[number]) == alone.accuracy(questions)


def test_the_grids_have_the_documented_sizes(searched):
    questions, results = searched
    sizes = {scoring: len(result) for scoring, result in results.items()}
    assert sizes == {"hypothesis_bias": 31_350, "marginal_bias": 31_350, "perplexity": 1_254, "pmi": 31_350}
    assert len(search(questions, "marginal_bias", grid=PUBLISHED_GRID)) == 24_750


@pytest.mark.parametrize("scoring", SCORINGS_OF_SENTENCES)
def test_the_simplest_configuration_comes_first(searched, scoring):
    result = searched[1][scoring]
    options = scorings.scoring_class(scoring).grid
    simplest = {name: values[0] for name, values in options.items()}
    assert result.configurations[0] == {
        "scoring": scoring,
        "template": "is-to-what",
        "negative_weight": 0.0,
        **simplest,
        "positive_aggregation": "mean",
        "negative_aggregation": "mean",
    }
    assert simplest in ({}, {"weight_head": 0.0, "weight_tail": 0.0}, {"alpha": 0.0, "pmi_aggregation": "mean"})


@pytest.mark.parametrize("scoring", ["marginal_bias", "pmi"])
def test_the_first_of_the_best_configurations_is_chosen(searched, scoring):
    questions, results = searched
    result = results[scoring]
    selection = select_configuration(result)
    number = result.configurations.index(selection.configuration)
    assert selection.accuracy == float(result.accuracy[number]) == float(result.accuracy.max())
    assert (result.accuracy[:number] < result.accuracy[number]).all()
    assert selection.accuracy == score_questions(questions, MODEL, **selection.configuration).accuracy(questions)
    assert selection.tied == result.accuracy.tolist().count(selection.accuracy)


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({"positive_aggregation": ["median"]}, "positive_aggregation must be one of .*; got 'median'"),
        ({"negative_aggregation": ["mean", "index_16"]}, "negative_aggregation must be one of .*; got 'index_16'"),
    ],
)
def test_an_aggregation_that_the_scoring_lacks_is_refused(searched, grid, said):
    with pytest.raises(ValueError, match=said):
        search(searched[0], grid=grid)
