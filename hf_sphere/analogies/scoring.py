"""Scorings, which compute a cost per choice from questions and a model."""

import itertools
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.analogies.language_model import (
    Kind,
    LanguageModel,
    embed_words,
    embed_words_in_context,
    perplexities,
    warn_unknown_words,
)
from hf_sphere.analogies.prompts import (
    NEGATIVE_PERMUTATIONS,
    PERMUTATIONS,
    POSITIVE_PERMUTATIONS,
    SCORINGS,
    Permutation,
    Sentence,
    fill,
    template_text,
)
from hf_sphere.analogies.questions import Question, choice_counts
from hf_sphere.utils.checks import check_choice
from hf_sphere.utils.progress import progress_bar

Questions = Sequence[Question]
Permutations = Sequence[Permutation]

NUM_POSITIVE, NUM_NEGATIVE = len(POSITIVE_PERMUTATIONS), len(NEGATIVE_PERMUTATIONS)

POSITIVE_AGGREGATIONS = ("mean", "max", "min", *(f"index_{number}" for number in range(NUM_POSITIVE)))
"""How the costs of the permutations in which an analogy holds are reduced to one."""

NEGATIVE_AGGREGATIONS = ("mean", "max", "min", *(f"index_{number}" for number in range(NUM_NEGATIVE)))
"""How the costs of the permutations in which the analogy does not hold are reduced to one."""

PMI_AGGREGATIONS = ("mean", "max", "min", "index_0", "index_1")

WEIGHTS = (0.0, 0.2, -0.2, 0.4, -0.4)
"""Weights of the published grid for the terms that are subtracted from a cost, simplest first."""

QUESTIONS_AT_ONCE = 16
"""Questions whose texts, hundreds per question, are scored or embedded together, which limits memory."""


def scoring_class(name: str) -> type["Scoring"]:
    """Return the class of a scoring, one of `scoring_names()`."""
    check_choice("scoring", name, SCORINGS)
    return pkgutil.resolve_name(SCORINGS[name])


def aggregate(costs: Tensor, name: str, dim: int) -> Tensor:
    """Reduce a dimension by `mean`, `max`, `min` or `index_<i>`."""
    if name.startswith("index_"):
        return costs.select(dim, int(name[6:]))
    return costs.mean(dim) if name == "mean" else costs.amax(dim) if name == "max" else costs.amin(dim)


@dataclass(frozen=True)
class Engine:
    """A model and the options for running it."""

    language_model: LanguageModel  # the model
    batch_size: int | None = None  # sequences per batch; chosen for speed by default
    disable_tqdm: bool = True  # whether to show no progress bar


@dataclass(frozen=True)
class Measurements:
    """Everything that a scoring requires from a model, for all weights and aggregations.

    The terms are NaN for permutations that were not measured and for choices that a question does not have.
    """

    scoring: "Scoring"
    questions: Questions  # the Q questions
    terms: Tensor  # (T, Q, 24, K), float64, permutations as in `PERMUTATIONS`

    @property
    def exists(self) -> Tensor:
        """Whether a question has a choice, (Q, K), boolean."""
        return torch.arange(self.terms.shape[-1]) < choice_counts(self.questions)[:, None]


