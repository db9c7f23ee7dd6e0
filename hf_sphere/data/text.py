"""Text for training: column, splits, tokens, blocks, and batches with the target tokens of a language model."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset, Features, List, Value
from torch import Tensor

from hf_sphere.data.options import TextDataOptions
from hf_sphere.data.sampling import SharedExamples, draw_subset
from hf_sphere.data.sources import check_validation_split, choose_eval_split, common_column, find_split, load_splits
from hf_sphere.geometry.sampling import keyed_integers, keyed_uniforms
from hf_sphere.utils.checks import check_integer, check_number
from hf_sphere.utils.modules import to_device
from hf_sphere.utils.seeds import mix_seed

TEXT_COLUMNS = ("text", "sentence", "content")  # column names used on the Hub, the most common one first
IGNORED = -100  # label of tokens that are not targets, as in torch's cross-entropy and in transformers


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
        # Of all texts, only the mask token is known to have a token.
        ids = [] if mask is None else tokenizer(tokenizer.mask_token)["input_ids"]
        if ids.count(mask) != 1:
            what = f"the tokenizer of {name!r} has no mask token, or does not find it in a text"
            raise ValueError(f"{what}; load it with split_special_tokens=False, or name another with --tokenizer_name.")
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


@dataclass(eq=False, repr=False)
class TextBatches(SharedExamples):
    """Batches `{"input_ids", "labels"}` of blocks of equal length, (B, P + L + S) with P + S special tokens.

    In training, the order is determined by (`seed`, epoch), and the mask of a block by (`seed`, epoch, its place in the
    order). So a run can resume in the middle of an epoch, and the masks do not depend on the batch size and the number
    of processes. Processes get interleaved parts of the same order, of equal length; a few blocks may be repeated. In
    evaluation every block occurs once, and its mask is the same in every epoch. With a
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

    tokens: Tensor
    vocabulary: Vocabulary
    _: KW_ONLY
    masking: Masking | None = None

    def __post_init__(self) -> None:
        if self.masking is not None:
            self.tokens = self.tokens[~self.vocabulary.is_special(self.tokens).all(1)]
            if len(self.tokens) == 0:
                raise ValueError("all tokens are special, so nothing can be predicted; use a tokenizer of this text.")
        self.device, self.num_examples = torch.device(self.device), len(self.tokens)
        self.tokens = self.tokens.to(self.device)

    @property
    def block_length(self) -> int:
        """Tokens per block, special tokens included."""
        return len(self.vocabulary.prefix) + self.tokens.shape[1] + len(self.vocabulary.suffix)

    def epoch(self, epoch: int = 0, *, start: int = 0) -> Iterator[dict[str, Tensor]]:
        """Yield the batches of an epoch, starting with batch `start`, int64."""
        for batch_index, rows in enumerate(self._order(epoch).split(self.batch_size)[start:], start):
            seen = labels = self.tokens[to_device(rows, self.device)].long()
            if self.masking is not None:
                local = batch_index * self.batch_size + torch.arange(len(rows), device=self.device)
                of_order = mix_seed(self.seed, epoch) if self.shuffle else mix_seed(self.seed)
                keys = keyed_integers(of_order, local * self.num_processes + self.process_index)
                seen, labels = self.masking(seen, self.vocabulary, keys)
            added = (torch.tensor(ids, dtype=seen.dtype) for ids in (self.vocabulary.prefix, self.vocabulary.suffix))
            prefix, suffix = (to_device(ids, self.device).expand(len(seen), -1) for ids in added)
            inputs = torch.cat([prefix, seen, suffix], dim=1)
            if self.masking is not None:
                labels = F.pad(labels, (prefix.shape[1], suffix.shape[1]), value=IGNORED)
            yield {"input_ids": inputs, "labels": inputs if self.masking is None else labels}

    @staticmethod
    def num_targets(batch: dict[str, Tensor]) -> Tensor:
        """Return the number of targets of a batch, over which the loss averages: a scalar on its device."""
        return (batch["labels"] != IGNORED).sum()


@dataclass(frozen=True)
class TextData:
    """The result of `load_text_data`.

    Attributes:
        train: Training batches.
        evaluation: Evaluation batches.
        eval_split: Name of the evaluation split.
        validation: Batches for selecting the best epoch, if any.
        validation_split: Name of the validation split.
    """

    train: TextBatches
    evaluation: TextBatches
    eval_split: str
    validation: TextBatches | None = None
    validation_split: str | None = None


