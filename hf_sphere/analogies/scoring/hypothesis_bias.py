"""Perplexity less what the sentence without the head, or without the tail, brings."""

from dataclasses import dataclass

from torch import Tensor

from hf_sphere.analogies.prompts import Permutation, Sentence
from hf_sphere.analogies.questions import Question
from hf_sphere.analogies.scoring.base import WEIGHTS, Measurements
from hf_sphere.analogies.scoring.sentences import SentenceScoring, log_shares

HEAD, TAIL = (2,), (3,)  # numbers of the words c and d


@dataclass(frozen=True, kw_only=True)
class HypothesisBias(SentenceScoring):
    """The share of perplexity, less those of the sentences in which the head or the tail is hidden by mask tokens.

    With P_i the perplexity of the sentence of choice i, H_i that with c_i hidden and T_i that with d_i hidden:
    log(P_i / sum P) - weight_head log(H_i / sum H) - weight_tail log(T_i / sum T). For masked models only.
    """

    name = "hypothesis_bias"
    grid = {"weight_head": WEIGHTS, "weight_tail": WEIGHTS}
    rest = 3

    weight_head: float = 0.0
    weight_tail: float = 0.0

    def sentences(self, question: Question, permutation: Permutation) -> list[Sentence]:
        """See `SentenceScoring.sentences`."""
        return [
            self.fill(question, head, tail, permutation, hidden)
            for head, tail in question.choices
            for hidden in ((), HEAD, TAIL)
        ]

    def terms(self, measurements: Measurements) -> Tensor:
        """See `PermutedScoring.terms`."""
        return log_shares(measurements.values.movedim(-1, 0))

    def permutation_costs(self, terms: Tensor) -> Tensor:
        """See `PermutedScoring.permutation_costs`."""
        sentence, head, tail = terms
        return sentence - self.weight_head * head - self.weight_tail * tail