@dataclass(frozen=True, kw_only=True)
class Scoring(ABC):
    """Computes the costs of the choices of questions. The fields of a subclass are its options.

    A cost is computed from the 24 permutations of the four words of a question and a choice:
    cost = aggregate over the 8 permutations in which the analogy holds
    - negative_weight * aggregate over the 16 others.

    Only the permutations that are needed are measured: with `index_0` and no negative weight (the default), only the
    original order of the words.
    """

    name: ClassVar[str] = ""
    kinds: ClassVar[tuple[Kind, ...]] = ("masked", "causal", "embedding")
    grid: ClassVar[dict[str, tuple[Any, ...]]] = {}  # values of its options that a search tries, simplest first

    positive_aggregation: str = "index_0"
    negative_aggregation: str = "index_0"
    negative_weight: float = 0.0
    template: str | None = None  # a name of `TEMPLATES`, or a text with the fields {a}, {b}, {c} and {d}

    def __post_init__(self) -> None:
        check_choice("positive_aggregation", self.positive_aggregation, POSITIVE_AGGREGATIONS)
        check_choice("negative_aggregation", self.negative_aggregation, NEGATIVE_AGGREGATIONS)
        if self.template is not None:
            template_text(self.template)

    @abstractmethod
    def question_terms(self, questions: Questions, permutations: Permutations, engine: Engine) -> Iterable[Tensor]:
        """Compute the terms of each question, (T, P, k) for P permutations and its k choices."""

    def permutation_costs(self, terms: Tensor) -> Tensor:
        """Combine terms into the cost of every permutation, (T, Q, 24, K) -> (Q, 24, K)."""
        return terms[0]

    def measure(
        self, questions: Questions, engine: Engine, permutations: Sequence[int] = range(len(PERMUTATIONS))
    ) -> Measurements:
        """Run the model on Q questions of up to K choices; `permutations` are numbers of `PERMUTATIONS`."""
        if (kind := engine.language_model.kind) not in self.kinds:
            raise ValueError(f"scoring {self.name!r} requires a model of kind {' or '.join(self.kinds)}; got {kind}.")
        warn_unknown_words(engine.language_model, questions)
        orders = [PERMUTATIONS[index] for index in permutations]
        terms_by_question: list[Tensor] = []
        starts = range(0, len(questions), QUESTIONS_AT_ONCE)
        for start in progress_bar(starts, desc=self.name, leave=False, disable=engine.disable_tqdm):
            terms_by_question += self.question_terms(questions[start : start + QUESTIONS_AT_ONCE], orders, engine)
        shape = (len(questions), len(PERMUTATIONS), int(choice_counts(questions).max()))
        terms = torch.full((len(terms_by_question[0]), *shape), torch.nan, dtype=torch.float64)
        for row, (question, values) in enumerate(zip(questions, terms_by_question, strict=True)):
            if not values.isfinite().all():
                about = f"the question {question.stem} to {question.choices}"
                raise ValueError(f"the model's value of {about} is infinite or not a number. Check weights and dtype.")
            terms[:, row][:, list(permutations), : len(question.choices)] = values.double()
        return Measurements(self, questions, terms)

    def costs(self, questions: Questions, engine: Engine) -> Tensor:
        """Compute the costs of the choices of Q questions, (Q, K), float64; infinity for choices that do not exist."""
        sides = [(slice(NUM_POSITIVE), self.positive_aggregation, 1.0)]
        if self.negative_weight:
            sides.append((slice(NUM_POSITIVE, None), self.negative_aggregation, -self.negative_weight))
        needed: list[int] = []
        for side, aggregation, _ in sides:
            numbers = range(len(PERMUTATIONS))[side]
            needed += [numbers[int(aggregation[6:])]] if aggregation.startswith("index_") else numbers
        measured = self.measure(questions, engine, needed)
        costs = self.permutation_costs(measured.terms)
        total = sum(weight * aggregate(costs[:, side], aggregation, 1) for side, aggregation, weight in sides)
        return torch.where(measured.exists, total, torch.inf)


@dataclass(frozen=True, kw_only=True)
class SentenceScoring(Scoring):
    """A scoring by the perplexities of sentences."""

    kinds: ClassVar[tuple[Kind, ...]] = ("masked", "causal")
    all_pairs: ClassVar[bool] = False  # whether the choices are the diagonal of a grid of sentences
    hidden: ClassVar[tuple[tuple[int, ...], ...]] = ((),)  # indices of the words that are masked, once per sentence

    template: str = "is-to-what"

    def sentences(self, question: Question, permutation: Permutation) -> list[Sentence]:
        """Return the S sentences of one permutation of a question: one per choice, or of all heads with all tails."""
        pairs = itertools.product(*zip(*question.choices, strict=True)) if self.all_pairs else question.choices
        asked = [(*question.stem, *pair) for pair in pairs]
        return [fill(self.template, words, permutation, hidden=hidden) for hidden in self.hidden for words in asked]

    def terms(self, perplexity: Tensor) -> Tensor:
        """Compute the terms of a question from its perplexities, (P, S) -> (T, P, k)."""
        return perplexity[None]

    def question_terms(self, questions: Questions, permutations: Permutations, engine: Engine) -> list[Tensor]:
        """See `Scoring.question_terms`."""
        sentences = [[text for order in permutations for text in self.sentences(each, order)] for each in questions]
        flat = list(itertools.chain.from_iterable(sentences))
        values = perplexities(engine.language_model, flat, batch_size=engine.batch_size)
        by_question = values.split([len(of_question) for of_question in sentences])
        return [self.terms(perplexity.view(len(permutations), -1)) for perplexity in by_question]


@dataclass(frozen=True, kw_only=True)
class Perplexity(SentenceScoring):
    """Perplexity of the sentence.

    Pseudo-perplexity for masked models (Salazar et al., "Masked Language Model Scoring", ACL 2020), perplexity for
    causal models.
    """

    name = "perplexity"


@dataclass(frozen=True, kw_only=True)
class MarginalBias(SentenceScoring):
    """Analogical proportion score: share in the perplexities, minus the shares of the head and of the tail.

    With P[i, j] the perplexity of the sentence with head c_i and tail d_j: log(P_ii / sum_k P_kk)
    - weight_head log(sum_j P_ij / sum P) - weight_tail log(sum_j P_ji / sum P). Ushio et al., "BERT is to NLP what
    AlexNet is to CV", ACL 2021.
    """

    name = "marginal_bias"
    all_pairs = True
    grid = {"weight_head": WEIGHTS, "weight_tail": WEIGHTS}

    weight_head: float = 0.0
    weight_tail: float = 0.0

    def terms(self, perplexity: Tensor) -> Tensor:
        """See `SentenceScoring.terms`."""
        return log_shares(torch.stack(_grid_sums(perplexity)))

    def permutation_costs(self, terms: Tensor) -> Tensor:
        """See `Scoring.permutation_costs`."""
        sentence, head, tail = terms
        return sentence - self.weight_head * head - self.weight_tail * tail


