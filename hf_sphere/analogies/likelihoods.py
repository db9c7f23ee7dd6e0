"""Perplexities of sentences by causal models, pseudo-perplexities by masked models, and their cache on disk.

Every distinct sequence is processed once, in a batch of sequences of the same length. The head of a masked model runs
only on the scored tokens.
"""

import contextlib
import itertools
import math
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_sphere.analogies.encoding import Encoding, encode, equal_length_batches, warn_unknown_words
from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.prompts import Sentence
from hf_sphere.utils.json_lines import JsonLines

BATCHES_IN_CHUNK = 8  # approximate number of batches between writes of finished scores: seconds of work
CPU_LOGITS = 2**26
"""Maximum number of logits per batch of a causal model on a CPU: 256 MiB in float32. On a GPU it is 16 times this."""


class ScoreCache(JsonLines):
    """Scores of sentences by models, kept in a file; see `JsonLines`.

    The score is the sum of the negative log-likelihoods of the scored tokens, in nats, and their number. The key is the
    fingerprint of the model, the text, and the ranges of characters that are replaced by mask tokens.

    Example:
        >>> cache = ScoreCache("scores.jsonl")
    """


def perplexities(
    language_model: LanguageModel,
    sentences: Sequence[Sentence],
    *,
    batch_size: int | None = None,
    cache: ScoreCache | None = None,
) -> Tensor:
    """Compute the perplexities of N sentences, (N,), at least 1, float64, on the CPU; repeated ones are scored once.

    With a masked model these are pseudo-perplexities (Salazar et al., "Masked Language Model Scoring", ACL 2020): each
    token is masked in turn, and `exp` of its mean negative log-likelihood is taken. Special tokens and masks are not
    scored. With a causal model, each token is scored given the tokens before it. The first one is scored if the
    tokenizer adds a special token before it, or if the configuration has a `bos_token_id`, which is then added.

    A sentence without a token to score, or with a likelihood that is not finite, is an error, as are hidden words for a
    causal model. The batch size is chosen for speed by default.
    """
    if language_model.kind == "embedding":
        what = f"{language_model.name} is a bare {type(language_model.model).__name__}, which has no likelihoods"
        raise ValueError(f"{what}. Use a masked (...ForMaskedLM) or causal (...ForCausalLM) language model.")
    warn_unknown_words(language_model, sentences)
    fingerprint = "" if cache is None else language_model.fingerprint
    hidden = [tuple(sorted({sentence.spans[word] for word in sentence.hidden})) for sentence in sentences]
    keys = [(fingerprint, sentence.text, ranges) for sentence, ranges in zip(sentences, hidden, strict=True)]
    scores: dict[Any, tuple[float, int]] = {} if cache is None else {key: cache[key] for key in keys if key in cache}
    new = {key: sentence for key, sentence in zip(keys, sentences, strict=True) if key not in scores}
    remaining = iter(new)
    with contextlib.closing(_score(language_model, list(new.values()), batch_size)) as chunks:
        for chunk in chunks:
            finished = dict(zip(itertools.islice(remaining, len(chunk)), chunk, strict=True))
            scores |= finished
            if cache is not None:
                cache.add(finished)
    losses, tokens = torch.tensor([scores[key] for key in keys], dtype=torch.float64).view(-1, 2).T
    return (losses / tokens).exp()


class Rows:
    """Distinct sequences that a model must process to score sentences, in the order of the sentences.

    A masked model requires one row per scored token, with that token replaced by `mask`; sentences that differ only in
    this token share the row. A causal model (`mask` is None) requires one row per sentence and cannot score the first
    token.
    """

    def __init__(self, encodings: Sequence[Encoding], mask: int | None) -> None:
        # Scored tokens by row: position of the logits, token and number of the sentence.
        self.targets: dict[bytes, list[tuple[int, int, int]]] = {}
        self.ends: list[int] = []  # number of distinct rows of the sentences up to and including each sentence
        self.counts: list[int] = []  # number of scored tokens per sentence
        for index, (ids, plain, _) in enumerate(encodings):
            scored = np.flatnonzero(plain) if mask is not None else np.flatnonzero(plain[1:]) + 1
            for position in scored.tolist():
                if mask is None:
                    row, read = ids, position - 1
                else:
                    row, read = ids.copy(), position
                    row[position] = mask
                self.targets.setdefault(row.tobytes(), []).append((read, int(ids[position]), index))
            self.ends.append(len(self.targets))
            self.counts.append(len(scored))


def build_rows(language_model: LanguageModel, sentences: Sequence[Sentence]) -> Rows:
    """Tokenize sentences for a masked or causal model and list the sequences that it must process."""
    if language_model.kind == "masked":
        return Rows(encode(language_model, sentences), language_model.tokenizer.mask_token_id)
    start = getattr(language_model.model.config.get_text_config(), "bos_token_id", None)
    return Rows(encode(language_model, sentences, start_token=start), None)


