"""Batches of text on the training device, with the target tokens of a language model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_sphere.data.sampling import SharedExamples, log_repetition
from hf_sphere.geometry.sampling import keyed_integers, keyed_uniforms
from hf_sphere.utils.checks import check_number
from hf_sphere.utils.devices import to_device
from hf_sphere.utils.seeds import mix_seed

IGNORED = -100
"""Label of tokens that are not targets, as in torch's cross-entropy and in transformers."""


@dataclass(frozen=True)
class Vocabulary:
    """Special and ordinary tokens of a tokenizer.

    Attributes:
        prefix: Special tokens before a text.
        suffix: Special tokens after it.
        mask: The mask token.
        special: (S,) all special tokens, int64. Those inside a text, such as the one for unknown words, are no targets.
        ordinary: (V,) all other tokens, int64.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    mask: int
    special: Tensor
    ordinary: Tensor

    @classmethod
    def of(cls, tokenizer: Any) -> "Vocabulary":
        """Create it from a transformers tokenizer.

        Raises:
            ValueError: If the tokenizer has no mask token, or none that it finds in a text.
        """
        mask, name = tokenizer.mask_token_id, tokenizer.name_or_path
        if mask is None:
            raise ValueError(f"the tokenizer of {name!r} has no mask token; name another with --tokenizer_name.")
        # Of all texts, only the mask token is known to have a token.
        ids = tokenizer(tokenizer.mask_token)["input_ids"]
        if ids.count(mask) != 1:
            what = f"the tokenizer of {name!r} does not find its mask token {tokenizer.mask_token!r} in a text"
            raise ValueError(f"{what}; load it with split_special_tokens=False.")
        index, special = ids.index(mask), {*tokenizer.all_special_ids, *ids}
        ordinary = {*tokenizer.get_vocab().values()} - special
        tokens = (torch.tensor(sorted(group), dtype=torch.int64) for group in (special, ordinary))
        return cls(tuple(ids[:index]), tuple(ids[index + 1 :]), mask, *tokens)

    def is_special(self, tokens: Tensor) -> Tensor:
        """Return which tokens are special, in the shape of the tokens."""
        return torch.isin(tokens, to_device(self.special, tokens.device))


@dataclass(frozen=True)
class Masking:
    """Masking for masked language modeling.

    Each token is chosen with `probability`, but no special token; if a block has none, the ordinary token with the
    lowest random number is chosen. Of the chosen tokens, 80 % are replaced by the mask token, 10 % by a random ordinary
    token, and 10 % are kept (Devlin et al., "BERT", NAACL 2019).

    Attributes:
        probability: Fraction of tokens to choose, above 0 and at most 1.
    """

    probability: float = 0.15

    def __post_init__(self) -> None:
        check_number("mask_probability", self.probability, "(0, 1]")

    def __call__(self, tokens: Tensor, vocabulary: Vocabulary, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Mask tokens of blocks; return the input tokens, and the labels: the token where it is a target, else -100.

        Both are int64, (B, L), as the `tokens` of the text. The `keys`, int64, (B,), determine the mask of each block;
        see `keyed_integers`.
        """
        streams = keyed_integers(keys[:, None, None], torch.arange(3, device=keys.device)[:, None])
        positions = torch.arange(tokens.shape[1], device=keys.device)
        draws, fates = keyed_uniforms(streams[:, :2], positions, torch.float32).unbind(1)
        others = keyed_integers(streams[:, 2], positions) % len(vocabulary.ordinary)
        draws = draws.masked_fill(vocabulary.is_special(tokens), torch.inf)
        nearest = draws.amin(1, keepdim=True)
        selected = ((draws < self.probability) | (draws == nearest)) & draws.isfinite()
        seen = tokens.masked_fill(selected & (fates < 0.8), vocabulary.mask)
        random = to_device(vocabulary.ordinary, tokens.device)[others]
        return torch.where(selected & (fates >= 0.9), random, seen), tokens.masked_fill(~selected, IGNORED)


