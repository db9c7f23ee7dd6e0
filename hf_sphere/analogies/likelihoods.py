"""How likely are sentences? Perplexities by a causal model, pseudo-perplexities by a masked one.

Every distinct sequence runs once, among sequences of its own length; of a masked model's head only what is read.
"""

import contextlib
from collections.abc import Generator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

from hf_sphere.analogies.encoding import encode, equal_length_batches, hidden_ranges
from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.logits import ReadLogits, chosen_logits
from hf_sphere.analogies.prompts import Sentence
from hf_sphere.analogies.rows import Integers, Rows, Targets
from hf_sphere.analogies.score_cache import Score, ScoreCache, SentenceKey

BATCHES_IN_CHUNK = 8
"""Batches, about, after which the scores of finished sentences are written: seconds of work."""

LOGITS_AT_ONCE = 2**26
"""Logits that a batch of a causal model may have where memory is that of the CPU: 256 MiB in float32."""


def perplexities(
    language_model: LanguageModel,
    sentences: Sequence[Sentence],
    *,
    batch_size: int | None = None,
    cache: ScoreCache | None = None,
    progress: bool = False,
) -> Tensor:
    """Perplexities of sentences; the lower, the likelier.

    With a masked model these are pseudo-perplexities (Salazar et al., "Masked Language Model Scoring", ACL 2020): each
    token is masked in turn, and `exp` of its mean negative log-likelihood is taken. Special tokens and masks are not
    scored. With a causal model it is the likelihood of each token after the ones before it. The first one counts if
    the tokenizer puts a special token before it, or the configuration has a `bos_token_id` to put there.

    Args:
        language_model: A masked or causal model.
        sentences: N sentences; repeated ones cost nothing.
        batch_size: Rows of a batch; by default as many as are fast.
        cache: Where scores are looked up and written, every few seconds.
        progress: Show a progress bar.

    Returns:
        (N,), at least 1, float64, on the CPU.

    Raises:
        ValueError: If the model gives no likelihoods, a sentence is empty, too long or has nothing to score, or words
            are hidden from a causal model; also if the model answers with what is no number.
    """
    if language_model.kind == "embedding":
        raise ValueError(
            f"{language_model.name} is a bare {type(language_model.model).__name__}, which tells no likelihoods. Take "
            "a model for masked tokens (...ForMaskedLM) or the next token (...ForCausalLM), or a scoring by embeddings."
        )
    keys = [SentenceKey(sentence.text, hidden_ranges(sentence)) for sentence in sentences]
    numbers: dict[SentenceKey, int] = {}
    order = [numbers.setdefault(key, number) for number, key in enumerate(keys)]
    scores: dict[int, Score] = {}
    if cache is not None:
        fingerprint = language_model.fingerprint
        scores = {numbers[key]: score for key, score in cache.read(fingerprint, list(numbers)).items()}
    new = [(number, key) for key, number in numbers.items() if number not in scores]
    finished = _score(language_model, [sentences[number] for number, _ in new], batch_size, progress)
    done = 0
    with contextlib.closing(finished):  # whatever happens: the model is in another mode meanwhile
        for some in finished:
            named = list(zip(new[done : done + len(some)], some, strict=True))
            done += len(some)
            scores |= {number: score for (number, _), score in named}
            if cache is not None:
                cache.write(fingerprint, {key: score for (_, key), score in named})
    return torch.tensor([scores[number].loss / scores[number].tokens for number in order], dtype=torch.float64).exp()


def _score(
    language_model: LanguageModel, sentences: Sequence[Sentence], batch_size: int | None, progress: bool
) -> Generator[list[Score]]:
    """Score distinct sentences, in their order, some at a time."""
    if not sentences:
        return
    causal = language_model.kind == "causal"
    config = language_model.model.config.get_text_config()
    encodings = encode(language_model, sentences, start_token=getattr(config, "bos_token_id", None) if causal else None)
    rows = Rows(encodings, None if causal else language_model.tokenizer.mask_token_id)
    if not rows.counts.all():
        text = sentences[int(rows.counts.argmin())].text
        reason = "nothing comes before its only token" if causal else "all of its tokens are masks or special"
        raise ValueError(f"there is nothing to score in {text!r}: {reason}.")
    batch_tokens = language_model.batch_tokens
    if causal:  # the logits of all tokens are there at once
        room = LOGITS_AT_ONCE * (1 if language_model.device.type == "cpu" else 16)
        batch_tokens = min(batch_tokens, room // language_model.vocabulary_size)

    losses = np.zeros(len(sentences))
    with chosen_logits(language_model) as read, tqdm(total=len(rows), unit="row", disable=not progress) as bar:
        for chunk in rows.chunks(BATCHES_IN_CHUNK * batch_tokens):
            lengths = rows.lengths[chunk.rows.start : chunk.rows.stop]
            for batch in equal_length_batches(lengths, batch_tokens, batch_size):
                ids, targets = rows.batch(chunk.rows.start + batch)
                np.add.at(losses, targets.sentence, _negative_log_likelihoods(read, ids, targets))
                bar.update(len(batch))
            wrong = [number for number in chunk.sentences if not np.isfinite(losses[number])]
            if wrong:
                raise ValueError(
                    f"{language_model.name} in {language_model.model.dtype} gives {losses[wrong[0]]} for the "
                    f"likelihood of {sentences[wrong[0]].text!r}. Load it with dtype=torch.float32, or look at its "
                    "weights."
                )
            yield [Score(float(losses[number]), int(rows.counts[number])) for number in chunk.sentences]


def _negative_log_likelihoods(read: ReadLogits, ids: Integers, targets: Targets) -> NDArray[np.float64]:
    """Negative log-likelihoods (T,) of targets in rows (B, L) of one length."""
    places, which = np.unique(targets.row * ids.shape[1] + targets.position, return_inverse=True)
    rows, positions = (torch.from_numpy(numbers) for numbers in np.divmod(places, ids.shape[1]))
    logits = read(torch.from_numpy(ids), rows, positions)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    of_tokens = logits[torch.from_numpy(which), torch.from_numpy(targets.token)]
    return (logits.logsumexp(-1)[torch.from_numpy(which)] - of_tokens).double().cpu().numpy()
