"""Perplexities of sentences by causal models, and pseudo-perplexities by masked models.

Every distinct sequence is processed once, in a batch of sequences of the same length.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hf_sphere.analogies.encoding import encode, equal_length_batches
from hf_sphere.analogies.language_model import LanguageModel
from hf_sphere.analogies.prompts import Sentence

CPU_LOGITS = 2**26
"""Maximum number of logits per batch on a CPU: 256 MiB in float32. On a GPU it is 16 times this."""

Target = tuple[int, int, int]
"""A scored token: the position of its logits in the sequence, the token, and the number of its sentence."""


def scored_sequences(language_model: LanguageModel, sentences: Sequence[Sentence]) -> dict[bytes, list[Target]]:
    """Return the distinct sequences of tokens (int64) that score sentences, with the targets of each.

    A masked model needs one sequence per scored token, with that token masked.
    """
    sequences: dict[bytes, list[Target]] = {}
    if language_model.kind == "masked":
        for number, (ids, plain, _) in enumerate(encode(language_model, sentences)):
            for position in np.flatnonzero(plain).tolist():
                masked = ids.copy()
                masked[position] = language_model.tokenizer.mask_token_id
                sequences.setdefault(masked.tobytes(), []).append((position, int(ids[position]), number))
        return sequences
    start = getattr(language_model.model.config.get_text_config(), "bos_token_id", None)
    for number, (ids, plain, _) in enumerate(encode(language_model, sentences, start_token=start)):
        targets = [(position, int(ids[position + 1]), number) for position in np.flatnonzero(plain[1:]).tolist()]
        sequences.setdefault(ids.tobytes(), []).extend(targets)
    return sequences


def perplexities(
    language_model: LanguageModel, sentences: Sequence[Sentence], *, batch_size: int | None = None
) -> Tensor:
    """Compute the perplexities of N sentences, (N,), at least 1, float64, on the CPU.

    With a masked model these are pseudo-perplexities (Salazar et al., "Masked Language Model Scoring", ACL 2020): each
    token is masked in turn, and `exp` of its mean negative log-likelihood is taken. Special tokens and masks are not
    scored. With a causal model, each token is scored given the tokens before it. The first one is scored if the
    tokenizer adds a special token before it, or if the configuration has a `bos_token_id`, which is then added.

    A sentence without a token to score is NaN. The batch size is chosen for speed by default.
    """
    sequences = scored_sequences(language_model, sentences)
    ids_of_sequences = [np.frombuffer(sequence, dtype=np.int64) for sequence in sequences]
    targets = list(sequences.values())
    lengths = np.array([len(ids) for ids in ids_of_sequences], dtype=np.int64)
    most = CPU_LOGITS if language_model.device.type == "cpu" else 16 * CPU_LOGITS
    vocabulary_size = language_model.model.get_input_embeddings().num_embeddings
    batch_tokens = min(language_model.batch_tokens, most // vocabulary_size)
    losses = torch.zeros(len(sentences), dtype=torch.float64)
    counts = torch.zeros_like(losses)
    with language_model.evaluating():
        for batch in equal_length_batches(lengths, batch_tokens, batch_size):
            ids = torch.from_numpy(np.stack([ids_of_sequences[index] for index in batch]))
            batch_targets = [(row, *target) for row, index in enumerate(batch) for target in targets[index]]
            row, position, token, sentence = torch.tensor(batch_targets, dtype=torch.int64).view(-1, 4).T
            # Each position is read once, and -log softmax at a token is logsumexp(logits) - logits[token].
            (rows, positions), target_of = torch.stack([row, position]).unique(dim=1, return_inverse=True)
            logits = language_model.logits(ids)[rows, positions]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            negative_log_likelihoods = logits.logsumexp(-1)[target_of] - logits[target_of, token]
            losses.index_add_(0, sentence, negative_log_likelihoods.double().cpu())
            counts.index_add_(0, sentence, torch.ones_like(sentence, dtype=torch.float64))
    return (losses / counts).exp()
