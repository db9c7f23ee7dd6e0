import dataclasses
import itertools
import math
import zlib

import pytest
import torch
from doubles import model_that_knows_all
from hypothesis import given, strategies as st

from hf_sphere.analogies import scoring as scorings
from hf_sphere.analogies.evaluation import TIE, Scores, score_questions
from hf_sphere.analogies.prompts import TEMPLATES
from hf_sphere.analogies.questions import Question

MODEL = model_that_knows_all()
POSITIVE = ["abcd", "acbd", "badc", "bdac", "cdab", "cadb", "dcba", "dbca"]
NEGATIVE = [first + second + third + fourth for first, second, third, fourth in itertools.permutations("abcd")]
NEGATIVE = [order for order in NEGATIVE if order not in POSITIVE]
TEMPLATE = "rel-same"

WORDS = st.text("abcdefgh", min_size=1, max_size=3)
PAIRS = st.tuples(WORDS, WORDS)
QUESTIONS = st.lists(
    st.builds(Question, PAIRS, st.lists(PAIRS, min_size=1, max_size=5).map(tuple)), min_size=1, max_size=3
)
POSITIVE_NAMES = ["mean", "max", "min", *(f"index_{number}" for number in range(8))]
NEGATIVE_NAMES = ["mean", "max", "min", *(f"index_{number}" for number in range(16))]
OPTIONS = st.fixed_dictionaries(
    {
        "positive_aggregation": st.sampled_from(POSITIVE_NAMES),
        "negative_aggregation": st.sampled_from(NEGATIVE_NAMES),
        "negative_weight": st.sampled_from([0.0, 0.2, 1.0]),
    }
)
WEIGHT = st.sampled_from([-0.4, 0.0, 0.2])


def surprise(text, hidden=()):
    """An arbitrary but deterministic perplexity of a text and its hidden words."""
    return 1 + zlib.crc32(f"{text}{sorted(hidden)}".encode()) % 100_000 / 100


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """The sentences of each model call; the model returns `surprise` of each sentence."""
    calls = []

    def perplexities(language_model, sentences, *, batch_size=None):
        calls.append(sentences)
        return torch.tensor([surprise(one.text, one.hidden) for one in sentences], dtype=torch.float64)

    monkeypatch.setattr(scorings, "perplexities", perplexities)
    return calls


def perplexity_of(stem, head, tail, order, hidden=()):
    word = dict(zip("abcd", (*stem, head, tail), strict=True))
    return surprise(
        TEMPLATES[TEMPLATE].format(**{place: word[given] for place, given in zip("abcd", order, strict=True)}), hidden
    )


def aggregated(values, name):
    values = list(values)
    if name.startswith("index_"):
        return values[int(name.removeprefix("index_"))]
    return {"mean": math.fsum(values) / len(values), "max": max(values), "min": min(values)}[name]


def check_costs(scoring, questions, options, cost_in_order, template=TEMPLATE, **more):
    """Compare costs with a formula for one question, choice and permutation."""
    scores = score_questions(questions, MODEL, scoring, template=template, **options, **more)
    for question, costs in zip(questions, scores.by_question(), strict=True):
        for choice, cost in enumerate(costs):
            positive = aggregated(
                (cost_in_order(question, choice, order) for order in POSITIVE), options["positive_aggregation"]
            )
            negative = aggregated(
                (cost_in_order(question, choice, order) for order in NEGATIVE), options["negative_aggregation"]
            )
            assert cost == pytest.approx(positive - options["negative_weight"] * negative, rel=1e-11, abs=1e-10)
    for prediction, costs in zip(scores.predictions.tolist(), scores.by_question(), strict=True):
        limit = min(costs) + TIE * (1 + abs(min(costs)))
        assert prediction == next(choice for choice, cost in enumerate(costs) if cost <= limit)


def share(values, choice):
    values = list(values)
    return math.log(values[choice] / math.fsum(values))


def grid_of(question, order):
    return [
        [perplexity_of(question.stem, head, tail, order) for _, tail in question.choices]
        for head, _ in question.choices
    ]


@given(QUESTIONS, OPTIONS)
def test_perplexity_is_the_perplexity_of_the_sentence(questions, options):
    def cost(question, choice, order):
        return perplexity_of(question.stem, *question.choices[choice], order)

    check_costs("perplexity", questions, options, cost)