@dataclass(frozen=True, kw_only=True)
class HypothesisBias(MarginalBias):
    """Share in the perplexities, minus the shares of the sentences in which the head or the tail is masked.

    With P_i the perplexity of the sentence of choice i, H_i that with c_i masked and T_i that with d_i masked:
    log(P_i / sum P) - weight_head log(H_i / sum H) - weight_tail log(T_i / sum T). For masked models only.
    """

    name = "hypothesis_bias"
    kinds = ("masked",)
    all_pairs = False
    hidden = ((), (2,), (3,))  # the words c and d

    def terms(self, perplexity: Tensor) -> Tensor:
        """See `SentenceScoring.terms`."""
        return log_shares(perplexity.unflatten(-1, (3, -1)).movedim(-2, 0))


@dataclass(frozen=True, kw_only=True)
class PMI(SentenceScoring):
    """Pointwise mutual information of the head and the tail, computed in both directions.

    With P[i, j] the perplexity of the sentence with head c_i and tail d_j, two terms:
    log(P_ii / sum_j P_ij) - alpha log(sum_j P_ji / sum P), the tail given the head, and
    log(P_ii / sum_j P_ji) - alpha log(sum_j P_ij / sum P), the head given the tail. `pmi_aggregation` reduces them to
    one (`index_0` is the first, `index_1` the second). Ushio et al., "BERT is to NLP what AlexNet is to CV", ACL 2021.
    """

    name = "pmi"
    all_pairs = True
    grid = {"alpha": WEIGHTS, "pmi_aggregation": PMI_AGGREGATIONS}

    alpha: float = 0.0
    pmi_aggregation: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("pmi_aggregation", self.pmi_aggregation, PMI_AGGREGATIONS)

    def terms(self, perplexity: Tensor) -> Tensor:
        """See `SentenceScoring.terms`."""
        sentence, by_head, by_tail = _grid_sums(perplexity)
        conditional = [(sentence / by_head).log(), (sentence / by_tail).log()]
        return torch.stack([*conditional, log_shares(by_tail), log_shares(by_head)])

    def permutation_costs(self, terms: Tensor) -> Tensor:
        """See `Scoring.permutation_costs`."""
        return aggregate(terms[:2] - self.alpha * terms[2:], self.pmi_aggregation, 0)


@dataclass(frozen=True, kw_only=True)
class EmbeddingSimilarity(Scoring):
    """1 - cos(e_first - e_second, e_third - e_fourth), with the embeddings of the words in their permuted order.

    Mikolov, Yih, Zweig, "Linguistic Regularities in Continuous Space Word Representations", NAACL 2013. The cosine is 0
    where two words of a pair have the same embedding. Without a template, each word is embedded alone.
    """

    name = "embedding_similarity"

    def question_terms(self, questions: Questions, permutations: Permutations, engine: Engine) -> Iterator[Tensor]:
        """See `Scoring.question_terms`."""
        model, size, orders = engine.language_model, engine.batch_size, torch.tensor(permutations)
        asked = [(*question.stem, *pair) for question in questions for pair in question.choices]
        counts = [len(question.choices) for question in questions]
        if self.template is None:
            words = embed_words(model, [word for four in asked for word in four], batch_size=size)
            embeddings = [four[:, orders].movedim(1, 0) for four in words.view(len(asked), 4, -1).split(counts)]
        else:
            sentences = [fill(self.template, four, order) for order in permutations for four in asked]
            words = embed_words_in_context(model, sentences, batch_size=size).unflatten(0, (len(orders), -1))
            embeddings = list(words.take_along_dim(orders[:, None, :, None], dim=2).split(counts, dim=1))
        for each in embeddings:  # (P, k, 4, H), of the permuted words of a question
            first, second, third, fourth = each.double().unbind(2)
            yield 1 - F.cosine_similarity(first - second, third - fourth, dim=-1)[None]


def log_shares(values: Tensor) -> Tensor:
    """Return the logarithms of the shares of the choices in the sum over all choices, (..., k)."""
    return (values / values.sum(-1, keepdim=True)).log()


def _grid_sums(perplexity: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the perplexities of the choices, and the sums by head and by tail, (P, k) each, of a grid (P, k k)."""
    size = math.isqrt(perplexity.shape[-1])
    grid = perplexity.unflatten(-1, (size, size))
    return grid.diagonal(dim1=-2, dim2=-1), grid.sum(-1), grid.sum(-2)
