"""Tokenization of sentences, with the tokens of each word, and batching without padding."""

import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.prompts import Sentence
from hf_sphere.analogies.questions import Question

MOST_NAMED = 20  # unknown words in a warning


class Encoding(NamedTuple):
    """Tokens of a sentence."""

    ids: NDArray[np.int64]  # (L,), with special tokens; those of hidden words are replaced by the mask token
    plain: NDArray[np.bool_]  # (L,), whether a token is neither special nor a mask
    words: NDArray[np.bool_]  # (W, L), whether a token belongs to a word; no rows if words were not requested


def encode(
    language_model: LanguageModel, sentences: Sequence[Sentence], *, words: bool = False, start_token: int | None = None
) -> list[Encoding]:
    """Tokenize sentences; `start_token` is added before a sentence if the tokenizer adds none.

    With `words`, find the tokens of every word in `spans`: those that share a character with it.
    """
    tokenizer, encodings = language_model.tokenizer, []
    output = tokenizer(
        [sentence.text for sentence in sentences],
        return_special_tokens_mask=True,
        return_offsets_mapping=words or any(sentence.hidden for sentence in sentences),
        verbose=False,
    )
    for index, sentence in enumerate(sentences):
        ids = np.array(output["input_ids"][index], dtype=np.int64)
        special = np.array(output["special_tokens_mask"][index], dtype=bool)
        masks = {}
        for word in range(len(sentence.spans)) if words else sentence.hidden:
            starts, ends = np.array(output["offset_mapping"][index]).reshape(-1, 2).T
            first, end = sentence.spans[word]
            masks[word] = (np.maximum(starts, first) < np.minimum(ends, end)) & ~special
            if not masks[word].any():  # its cost would be 0
                raise ValueError(f"{sentence.text[first:end]!r} in {sentence.text!r} has no token of its own.")
        for word in sentence.hidden:
            ids[masks[word]] = tokenizer.mask_token_id
        plain = ~special
        if tokenizer.mask_token_id is not None:
            plain &= ids != tokenizer.mask_token_id
        of_words = np.array(list(masks.values()) if words else [], dtype=bool).reshape(-1, len(ids))
        if start_token is not None and not special[:1].any():
            ids, plain = np.insert(ids, 0, start_token), np.insert(plain, 0, False)
        encodings.append(Encoding(ids, plain, of_words))
    return encodings


def warn_unknown_words(language_model: LanguageModel, questions: Sequence[Question]) -> None:
    """Name the words that the tokenizer does not know in a warning: those with the unknown token, or no token."""
    pairs = (pair for question in questions for pair in (question.stem, *question.choices))
    words = sorted({word.strip() for pair in pairs for word in pair})
    tokenizer = language_model.tokenizer
    tokens = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
    unknown = [word for word, ids in zip(words, tokens, strict=True) if not ids or tokenizer.unk_token_id in ids]
    if unknown:
        more = f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
        warnings.warn(
            f"the tokenizer of {language_model.name} does not know the words {', '.join(unknown[:MOST_NAMED])}{more}. "
            "Choices that differ only in unknown words tie, and a tie of k choices counts 1/k if one is correct.",
            stacklevel=3,
        )


def equal_length_batches(
    lengths: NDArray[np.int64], batch_tokens: int, batch_size: int | None = None
) -> Iterator[list[int]]:
    """Yield the indices of sequences of some lengths (N,) in batches of equal length, which need no padding."""
    for length in np.unique(lengths):
        members = torch.from_numpy(np.flatnonzero(lengths == length))
        for batch in members.split(batch_size or max(1, batch_tokens // max(1, int(length)))):
            yield batch.tolist()
