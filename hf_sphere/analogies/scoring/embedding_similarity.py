"""Cosine of the differences of word embeddings."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.analogies.prompts import PERMUTATIONS, fill, template_text
from hf_sphere.analogies.questions import Question
from hf_sphere.analogies.scoring.base import Measurements, PermutedScoring, gather
from hf_sphere.analogies.word_embeddings import embed_words, embed_words_in_context

if TYPE_CHECKING:
    from hf_sphere.analogies.language_model import LanguageModel

SENTENCES_AT_A_TIME = 4096
"""Their embeddings are held in memory: 64 MB a thousand at width 4,096."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingSimilarity(PermutedScoring):
    """1 - cos(e_first - e_second, e_third - e_fourth) of the words in their order.

    Mikolov, Yih, Zweig, "Linguistic Regularities in Continuous Space Word Representations", NAACL 2013. A word less
    itself has no direction; its cosine is taken as 0.

    Attributes:
        template: None embeds each word alone; a template, as of the other scorings, embeds it in the sentence.
    """

    name = "embedding_similarity"

    template: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template is not None:
            template_text(self.template)

    def measure(
        self,
        questions: Sequence[Question],
        language_model: "LanguageModel",
        permutations: Iterable[int] = range(len(PERMUTATIONS)),
        **engine: Any,
    ) -> Measurements:
        """See `PermutedScoring.measure`."""
        permutations = list(permutations)
        orders = torch.tensor([PERMUTATIONS[number] for number in permutations])
        if self.template is None:
            words = _embed_alone(questions, language_model, orders, **engine)
        else:
            words = self._embed_in_context(self.template, questions, language_model, orders, **engine)
        values = (1 - _relation_cosine(*ordered.unbind(2)) for ordered in words)
        return Measurements(self, *gather(questions, permutations, values, sides=1))

    @staticmethod
    def _embed_in_context(
        template: str, questions: Sequence[Question], language_model: "LanguageModel", orders: Tensor, **engine: Any
    ) -> Iterator[Tensor]:
        """Embeddings of the words of each question in their orders, (P, k, 4, H)."""
        for batch in _batches(questions, len(orders)):
            sentences = [
                fill(template, (*question.stem, *pair), order)
                for question in batch
                for order in orders.tolist()
                for pair in question.choices
            ]
            embeddings = embed_words_in_context(language_model, sentences, **engine)
            sizes = [len(orders) * len(question.choices) for question in batch]
            for question, found in zip(batch, embeddings.split(sizes), strict=True):
                placed = found.unflatten(0, (len(orders), len(question.choices)))
                yield placed.take_along_dim(orders[:, None, :, None], dim=2)


def _embed_alone(
    questions: Sequence[Question], language_model: "LanguageModel", orders: Tensor, **engine: Any
) -> Iterator[Tensor]:
    """Embeddings of the words of each question in their orders, (P, k, 4, H)."""
    fours = [[(*question.stem, *pair) for pair in question.choices] for question in questions]
    words = list(dict.fromkeys(word for question in fours for four in question for word in four))
    number = {word: place for place, word in enumerate(words)}
    embeddings = embed_words(language_model, words, **engine)
    for question in fours:
        numbers = torch.tensor([[number[word] for word in four] for four in question])
        yield embeddings[numbers[:, orders].movedim(1, 0)]


def _relation_cosine(first: Tensor, second: Tensor, third: Tensor, fourth: Tensor) -> Tensor:
    return F.cosine_similarity(first.double() - second.double(), third.double() - fourth.double(), dim=-1)


def _batches(questions: Sequence[Question], num_orders: int) -> Iterator[list[Question]]:
    """Consecutive questions that together have so many sentences as fit in memory."""
    batch: list[Question] = []
    total = 0
    for question in questions:
        count = num_orders * len(question.choices)
        if batch and total + count > SENTENCES_AT_A_TIME:
            yield batch
            batch, total = [], 0
        batch.append(question)
        total += count
    yield batch