@given(QUESTIONS, OPTIONS, WEIGHT, WEIGHT)
def test_marginal_bias_subtracts_the_head_and_tail_marginals(questions, options, weight_head, weight_tail):
    def cost(question, choice, order):
        grid = grid_of(question, order)
        sentence = share((row[place] for place, row in enumerate(grid)), choice)
        head = share(map(sum, grid), choice)
        tail = share(map(sum, zip(*grid, strict=True)), choice)
        return sentence - weight_head * head - weight_tail * tail

    check_costs("marginal_bias", questions, options, cost, weight_head=weight_head, weight_tail=weight_tail)


@given(QUESTIONS, OPTIONS, WEIGHT, st.sampled_from(["mean", "max", "min", "index_0", "index_1"]))
def test_pmi_aggregates_both_conditional_directions(questions, options, alpha, aggregation):
    def cost(question, choice, order):
        grid = grid_of(question, order)
        columns = list(zip(*grid, strict=True))
        tail_given_head = share(grid[choice], choice) - alpha * share(map(sum, columns), choice)
        head_given_tail = share(columns[choice], choice) - alpha * share(map(sum, grid), choice)
        return aggregated([tail_given_head, head_given_tail], aggregation)

    check_costs("pmi", questions, options, cost, alpha=alpha, pmi_aggregation=aggregation)


@given(QUESTIONS, OPTIONS, WEIGHT, WEIGHT)
def test_hypothesis_bias_hides_the_head_in_one_term_and_the_tail_in_another(
    questions, options, weight_head, weight_tail
):
    def cost(question, choice, order):
        sentence, head, tail = (
            share((perplexity_of(question.stem, *pair, order, hidden) for pair in question.choices), choice)
            for hidden in ((), (2,), (3,))
        )
        return sentence - weight_head * head - weight_tail * tail

    check_costs("hypothesis_bias", questions, options, cost, weight_head=weight_head, weight_tail=weight_tail)


def vector(text):
    return torch.tensor([zlib.crc32(f"{number}{text}".encode()) % 1000 - 500.0 for number in range(3)])


def cosine(first, second):
    norm = math.sqrt(math.fsum(first**2) * math.fsum(second**2))
    return math.fsum(first * second) / norm if norm else 0.0


@given(QUESTIONS, OPTIONS, st.sampled_from([None, TEMPLATE]), st.sampled_from([1, 100]))
def test_embedding_similarity_is_the_cosine_of_differences(questions, options, template, at_once):
    def embed_words(language_model, words, *, batch_size=None):
        return torch.stack([vector(word) for word in words])

    def embed_words_in_context(language_model, sentences, *, batch_size=None):
        return torch.stack(
            [torch.stack([vector(one.text + one.text[start:end]) for start, end in one.spans]) for one in sentences]
        )

    def cost(question, choice, order):
        word = dict(zip("abcd", (*question.stem, *question.choices[choice]), strict=True))
        text = TEMPLATES[TEMPLATE].format(**{place: word[given] for place, given in zip("abcd", order, strict=True)})
        first, second, third, fourth = (vector((text if template else "") + word[letter]) for letter in order)
        return 1 - cosine((first - second).double(), (third - fourth).double())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorings, "embed_words", embed_words)
        patch.setattr(scorings, "embed_words_in_context", embed_words_in_context)
        patch.setattr(scorings, "QUESTIONS_AT_ONCE", at_once)
        check_costs("embedding_similarity", questions, options, cost, template)


QUESTION = Question(("a", "b"), (("c", "d"), ("e", "f"), ("g", "h")), 1)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 1),
        ({"positive_aggregation": "mean"}, 8),
        ({"negative_aggregation": "mean"}, 1),  # has weight zero
        ({"negative_aggregation": "index_3", "negative_weight": 0.2}, 2),
        ({"positive_aggregation": "max", "negative_aggregation": "min", "negative_weight": 1.0}, 24),
    ],
)
def test_only_permutations_that_affect_the_cost_are_scored_in_one_call(asked, options, count):
    score_questions([QUESTION, QUESTION], MODEL, "marginal_bias", **options)
    assert [len(sentences) for sentences in asked] == [2 * count * 9]