class TextBatches(SharedExamples):
    """Batches `{"input_ids", "labels"}` of blocks of equal length, (B, P + L + S) with P + S special tokens.

    In training, the order is determined by (`seed`, epoch), and the mask of a block by (`seed`, epoch, its place in the
    order). So a run can resume in the middle of an epoch, and the masks do not depend on the batch size and the number
    of processes. Processes get interleaved parts of the same order, of equal length; a few blocks may be repeated, and
    then a message is logged. In evaluation every block occurs once, and its mask is the same in every epoch. With a
    masking, blocks of special tokens alone, which have no target, are left out.

    Args:
        tokens: (N, L) tokens of the text without special ones, any integer type.
        vocabulary: Special and ordinary tokens.
        batch_size: Blocks per batch and process.
        masking: Selects the target tokens; if None (reconstruction), no token is masked and every token is a target,
            including special ones.
        device: Device of the blocks and batches.
        shuffle: Whether order and masks differ between epochs, as in training.
        seed: Seed of order and masks.
        process_index: Index of this process.
        num_processes: Number of processes that share the data.

    Raises:
        ValueError: If all tokens are special.
    """

    def __init__(
        self,
        tokens: Tensor,
        vocabulary: Vocabulary,
        *,
        batch_size: int,
        masking: Masking | None = None,
        device: torch.device | str = "cpu",
        shuffle: bool = False,
        seed: int = 0,
        process_index: int = 0,
        num_processes: int = 1,
    ) -> None:
        if masking is not None:
            has_target = ~vocabulary.is_special(tokens).all(1)
            if not has_target.any():
                raise ValueError("all tokens are special, so nothing can be predicted; use a tokenizer of this text.")
            tokens = tokens if has_target.all() else tokens[has_target]
        super().__init__(len(tokens), batch_size, device, shuffle, seed, process_index, num_processes)
        self.tokens = tokens.to(self.device)
        self.vocabulary = vocabulary
        self.masking = masking
        log_repetition(self.examples_per_epoch, len(tokens), "blocks of text")
        self._fixed: tuple[Tensor, Tensor] | None = None
        if masking is not None and not shuffle:
            keys = keyed_integers(mix_seed(seed), torch.arange(len(tokens), device=self.device))
            self._fixed = masking(self.tokens.long(), vocabulary, keys)

    @property
    def block_length(self) -> int:
        """Tokens per block, special tokens included."""
        return len(self.vocabulary.prefix) + self.tokens.shape[1] + len(self.vocabulary.suffix)

    def epoch(self, epoch: int = 0, *, start: int = 0) -> Iterator[dict[str, Tensor]]:
        """Yield the batches of an epoch, starting with batch `start`, int64."""
        for batch_index, rows in enumerate(self._order(epoch).split(self.batch_size)[start:], start):
            rows = to_device(rows, self.device)
            if self._fixed is not None:
                seen, labels = (values[rows] for values in self._fixed)
            else:
                seen = labels = self.tokens[rows].long()
                if self.masking is not None:
                    local = batch_index * self.batch_size + torch.arange(len(rows), device=self.device)
                    keys = keyed_integers(mix_seed(self.seed, epoch), local * self.num_processes + self.process_index)
                    seen, labels = self.masking(seen, self.vocabulary, keys)
            inputs = self._surround(seen, self.vocabulary.prefix, self.vocabulary.suffix)
            if self.masking is None:
                labels = inputs
            else:
                ignored = [(IGNORED,) * len(ids) for ids in (self.vocabulary.prefix, self.vocabulary.suffix)]
                labels = self._surround(labels, *ignored)
            yield {"input_ids": inputs, "labels": labels}

    @staticmethod
    def num_targets(batch: dict[str, Tensor]) -> Tensor:
        """Return the number of targets of a batch, over which the loss averages: a scalar on its device."""
        return (batch["labels"] != IGNORED).sum()

    def _surround(self, tokens: Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> Tensor:
        first, last = ([torch.full_like(tokens[:, :1], number) for number in ids] for ids in (before, after))
        return torch.cat([*first, tokens, *last], dim=1)
