"""Where words and pairs of words lie among the hidden states of a language model."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

from hf_sphere.analogies.encoding import Encoding, encode, equal_length_batches
from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.prompts import Sentence


def embed_words(
    language_model: LanguageModel, words: Sequence[str], *, batch_size: int | None = None, progress: bool = False
) -> Tensor:
    """Embed words, each alone: the mean of the last hidden states of its tokens.

    A word is tokenized as in the middle of a text: with a space before it for tokenizers that tell words by it, such
    as those of GPT-2 and RoBERTa. Special tokens stand round it where the tokenizer puts them, but do not count.

    Args:
        language_model: A model of any kind; its head is not used.
        words: N words, which may have several tokens.
        batch_size: Words of a batch; by default as many as are fast.
        progress: Show a progress bar.

    Returns:
        (N, hidden size), float32, on the CPU.

    Raises:
        ValueError: If a word is empty, too long or has no token, or the tokenizer does not tell which characters a
            token has.
    """
    space = " " if _needs_space(language_model.tokenizer) else ""
    sentences = [Sentence(space + word, ((len(space), len(space) + len(word)),)) for word in words]
    return embed_words_in_context(language_model, sentences, batch_size=batch_size, progress=progress).flatten(1)


def embed_words_in_context(
    language_model: LanguageModel,
    sentences: Sequence[Sentence],
    *,
    batch_size: int | None = None,
    progress: bool = False,
) -> Tensor:
    """Embed the words of sentences: the mean of the last hidden states of a word's tokens.

    Args:
        language_model: A model of any kind; its head is not used.
        sentences: N sentences with as many `spans` each, W. Hidden words are embedded as the masks that they become.
        batch_size: Sentences of a batch; by default as many as are fast.
        progress: Show a progress bar.

    Returns:
        (N, W, hidden size), float32, on the CPU, in the order of `spans`.

    Raises:
        ValueError: If sentences have different numbers of words or none, a sentence is empty or too long, a word has no
            token, words are hidden from a model that knows no mask, or the tokenizer does not tell which characters a
            token has.
    """
    counts = {len(sentence.spans) for sentence in sentences}
    if len(counts) > 1 or 0 in counts:
        raise ValueError(f"all sentences must have as many words in `spans`, at least one; got {sorted(counts)}.")
    encodings = encode(language_model, sentences, words=True)
    weights = [encoding.words for encoding in encodings]
    return _mean_states(language_model, encodings, weights, batch_size, progress)


def embed_relations(
    language_model: LanguageModel,
    pairs: Sequence[tuple[str, str]],
    template: str,
    *,
    batch_size: int | None = None,
    progress: bool = False,
) -> Tensor:
    """Embed relations: the mean of the last hidden states of a sentence about a pair of words.

    Source: Ushio et al., "Distilling Relation Embeddings from Pre-trained Language Models", EMNLP 2021, where such
    models are trained. Special tokens and masks do not count.

    Args:
        language_model: A model of any kind; its head is not used.
        pairs: N pairs (a, b).
        template: Text with the fields {a} and {b}, and with {mask} where a mask token of the model shall stand, for
            instance `{a} is the {mask} of {b}`. Each may occur more than once.
        batch_size: Pairs of a batch; by default as many as are fast.
        progress: Show a progress bar.

    Returns:
        (N, hidden size), float32, on the CPU.

    Raises:
        ValueError: If the template lacks {a} or {b}, or has {mask} and the model knows none, a word is empty, what is
            no pair is given, or a sentence is too long.
    """
    if "{a}" not in template or "{b}" not in template:
        raise ValueError(f"template must have {{a}} and {{b}}, where the words of a pair go; got {template!r}.")
    mask = language_model.tokenizer.mask_token
    if "{mask}" in template and mask is None:
        raise ValueError(f"{language_model.name} has no mask token; leave {{mask}} out of {template!r}.")
    wrong = [pair for pair in pairs if len(pair) != 2 or not all(word.strip() for word in pair)]
    if wrong:
        raise ValueError(f"a pair has two words, none of them empty; got {wrong[0]!r}.")
    texts = [_fill_pair(template, pair, mask) for pair in pairs]
    encodings = encode(language_model, [Sentence(text) for text in texts])
    weights = [encoding.plain[None] for encoding in encodings]
    return _mean_states(language_model, encodings, weights, batch_size, progress).flatten(1)


def _fill_pair(template: str, pair: tuple[str, str], mask: str | None) -> str:
    fields = {"{a}": pair[0], "{b}": pair[1], "{mask}": mask or ""}
    return re.sub(r"\{(?:a|b|mask)\}", lambda field: fields[field[0]], template)


def _needs_space(tokenizer: Any) -> bool:
    """Whether a word has other tokens in the middle of a text, which a space before it brings about."""
    first, spaced, text = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("x", " x", "x x"))
    return text != first + first and text == first + spaced


def _mean_states(
    language_model: LanguageModel,
    encodings: Sequence[Encoding],
    groups: Sequence[NDArray[np.bool_]],
    batch_size: int | None,
    progress: bool,
) -> Tensor:
    """Mean of the last hidden states over W groups (W, L) of tokens of each sentence: (N, W, hidden size)."""
    if not encodings:
        raise ValueError("there is nothing to embed: an empty list was given.")
    empty = next((number for number, group in enumerate(groups) if not group.any(axis=1).all()), None)
    if empty is not None:
        raise ValueError(f"item {empty} has no token that is neither special nor a mask, so there is nothing to embed.")
    numbers: dict[tuple[bytes, bytes], int] = {}
    order = [
        numbers.setdefault((encoding.ids.tobytes(), group.tobytes()), len(numbers))
        for encoding, group in zip(encodings, groups, strict=True)
    ]
    _, firsts = np.unique(order, return_index=True)
    lengths = np.array([len(encodings[first].ids) for first in firsts])
    means: list[Tensor] = [torch.empty(0)] * len(firsts)
    with language_model.evaluating(), tqdm(total=len(firsts), unit="text", disable=not progress) as bar:
        for batch in equal_length_batches(lengths, language_model.batch_tokens, batch_size):
            ids = torch.from_numpy(np.stack([encodings[first].ids for first in firsts[batch]]))
            weights = torch.from_numpy(np.stack([groups[first] for first in firsts[batch]])).float()
            weights /= weights.sum(-1, keepdim=True)
            states = language_model.forward(ids, base=True).last_hidden_state.float()
            for number, mean in zip(batch, (weights.to(states.device) @ states).cpu(), strict=True):
                means[number] = mean
            bar.update(len(batch))
    return torch.stack([means[number] for number in order])  # a tensor of one's own, which may change and be trained on