def load_text_data(
    options: TextDataOptions,
    tokenizer: Any,
    *,
    block_length: int,
    batch_size: int = 8,
    eval_batch_size: int = 8,
    seed: int = 0,
    progress: bool = True,
    **sharing: Any,
) -> TextData:
    """Load a text dataset as batches.

    The texts of a split are tokenized, joined, and cut into blocks; an incomplete last block is dropped. The tokens,
    four bytes each, are kept on the device. `max_train_samples` and `max_eval_samples` count blocks.

    Args:
        options: The dataset (see `hf_sphere.data.sources.load_splits`), its column and splits, and the masking.
            `max_seq_length` is ignored in favor of `block_length`.
        tokenizer: A transformers tokenizer with a mask token.
        block_length: Tokens per block, special tokens included.
        batch_size: Blocks per training batch and process.
        eval_batch_size: Blocks per evaluation batch and process.
        seed: Seed of order, masks and subsets.
        progress: Whether to show progress bars.
        **sharing: `device`, `process_index` and `num_processes` of `TextBatches`.

    Raises:
        ValueError: If a split, column, length or fraction is invalid, or there is too little text.

    Example:
        >>> load_text_data(TextDataOptions(dataset_name="wikitext"), tokenizer, block_length=128)  # doctest: +SKIP
    """
    vocabulary = Vocabulary.of(tokenizer)
    room = block_length - len(vocabulary.prefix) - len(vocabulary.suffix)
    check_integer(f"max_seq_length {block_length} without special tokens", room, 1)
    shown = datasets.is_progress_bar_enabled()
    if not progress:
        datasets.disable_progress_bars()
    reading: Any = {"cache_dir": options.cache_dir, "follow_links": options.follow_links}
    splits = load_splits(options.dataset_name, options.dataset_config_name, **reading)
    train, validating, fraction = options.train_split, options.validation_split, options.validation_fraction
    names = {"train": train}
    if (evaluation := choose_eval_split(splits, options.eval_split, train)) is not None:
        names["eval"] = evaluation
    elif not fraction:
        how = "choose one with --eval_split, or hold out training text with --validation_fraction"
        raise ValueError(f"there is no split to report results on; the data has {', '.join(splits)}: {how}.")
    if validating is None and not fraction and "validation" in splits.keys() - {*names.values()}:
        validating = "validation"
    if validating is not None:
        check_validation_split(validating, names)
        names["validation"] = validating
    rows = {key: find_split(splits, split, f"--{key}_split") for key, split in names.items()}
    column = common_column(rows, options.text_column_name, TEXT_COLUMNS, "text")
    workers = options.preprocessing_num_workers
    blocks = {key: _read_blocks(each, column, tokenizer, room, workers) for key, each in rows.items()}
    if shown:
        datasets.enable_progress_bars()
    if fraction:  # the last blocks: contiguous text limits leakage between the parts
        tokens, key = blocks["train"], "validation" if "eval" in names else "eval"
        kept = len(tokens) - round(fraction * len(tokens))
        blocks["train"], blocks[key] = tokens[:kept], tokens[kept:]
        names[key] = f"the last {fraction:.0%} of {train}"
    batches = {}
    masking = Masking(options.mask_probability or Masking.probability) if options.objective == "masked" else None
    for key, tokens in blocks.items():
        is_train = key == "train"
        size = options.max_train_samples if is_train else options.max_eval_samples
        if len(tokens) == 0:
            raise ValueError(f"{names[key]} has too little text for {block_length} tokens; reduce --max_seq_length.")
        if size is not None:
            tokens = tokens[draw_subset(len(tokens), size, seed)]
        own: Any = {"batch_size": batch_size if is_train else eval_batch_size, "shuffle": is_train, "seed": seed}
        batches[key] = TextBatches(tokens, vocabulary, masking=masking, **own, **sharing)
    validation = batches.get("validation")
    return TextData(batches["train"], batches["eval"], names["eval"], validation, names.get("validation"))


def _read_blocks(rows: Dataset, column: str, tokenizer: Any, room: int, num_proc: int | None) -> Tensor:
    """Return the tokens of all texts joined, (N, room), int32, without the remainder."""
    if getattr(kind := rows.features[column], "dtype", None) not in ("string", "large_string"):
        raise ValueError(f"column {column!r} does not contain text but {kind}; name another with --text_column_name.")
    tokenized = rows.map(
        _tokenize,
        batched=True,
        remove_columns=rows.column_names,
        fn_kwargs={"tokenizer": tokenizer, "column": column},
        features=Features({"input_ids": List(Value("int32"))}),
        num_proc=num_proc,
        desc="Tokenizing",
    )
    lists = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in tokenized.data.column("input_ids").chunks]
    joined = np.concatenate([np.empty(0, np.int32), *lists])
    return torch.from_numpy(joined[: len(joined) // room * room].reshape(-1, room))


def _tokenize(batch: dict[str, list], tokenizer: Any, column: str) -> dict[str, list]:
    """Return the tokens of each text without special tokens."""
    # Not verbose: texts are cut into blocks, so a warning about their length would be misleading.
    texts = [text or "" for text in batch[column]]
    tokens = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return {"input_ids": tokens}
