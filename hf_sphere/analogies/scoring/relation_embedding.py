"""Cosine of the embeddings of relations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_sphere.analogies.questions import Question
from hf_sphere.analogies.scoring.base import Scoring, check_finite
from hf_sphere.analogies.word_embeddings import embed_relations

if TYPE_CHECKING:
    from hf_sphere.analogies.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class RelationEmbedding(Scoring):
    """1 - cos(r(stem), r(choice)), r the embedding of a prompt about one pair.

    Ushio, Camacho-Collados, Schockaert, "Distilling Relation Embeddings from Pretrained Language Models", EMNLP 2021.
    A pair is embedded by itself, so there are no orders of four words and nothing to aggregate.

    Attributes:
        template: A text with the fields {a} and {b}, and with {mask} where a mask token is to stand.
    """

    name = "relation_embedding"
    remark = "It embeds each pair by itself, so permutations of four words, positive or negative, do not apply."

    template: str = "The relation between {a} and {b}"

    def costs(self, questions: Sequence[Question], language_model: "LanguageModel", **engine: Any) -> Tensor:
        """See `Scoring.costs`."""
        pairs = list(dict.fromkeys(pair for question in questions for pair in (question.stem, *question.choices)))
        number = {pair: place for place, pair in enumerate(pairs)}
        embeddings = embed_relations(language_model, pairs, self.template, **engine).double()
        costs = []
        for question in questions:
            stem = embeddings[number[question.stem]]
            choices = embeddings[[number[pair] for pair in question.choices]]
            costs.append(1 - F.cosine_similarity(stem, choices, dim=-1))
            check_finite(costs[-1], question)
        return pad_sequence(costs, batch_first=True, padding_value=torch.inf)
