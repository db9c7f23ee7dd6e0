"""Embeddings of words from the hidden states of a language model, and the scoring by their cosines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sphere.analogies.encoding import encode, equal_length_batches
from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.prompts import Sentence, fill, template_text
from hf_sphere.analogies.scoring.base import Engine, Permutations, Questions, Scoring


def embed_words(language_model: LanguageModel, words: Sequence[str], *, batch_size: int | None = None) -> Tensor:
    """Embed N single words: the mean of the last hidden states of their tokens, (N, hidden size), float32, on the CPU.

    A word is tokenized as in the middle of a text: with a leading space for tokenizers that encode it, such as GPT-2's.
    """
    tokenize = partial(language_model.tokenizer, add_special_tokens=False)
    first, spaced, both = (tokenize(text)["input_ids"] for text in ("x", " x", "x x"))
    space = " " if both != first + first and both == first + spaced else ""
    sentences = [Sentence(space + word, ((len(space), len(space) + len(word)),)) for word in words]
    return embed_words_in_context(language_model, sentences, batch_size=batch_size).flatten(1)


def embed_words_in_context(
    language_model: LanguageModel, sentences: Sequence[Sentence], *, batch_size: int | None = None
) -> Tensor:
    """Embed the W words of N sentences: the mean of the last hidden states of their tokens, (N, W, hidden size)."""
    encodings = encode(language_model, sentences, words=True)
    keys = [(encoding.ids.tobytes(), encoding.words.tobytes()) for encoding in encodings]
    inputs = list(dict(zip(keys, encodings, strict=True)).items())
    lengths = np.array([len(encoding.ids) for _, encoding in inputs])
    means: dict[tuple[bytes, bytes], Tensor] = {}
    with language_model.evaluating():
        for batch in equal_length_batches(lengths, language_model.batch_tokens, batch_size):
            batch_inputs = [inputs[index] for index in batch]
            ids = torch.from_numpy(np.stack([encoding.ids for _, encoding in batch_inputs]))
            weights = torch.from_numpy(np.stack([encoding.words for _, encoding in batch_inputs])).float()
            weights /= weights.sum(-1, keepdim=True)
            states = language_model.forward(ids, base=True).last_hidden_state.float()
            means |= zip((key for key, _ in batch_inputs), (weights.to(states.device) @ states).cpu(), strict=True)
    return torch.stack([means[key] for key in keys])  # outside inference mode, so that it can be modified and trained


@dataclass(frozen=True, kw_only=True)
class EmbeddingSimilarity(Scoring):
    """1 - cos(e_first - e_second, e_third - e_fourth), with the embeddings of the words in their permuted order.

    Mikolov, Yih, Zweig, "Linguistic Regularities in Continuous Space Word Representations", NAACL 2013. The cosine is 0
    where two words of a pair have the same embedding.
    """

    name = "embedding_similarity"

    template: str | None = None  # embeds each word in the sentence; None embeds it alone

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template is not None:
            template_text(self.template)

    def question_terms(self, questions: Questions, permutations: Permutations, engine: Engine) -> Iterator[Tensor]:
        """See `Scoring.question_terms`."""
        model, size, orders = engine.language_model, engine.batch_size, torch.tensor(permutations)
        asked = [(*question.stem, *pair) for question in questions for pair in question.choices]
        counts = [len(question.choices) for question in questions]
        if self.template is None:
            words = embed_words(model, [word for four in asked for word in four], batch_size=size)
            embeddings = [four[:, orders].movedim(1, 0) for four in words.view(len(asked), 4, -1).split(counts)]
        else:
            sentences = [fill(self.template, four, order) for order in permutations for four in asked]
            words = embed_words_in_context(model, sentences, batch_size=size).unflatten(0, (len(orders), -1))
            embeddings = list(words.take_along_dim(orders[:, None, :, None], dim=2).split(counts, dim=1))
        for each in embeddings:  # (P, k, 4, H), of the permuted words of a question
            first, second, third, fourth = each.double().unbind(2)
            yield 1 - F.cosine_similarity(first - second, third - fourth, dim=-1)[None]
