"""Scorings by the perplexities of sentences."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_sphere.analogies.language_model import Kind
from hf_sphere.analogies.likelihoods import perplexities
from hf_sphere.analogies.prompts import Permutation, Sentence, fill, template_text
from hf_sphere.analogies.questions import Pair, Question
from hf_sphere.analogies.scoring.base import WEIGHTS, Engine, Permutations, Questions, Scoring, aggregate
from hf_sphere.utils.checks import check_choice

PMI_AGGREGATIONS = ("mean", "max", "min", "index_0", "index_1")
HEAD, TAIL = (2,), (3,)  # indices of the words c and d


@dataclass(frozen=True, kw_only=True)
class SentenceScoring(Scoring):
    """A scoring by the perplexities of sentences."""

    kinds: ClassVar[tuple[Kind, ...]] = ("masked", "causal")
    all_pairs: ClassVar[bool] = False  # whether the choices are the diagonal of a grid of sentences

    template: str = "is-to-what"  # a name of `TEMPLATES`, or a text with the fields {a}, {b}, {c} and {d}

    def __post_init__(self) -> None:
        super().__post_init__()
        template_text(self.template)

    def sentences(self, question: Question, permutation: Permutation) -> list[Sentence]:
        """Return the S sentences of one permutation of a question: one per choice, or of all heads with all tails."""
        heads, tails = zip(*question.choices, strict=True)
        pairs = itertools.product(heads, tails) if self.all_pairs else question.choices
        return self.fill(question, pairs, permutation)

    def terms(self, perplexity: Tensor) -> Tensor:
        """Compute the terms of a question from its perplexities, (P, S) -> (T, P, k)."""
        return perplexity[None]

    def fill(
        self, question: Question, pairs: Iterable[Pair], permutation: Permutation, hidden: Sequence[int] = ()
    ) -> list[Sentence]:
        """Fill the template with the stem and each pair."""
        return [fill(self.template, (*question.stem, *pair), permutation, hidden=hidden) for pair in pairs]

    def question_terms(self, questions: Questions, permutations: Permutations, engine: Engine) -> list[Tensor]:
        """See `Scoring.question_terms`."""
        sentences = [[text for order in permutations for text in self.sentences(each, order)] for each in questions]
        flat = list(itertools.chain.from_iterable(sentences))
        values = perplexities(engine.language_model, flat, batch_size=engine.batch_size)
        by_question = values.split([len(of_question) for of_question in sentences])
        return [self.terms(perplexity.view(len(permutations), -1)) for perplexity in by_question]


@dataclass(frozen=True, kw_only=True)
class BiasScoring(SentenceScoring):
    """A scoring with three terms: those of the sentence, of the head and of the tail.

    cost = sentence - weight_head * head - weight_tail * tail
    """

    grid = {"weight_head": WEIGHTS, "weight_tail": WEIGHTS}

    weight_head: float = 0.0
    weight_tail: float = 0.0

    def permutation_costs(self, terms: Tensor) -> Tensor:
        """See `Scoring.permutation_costs`."""
        sentence, head, tail = terms
        return sentence - self.weight_head * head - self.weight_tail * tail


@dataclass(frozen=True, kw_only=True)
class Perplexity(SentenceScoring):
    """Perplexity of the sentence.

    Pseudo-perplexity for masked models (Salazar et al., "Masked Language Model Scoring", ACL 2020), perplexity for
    causal models.
    """

    name = "perplexity"


@dataclass(frozen=True, kw_only=True)
class MarginalBias(BiasScoring):
    """Analogical proportion score: share in the perplexities, minus the shares of the head and of the tail.

    With P[i, j] the perplexity of the sentence with head c_i and tail d_j: log(P_ii / sum_k P_kk)
    - weight_head log(sum_j P_ij / sum P) - weight_tail log(sum_j P_ji / sum P). Ushio et al., "BERT is to NLP what
    AlexNet is to CV", ACL 2021.
    """

    name = "marginal_bias"
    all_pairs = True

    def terms(self, perplexity: Tensor) -> Tensor:
        """See `SentenceScoring.terms`."""
        return log_shares(torch.stack(_grid_sums(perplexity)))


@dataclass(frozen=True, kw_only=True)
class HypothesisBias(BiasScoring):
    """Share in the perplexities, minus the shares of the sentences in which the head or the tail is masked.

    With P_i the perplexity of the sentence of choice i, H_i that with c_i masked and T_i that with d_i masked:
    log(P_i / sum P) - weight_head log(H_i / sum H) - weight_tail log(T_i / sum T). For masked models only.
    """

    name = "hypothesis_bias"
    kinds = ("masked",)

    def sentences(self, question: Question, permutation: Permutation) -> list[Sentence]:
        """See `SentenceScoring.sentences`."""
        return [
            sentence
            for hidden in ((), HEAD, TAIL)
            for sentence in self.fill(question, question.choices, permutation, hidden)
        ]

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
        conditional, marginal = terms[:2], terms[2:]
        return aggregate(conditional - self.alpha * marginal, self.pmi_aggregation, 0)


def log_shares(values: Tensor) -> Tensor:
    """Return the logarithms of the shares of the choices in the sum over all choices, (..., k)."""
    return (values / values.sum(-1, keepdim=True)).log()


def _grid_sums(perplexity: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the perplexities of the choices, and the sums by head and by tail, (P, k) each, of a grid (P, k k)."""
    size = math.isqrt(perplexity.shape[-1])
    grid = perplexity.unflatten(-1, (size, size))
    return grid.diagonal(dim1=-2, dim2=-1), grid.sum(-1), grid.sum(-2)