SCORINGS_OF_SENTENCES = ["hypothesis_bias", "marginal_bias", "perplexity", "pmi"]


@pytest.mark.parametrize("scoring", SCORINGS_OF_SENTENCES)
@pytest.mark.parametrize("options", [{}, {"positive_aggregation": "mean", "negative_weight": 0.4}])
def test_a_tie_counts_one_kth_and_the_first_choice_is_predicted(scoring, options):
    repeated = Question(("a", "b"), (("x", "y"),) * 3)
    for answer in range(3):
        questions = [dataclasses.replace(repeated, answer=answer)]
        scores = score_questions(questions, MODEL, scoring, **options)
        assert scores.predictions.tolist() == [0]
        assert scores.correct(questions).tolist() == [pytest.approx(1 / 3)]
        assert scores.accuracy(questions) == pytest.approx(1 / 3)


def test_answers_to_other_questions_than_those_of_the_costs_are_refused():
    two, three = (Question(("a", "b"), (("x", "y"), ("v", "w"), ("e", "f"))[:count], 0) for count in (2, 3))
    scores = score_questions([two, three], MODEL)
    for others in ([two], [three, two]):
        with pytest.raises(ValueError, match="costs are of 2 questions with 5 choices in all, not of these"):
            scores.accuracy(others)


@pytest.mark.parametrize(("gap", "share"), [(1e-7, 0.5), (1e-5, 1.0)])
def test_costs_that_differ_by_rounding_tie(gap, share):
    question = Question(("a", "b"), (("c", "d"), ("e", "f"), ("g", "h")), 1)
    scores = Scores(torch.tensor([[20.0 * (1 + gap), 20.0, 30.0]], dtype=torch.float64))
    assert scores.accuracy([question]) == share
    assert scores.accuracy([dataclasses.replace(question, answer=2)]) == 0


def test_missing_choices_have_infinite_cost():
    short = Question(("a", "b"), QUESTION.choices[:2])
    scores = score_questions([QUESTION, short], MODEL, "pmi", positive_aggregation="mean", negative_weight=1.0)
    assert scores.costs.isinf().tolist() == [[False] * 3, [False, False, True]]
    assert [len(costs) for costs in scores.by_question()] == [3, 2]
    torch.testing.assert_close(
        scores.costs[1, :2],
        score_questions([short], MODEL, "pmi", positive_aggregation="mean", negative_weight=1.0).costs[0],
    )


def test_a_nan_perplexity_is_rejected(monkeypatch):
    monkeypatch.setattr(scorings, "perplexities", lambda *_, **__: torch.tensor([1.0, float("nan"), 2.0]))
    with pytest.raises(ValueError, match=r"question \('a', 'b'\) to .* is infinite or not a number"):
        score_questions([QUESTION], MODEL)


@pytest.mark.parametrize(
    ("scoring", "options", "kind", "error", "message"),
    [
        ("ppl", {}, "masked", ValueError, "scoring must be one of embedding_similarity, hypothesis.*; got 'ppl'"),
        ("perplexity", {"alpha": 0.2}, "masked", TypeError, "unexpected keyword argument 'alpha'"),
        ("perplexity", {"template": "is-to"}, "masked", ValueError, "'is-to' is not a template. Use one of is-to-what"),
        ("embedding_similarity", {"template": "{a} {b}"}, "masked", ValueError, "is not a template"),
        ("perplexity", {"positive_aggregation": "index_8"}, "masked", ValueError, "must be one of mean, .*index_7;"),
        ("perplexity", {"negative_aggregation": "median"}, "masked", ValueError, "one of .*index_15; got 'median'"),
        ("pmi", {"pmi_aggregation": "index_2"}, "masked", ValueError, "must be one of mean, max, min, index_0"),
        ("hypothesis_bias", {}, "causal", ValueError, "requires a model of kind masked; got causal"),
        ("perplexity", {}, "embedding", ValueError, "'perplexity' requires a model of kind masked.*; got embedding"),
    ],
)
def test_unsupported_options_and_models_of_a_scoring_are_rejected(scoring, options, kind, error, message):
    with pytest.raises(error, match=message):
        score_questions([QUESTION], model_that_knows_all(kind), scoring, **options)
