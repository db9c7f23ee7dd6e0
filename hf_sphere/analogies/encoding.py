"""From sentences to tokens: which of them a word has, and sequences of one length without padding."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.prompts import Sentence

TEXTS_AT_ONCE = 8192
"""Texts given to a tokenizer at a time: its answers are much larger than what is kept of them."""


class Encoding(NamedTuple):
    """Tokens of a sentence.

    Attributes:
        ids: (L,), with special tokens; those of hidden words are replaced by the mask token.
        plain: (L,), whether a token is neither special nor a mask.
        words: (W, L), whether a token belongs to a word; no rows where spans were not asked for.
    """

    ids: NDArray[np.int64]
    plain: NDArray[np.bool_]
    words: NDArray[np.bool_]


def encode(
    language_model: LanguageModel,
    sentences: Sequence[Sentence],
    *,
    words: bool = False,
    start_token: int | None = None,
) -> list[Encoding]:
    """Tokenize sentences.

    Args:
        language_model: The model whose tokens are needed.
        sentences: The sentences.
        words: Find the tokens of every word in `spans`. A token belongs to a word if it has a character of it.
        start_token: Token to put before a sentence where the tokenizer puts none.

    Raises:
        ValueError: If a text is empty or too long for the model, words are hidden from a model that knows no mask, a
            word has no token, its token cannot be found with this tokenizer, or a token is unknown to the model.
    """
    if language_model.kind != "masked" and any(sentence.hidden for sentence in sentences):
        raise ValueError(
            f"{language_model.name} is a model of the {language_model.kind} kind, from which no word can be hidden. "
            "Take a model for masked tokens (...ForMaskedLM), or sentences without hidden words."
        )
    offsets = words or any(hidden_ranges(sentence) for sentence in sentences)
    if offsets and not language_model.tokenizer.is_fast:
        raise ValueError(
            f"{type(language_model.tokenizer).__name__} does not tell which characters a token has, so the tokens of a "
            "word cannot be found. Take a tokenizer whose `is_fast` is true."
        )
    return [
        encoding
        for start in range(0, len(sentences), TEXTS_AT_ONCE)
        for encoding in _encode_some(
            language_model, sentences[start : start + TEXTS_AT_ONCE], words, offsets, start_token
        )
    ]


def _encode_some(
    language_model: LanguageModel, sentences: Sequence[Sentence], words: bool, offsets: bool, start_token: int | None
) -> Iterator[Encoding]:
    empty = next((sentence for sentence in sentences if not sentence.text.strip()), None)
    if empty is not None:
        raise ValueError(f"a sentence must not be empty; got {empty}.")
    answer = language_model.tokenizer(
        [sentence.text for sentence in sentences],
        padding=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        return_special_tokens_mask=True,
        return_offsets_mapping=offsets,
        verbose=False,  # what is too long is refused below
    )
    mask = language_model.tokenizer.mask_token_id
    for number, sentence in enumerate(sentences):
        ids = np.array(answer["input_ids"][number], dtype=np.int64)
        special = np.array(answer["special_tokens_mask"][number], dtype=bool)
        found = {}
        if offsets:
            ranges = np.array(answer["offset_mapping"][number]).reshape(-1, 2)
            wanted = range(len(sentence.spans)) if words else sentence.hidden
            found = {word: _find_word(sentence, word, ranges) & ~special for word in wanted}
        for word in sentence.hidden:
            ids[found[word]] = mask
        plain = ~special & (ids != mask) if mask is not None else ~special
        of_words = np.array(list(found.values()) if words else [], dtype=bool).reshape(-1, len(ids))
        if start_token is not None and not special[:1].any():
            ids, plain = np.insert(ids, 0, start_token), np.insert(plain, 0, False)
            of_words = np.insert(of_words, 0, False, axis=1)
        _check_tokens(language_model, sentence, ids)
        yield Encoding(ids, plain, of_words)


def hidden_ranges(sentence: Sentence) -> tuple[tuple[int, int], ...]:
    """Characters that are hidden, ascending: all that the score of a text depends on beside the model.

    Raises:
        ValueError: If a word is hidden that the spans do not tell of.
    """
    wrong = [word for word in sentence.hidden if not 0 <= word < len(sentence.spans)]
    if wrong:
        raise ValueError(f"word {wrong[0]} cannot be hidden: `spans` has {len(sentence.spans)} words in {sentence}.")
    return tuple(sorted({sentence.spans[word] for word in sentence.hidden}))


def _find_word(sentence: Sentence, word: int, ranges: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tokens (L,) that have a character of a word."""
    first, end = sentence.spans[word]
    tokens = np.maximum(ranges[:, 0], first) < np.minimum(ranges[:, 1], end)
    if not tokens.any():
        raise ValueError(
            f"{sentence.text[first:end]!r}, characters {first} to {end} of {sentence.text!r}, has no token: "
            "the span is wrong, or the tokenizer drops these characters."
        )
    return tokens


def _check_tokens(language_model: LanguageModel, sentence: Sentence, ids: NDArray[np.int64]) -> None:
    limit = language_model.max_length
    if limit is not None and len(ids) > limit:
        raise ValueError(
            f"{language_model.name} takes up to {limit} tokens, and this sentence has {len(ids)}: {sentence.text!r}. "
            "Shorten it, or take a model for longer texts."
        )
    if len(ids) and ids.max() >= language_model.vocabulary_size:
        raise ValueError(
            f"the tokenizer gives token {ids.max()} for {sentence.text!r}, but {language_model.name} has "
            f"{language_model.vocabulary_size} tokens: the two do not belong together. Give the model's own tokenizer."
        )


def equal_length_batches(
    lengths: NDArray[np.int64], batch_tokens: int, batch_size: int | None = None
) -> Iterator[NDArray[np.int64]]:
    """Split sequences into batches of one length each, so that no batch has padding.

    Args:
        lengths: (N,), tokens of every sequence.
        batch_tokens: Tokens that a batch may have.
        batch_size: Sequences of a batch; by default as many as `batch_tokens` allows.

    Yields:
        Numbers of the sequences of a batch, ascending; batches of shorter sequences come first.

    Raises:
        ValueError: If `batch_size` is less than 1.
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, or None for one that fits the length; got {batch_size}.")
    for length in np.unique(lengths):
        members = np.flatnonzero(lengths == length)
        size = batch_size or max(1, batch_tokens // max(1, int(length)))
        for start in range(0, len(members), size):
            yield members[start : start + size]
