"""Perplexity of the sentence."""

from dataclasses import dataclass

from hf_sphere.analogies.prompts import Permutation, Sentence
from hf_sphere.analogies.questions import Question
from hf_sphere.analogies.scoring.base import SentenceScoring


@dataclass(frozen=True, kw_only=True)
class Perplexity(SentenceScoring):
    """Perplexity of the sentence.

    Pseudo-perplexity for masked models (Salazar et al., "Masked Language Model Scoring", ACL 2020), perplexity for
    causal models.
    """

    name = "perplexity"

    def sentences(self, question: Question, permutation: Permutation) -> list[Sentence]:
        """See `SentenceScoring.sentences`."""
        return [self.fill(question, head, tail, permutation) for head, tail in question.choices]
