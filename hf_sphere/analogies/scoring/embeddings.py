"""Embeddings of words and relations from the hidden states of a language model, and the scorings by their cosines."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_sphere.analogies.encoding import Encoding, encode, equal_length_batches
from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.prompts import (
    RELATION_TEMPLATE,
    Permutation,
    Sentence,
    check_relation_template,
    fill,
    template_text,
)
from hf_sphere.analogies.questions import Question
from hf_sphere.analogies.scoring.base import Engine, PermutedScoring, Scoring, check_finite


def embed_words(language_model: LanguageModel, words: Sequence[str], *, batch_size: int | None = None) -> Tensor:
    """Embed N single words: the mean of the last hidden states of their tokens, (N, hidden size), float32, on the CPU.

    A word is tokenized as in the middle of a text: with a leading space for tokenizers that encode it, such as those of
    GPT-2 and RoBERTa. Special tokens are added if the tokenizer does so, but are not part of the mean. The head of the
    model is not used.

    Raises:
        ValueError: If a word is empty, too long or has no token, or the tokenizer does not support offsets.
    """
    space = " " if _needs_space(language_model.tokenizer) else ""
    sentences = [Sentence(space + word, ((len(space), len(space) + len(word)),)) for word in words]
    return embed_words_in_context(language_model, sentences, batch_size=batch_size).flatten(1)


def embed_words_in_context(
    language_model: LanguageModel, sentences: Sequence[Sentence], *, batch_size: int | None = None
) -> Tensor:
    """Embed the words of N sentences with W `spans` each: the mean of the last hidden states of a word's tokens.

    Hidden words are embedded as mask tokens.

    Returns:
        (N, W, hidden size), float32, on the CPU, in the order of `spans`.

    Raises:
        ValueError: If sentences have different numbers of words or none, or `encode` raises it.
    """
    counts = {len(sentence.spans) for sentence in sentences}
    if len(counts) > 1 or 0 in counts:
        raise ValueError(f"all sentences must have the same number of `spans`, at least one; got {sorted(counts)}.")
    encodings = encode(language_model, sentences, words=True)
    weights = [encoding.words for encoding in encodings]
    return _mean_states(language_model, encodings, weights, batch_size)


def embed_relations(
    language_model: LanguageModel, pairs: Sequence[tuple[str, str]], template: str, *, batch_size: int | None = None
) -> Tensor:
    """Embed relations of N pairs of words: the mean of the last hidden states of a sentence about a pair.

    Source: Ushio et al., "Distilling Relation Embeddings from Pre-trained Language Models", EMNLP 2021, which also
    trains models for this. Special tokens and masks are not part of the mean. The template has the fields {a} and {b},
    and optionally {mask} for the mask token of the model, for instance `{a} is the {mask} of {b}`; each may occur
    repeatedly.

    Returns:
        (N, hidden size), float32, on the CPU.

    Raises:
        ValueError: If the template lacks {a} or {b}, or has {mask} and the tokenizer has none, a pair does not have two
            words, a word is empty, or a sentence is too long.
    """
    check_relation_template(template)
    mask = language_model.tokenizer.mask_token
    if "{mask}" in template and mask is None:
        raise ValueError(f"{language_model.name} has no mask token; remove {{mask}} from {template!r}.")
    wrong = [pair for pair in pairs if len(pair) != 2 or not all(word.strip() for word in pair)]
    if wrong:
        raise ValueError(f"a pair must have two nonempty words; got {wrong[0]!r}.")
    sentences = [Sentence(_fill_pair(template, pair, mask)) for pair in pairs]
    encodings = encode(language_model, sentences)
    weights = [encoding.plain[None] for encoding in encodings]
    return _mean_states(language_model, encodings, weights, batch_size).flatten(1)


def _fill_pair(template: str, pair: tuple[str, str], mask: str | None) -> str:
    fields = {"{a}": pair[0], "{b}": pair[1], "{mask}": mask or ""}
    return re.sub(r"\{(?:a|b|mask)\}", lambda field: fields[field[0]], template)


def _needs_space(tokenizer: Any) -> bool:
    """Whether the tokens of a word in the middle of a text include the space before it."""
    first, spaced, text = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("x", " x", "x x"))
    return text != first + first and text == first + spaced


def _mean_states(
    language_model: LanguageModel,
    encodings: Sequence[Encoding],
    groups: Sequence[NDArray[np.bool_]],
    batch_size: int | None,
) -> Tensor:
    """Average the last hidden states over W groups (W, L) of tokens per sentence: (N, W, hidden size)."""
    if not encodings:
        raise ValueError("there is nothing to embed: the list is empty.")
    empty = next((number for number, group in enumerate(groups) if not group.any(axis=1).all()), None)
    if empty is not None:
        raise ValueError(f"item {empty} has no token that is neither special nor a mask, so there is nothing to embed.")
    keys = [(encoding.ids.tobytes(), group.tobytes()) for encoding, group in zip(encodings, groups, strict=True)]
    distinct = dict(zip(keys, zip(encodings, groups, strict=True), strict=True))
    inputs = list(distinct.items())
    lengths = np.array([len(encoding.ids) for encoding, _ in distinct.values()])
    means: dict[tuple[bytes, bytes], Tensor] = {}
    with language_model.evaluating():
        for batch in equal_length_batches(lengths, language_model.batch_tokens, batch_size):
            chosen = [inputs[number] for number in batch]
            ids = torch.from_numpy(np.stack([encoding.ids for _, (encoding, _) in chosen]))
            weights = torch.from_numpy(np.stack([group for _, (_, group) in chosen])).float()
            weights /= weights.sum(-1, keepdim=True)
            states = language_model.forward(ids, base=True).last_hidden_state.float()
            means |= zip((key for key, _ in chosen), (weights.to(states.device) @ states).cpu(), strict=True)
    return torch.stack([means[key] for key in keys])  # outside inference mode, so that it can be modified and trained


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


@dataclass(frozen=True, kw_only=True)
class RelationEmbedding(Scoring):
    """1 - cos(r(stem), r(choice)), with r the embedding of a prompt about one pair.

    Ushio, Camacho-Collados, Schockaert, "Distilling Relation Embeddings from Pretrained Language Models", EMNLP 2021.
    Each pair is embedded separately, so there are no permutations of four words and nothing to aggregate.

    Attributes:
        template: A text with the fields {a} and {b}, and optionally {mask} for a mask token.
    """

    name = "relation_embedding"
    remark = " It embeds each pair separately, so permutations of four words, positive or negative, do not apply."

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
