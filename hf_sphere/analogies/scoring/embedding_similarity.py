"""Cosine of the differences of word embeddings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.analogies.prompts import Permutation, fill, template_text
from hf_sphere.analogies.questions import Question
from hf_sphere.analogies.scoring.base import Engine, PermutedScoring
from hf_sphere.analogies.word_embeddings import embed_words, embed_words_in_context


@dataclass(frozen=True, kw_only=True)
class EmbeddingSimilarity(PermutedScoring):
    """1 - cos(e_first - e_second, e_third - e_fourth), with the embeddings of the words in their permuted order.

    Mikolov, Yih, Zweig, "Linguistic Regularities in Continuous Space Word Representations", NAACL 2013. The cosine is 0
    where two words of a pair have the same embedding.

    Attributes:
        template: None embeds each word alone; a template, as in the other scorings, embeds it in the sentence.
    """

    name = "embedding_similarity"

    template: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template is not None:
            template_text(self.template)

    def question_terms(
        self, questions: Sequence[Question], permutations: Sequence[Permutation], engine: Engine
    ) -> Iterator[Tensor]:
        """See `PermutedScoring.question_terms`."""
        embed = self._embed_alone if self.template is None else self._embed_in_context
        for embeddings in embed(questions, permutations, engine):
            first, second, third, fourth = embeddings.double().unbind(2)
            yield 1 - F.cosine_similarity(first - second, third - fourth, dim=-1)[None]

    def _embed_alone(
        self, questions: Sequence[Question], permutations: Sequence[Permutation], engine: Engine
    ) -> Iterator[Tensor]:
        """Embed the permuted words of each question, (P, k, 4, H)."""
        words = dict.fromkeys(
            word for question in questions for pair in (question.stem, *question.choices) for word in pair
        )
        rows = {word: row for row, word in enumerate(words)}
        embeddings = embed_words(engine.language_model, list(words), batch_size=engine.batch_size)
        for question in questions:
            found = torch.tensor([[rows[word] for word in (*question.stem, *pair)] for pair in question.choices])
            yield embeddings[found[:, torch.tensor(permutations)].movedim(1, 0)]

    def _embed_in_context(
        self, questions: Sequence[Question], permutations: Sequence[Permutation], engine: Engine
    ) -> Iterator[Tensor]:
        """Embed the permuted words of each question in its sentences, (P, k, 4, H)."""
        sentences = [
            fill(str(self.template), (*question.stem, *pair), order)
            for question in questions
            for order in permutations
            for pair in question.choices
        ]
        embeddings = embed_words_in_context(engine.language_model, sentences, batch_size=engine.batch_size)
        orders = torch.tensor(permutations)[:, None, :, None]
        for found in embeddings.split([len(orders) * len(question.choices) for question in questions]):
            yield found.unflatten(0, (len(orders), -1)).take_along_dim(orders, dim=2)
