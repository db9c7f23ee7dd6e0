"""Cosine of the embeddings of relations."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_sphere.analogies.prompts import RELATION_TEMPLATE
from hf_sphere.analogies.questions import Question
from hf_sphere.analogies.scoring.base import Engine, Scoring, check_finite
from hf_sphere.analogies.word_embeddings import embed_relations


@dataclass(frozen=True, kw_only=True)
class RelationEmbedding(Scoring):
    """1 - cos(r(stem), r(choice)), with r the embedding of a prompt about one pair.

    Ushio, Camacho-Collados, Schockaert, "Distilling Relation Embeddings from Pretrained Language Models", EMNLP 2021.
    Each pair is embedded separately, so there are no permutations of four words and nothing to aggregate.

    Attributes:
        template: A text with the fields {a} and {b}, and optionally {mask} for a mask token.
    """

    name = "relation_embedding"
    remark = "It embeds each pair separately, so permutations of four words, positive or negative, do not apply."

    template: str = RELATION_TEMPLATE

    def costs(self, questions: Sequence[Question], engine: Engine) -> Tensor:
        """See `Scoring.costs`."""
        pairs = list(dict.fromkeys(pair for question in questions for pair in (question.stem, *question.choices)))
        rows = {pair: row for row, pair in enumerate(pairs)}
        model, batch_size = engine.language_model, engine.batch_size
        embeddings = embed_relations(model, pairs, self.template, batch_size=batch_size).double()
        costs = []
        for question in questions:
            choices = embeddings[[rows[pair] for pair in question.choices]]
            costs.append(1 - F.cosine_similarity(embeddings[rows[question.stem]], choices, dim=-1))
            check_finite(costs[-1], question)
        engine.progress(len(questions))
        return pad_sequence(costs, batch_first=True, padding_value=torch.inf)
