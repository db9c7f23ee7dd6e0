"""Perplexity of the sentence, minus those with the head masked and with the tail masked."""

from dataclasses import dataclass

from torch import Tensor

from hf_sphere.analogies.prompts import Permutation, Sentence
from hf_sphere.analogies.questions import Question
from hf_sphere.analogies.scoring.base import BiasScoring, log_shares

HEAD, TAIL = (2,), (3,)  # numbers of the words c and d


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
            self.fill(question, head, tail, permutation, hidden)
            for hidden in ((), HEAD, TAIL)
            for head, tail in question.choices
        ]

    def terms(self, perplexity: Tensor) -> Tensor:
        """See `SentenceScoring.terms`."""
        return log_shares(perplexity.unflatten(-1, (3, -1)).movedim(-2, 0))