def _score(
    language_model: LanguageModel, sentences: Sequence[Sentence], batch_size: int | None
) -> Generator[list[tuple[float, int]]]:
    """Score distinct sentences in order, in chunks; see `ScoreCache`."""
    if not sentences:
        return
    rows = build_rows(language_model, sentences)
    if 0 in rows.counts:
        text = sentences[rows.counts.index(0)].text
        causal = language_model.kind == "causal"
        reason = "nothing comes before its only token" if causal else "all of its tokens are masks or special"
        raise ValueError(f"there is nothing to score in {text!r}: {reason}.")
    batch_tokens = language_model.batch_tokens
    if language_model.kind == "causal":  # the logits of all tokens are in memory at the same time
        most = CPU_LOGITS if language_model.device.type == "cpu" else 16 * CPU_LOGITS
        batch_tokens = min(batch_tokens, most // language_model.vocabulary_size)
    losses = torch.zeros(len(sentences), dtype=torch.float64)
    ids_of_rows = [np.frombuffer(row, dtype=np.int64) for row in rows.targets]
    targets = list(rows.targets.values())
    lengths = np.array([len(ids) for ids in ids_of_rows])
    tokens_needed = np.concatenate([[0], lengths.cumsum()])[rows.ends]
    _, starts = np.unique(tokens_needed // (BATCHES_IN_CHUNK * batch_tokens), return_index=True)
    ends = [0, *rows.ends]
    reader = _LogitReader(language_model)
    with reader.reading():
        for first, end in itertools.pairwise([*starts.tolist(), len(sentences)]):
            indices = np.arange(ends[first], ends[end])
            for batch in equal_length_batches(lengths[indices], batch_tokens, batch_size):
                batch_rows = indices[batch].tolist()
                ids = torch.from_numpy(np.stack([ids_of_rows[index] for index in batch_rows]))
                batch_targets = [(row, *target) for row, index in enumerate(batch_rows) for target in targets[index]]
                row, position, token, sentence = torch.tensor(batch_targets).T
                # Each position is read once, and -log softmax at a token is logsumexp(logits) - logits[token].
                positions, target_of = torch.stack([row, position]).unique(dim=1, return_inverse=True)
                logits = reader.read(ids, *positions)
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                negative_log_likelihoods = logits.logsumexp(-1)[target_of] - logits[target_of, token]
                losses.index_add_(0, sentence, negative_log_likelihoods.double().cpu())
            for index in range(first, end):
                if not losses[index].isfinite():
                    what = f"{language_model.name} in {language_model.model.dtype} returns {losses[index]:.4g}"
                    text = sentences[index].text
                    raise ValueError(f"{what} for the likelihood of {text!r}. Load it with dtype=torch.float32.")
            yield list(zip(losses[first:end].tolist(), rows.counts[first:end], strict=True))


class _LogitReader:
    """Computes the logits of selected tokens.

    Of B sequences of L tokens, a sentence needs the logits of a few tokens, while the head of a masked model multiplies
    each hidden state by the table of the vocabulary V, the largest part of the forward pass. Heads usually process each
    token independently: then `head(H)[rows, positions] = head(H[rows, positions])` for the hidden states H. So a hook
    on the modules outside the base model passes the first one that receives them, (B, L, H), only the M selected ones,
    as one sequence (1, M, H), and the logits are (1, M, V). The first batch tests whether both sides are equal up to
    rounding; if not, for instance because the head mixes tokens, all logits are computed.
    """

    def __init__(self, language_model: LanguageModel) -> None:
        self._language_model = language_model
        self._choice: tuple[torch.Size, Tensor, Tensor] | None = None
        model: Any = language_model.model
        base: Any = model.base_model
        children = model.children() if language_model.kind == "masked" and base is not model else ()
        self._heads = [child for child in children if base not in child.modules()]
        self._works: bool | None = None if self._heads else False

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Switch the model to evaluation mode, with the hook on its head."""
        with self._language_model.evaluating(), contextlib.ExitStack() as stack:
            for head in self._heads:
                stack.callback(head.register_forward_pre_hook(self._choose, with_kwargs=True).remove)
            yield

    def read(self, ids: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the logits (M, V) of the tokens at (rows, positions), (M,) each, of sequences (B, L)."""
        if self._works is None:
            self._works = self._try(ids[:2], rows[rows < 2], positions[rows < 2])
        if self._works:
            return self._read_chosen(ids, rows, positions)[0]
        return self._language_model.logits(ids)[rows, positions]

    def _read_chosen(self, ids: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        self._choice = ids.shape, rows, positions
        try:
            return self._language_model.logits(ids)
        finally:
            self._choice = None

    def _try(self, ids: Tensor, rows: Tensor, positions: Tensor) -> bool:
        """Return whether the head computes the same logits for the selected tokens alone."""
        full = self._language_model.logits(ids)[rows, positions]
        try:
            selected = self._read_chosen(ids, rows, positions)
        except (RuntimeError, ValueError, IndexError):  # the head needs the shape of the batch
            return False
        if selected.shape != (1, *full.shape):
            return False
        tolerance = math.sqrt(torch.finfo(full.dtype).eps) * float(full.abs().max())
        return bool((selected[0] - full).abs().max() <= tolerance)

    def _choose(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Hook of the head: the first module that receives hidden states (B, L, H) gets (1, M, H) instead."""
        return tuple(map(self._cut, args)), {name: self._cut(value) for name, value in kwargs.items()}

    def _cut(self, value: Any) -> Any:
        if self._choice is None or not isinstance(value, Tensor) or value.ndim != 3:
            return value
        shape, rows, positions = self._choice
        if value.shape[:2] != shape:
            return value
        self._choice = None  # the next modules of the head receive the selected states already
        return value[rows, positions].unsqueeze(0)
