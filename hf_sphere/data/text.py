"""Preparation of text datasets for training: column, splits, tokens, blocks, batches."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset, DatasetDict, Features, List, Value
from torch import Tensor

from hf_sphere.data import folders
from hf_sphere.data.options import TextDataOptions
from hf_sphere.data.sampling import draw_subset
from hf_sphere.data.sources import check_validation_split, choose_eval_split, common_column, find_split
from hf_sphere.data.text_batches import Masking, TextBatches, Vocabulary
from hf_sphere.utils.loading import FILE_KINDS, load_dataset, load_file

TEXT_COLUMNS = ("text", "sentence", "content")
"""Column names used on the Hub, the most common one first."""


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
    device: torch.device | str = "cpu",
    seed: int = 0,
    process_index: int = 0,
    num_processes: int = 1,
    progress: bool = True,
) -> TextData:
    """Load a text dataset as batches.

    The texts of a split are tokenized, joined, and cut into blocks; an incomplete last block is dropped. The tokens,
    four bytes each, are kept on the device. `max_train_samples` and `max_eval_samples` count blocks.

    Args:
        options: The dataset (see `load_text_splits`), its column and splits, and the masking. `max_seq_length` is
            ignored in favor of `block_length`.
        tokenizer: A transformers tokenizer with a mask token.
        block_length: Tokens per block, special tokens included.
        batch_size: Blocks per training batch and process.
        eval_batch_size: Blocks per evaluation batch and process.
        device: Device of the blocks and batches.
        seed: Seed of order, masks and subsets.
        process_index: Index of this process.
        num_processes: Number of processes that share the data.
        progress: Whether to show progress bars.

    Raises:
        ValueError: If a split, column, length or fraction is invalid, or there is too little text.

    Example:
        >>> load_text_data(TextDataOptions(dataset_name="wikitext"), tokenizer, block_length=128)  # doctest: +SKIP
    """
    vocabulary = Vocabulary.of(tokenizer)
    room = block_length - len(vocabulary.prefix) - len(vocabulary.suffix)
    if room < 1:
        raise ValueError(f"max_seq_length {block_length} leaves no room for text; use at least 8.")
    shown = datasets.is_progress_bar_enabled()
    if not progress:
        datasets.disable_progress_bars()
    splits = load_text_splits(
        options.dataset_name, options.dataset_config_name, options.cache_dir, options.follow_links
    )
    names = _choose_splits(splits, options)
    rows = {key: find_split(splits, split, f"--{key}_split") for key, split in names.items()}
    column = common_column(rows, options.text_column_name, TEXT_COLUMNS, "text")
    workers = options.preprocessing_num_workers
    blocks = {key: _read_blocks(each, column, tokenizer, room, workers) for key, each in rows.items()}
    if shown:
        datasets.enable_progress_bars()
    if fraction := options.validation_fraction:  # the last blocks: contiguous text limits leakage between the parts
        tokens, key = blocks["train"], "validation" if "eval" in names else "eval"
        kept = len(tokens) - round(fraction * len(tokens))
        blocks["train"], blocks[key] = tokens[:kept], tokens[kept:]
        names[key] = f"the last {fraction:.0%} of {options.train_split}"
    batches = {}
    for key, tokens in blocks.items():
        is_train, masking = key == "train", None
        size = options.max_train_samples if is_train else options.max_eval_samples
        if len(tokens) == 0:
            raise ValueError(f"{names[key]} has too little text for {block_length} tokens; reduce --max_seq_length.")
        if size is not None and size < len(tokens):
            tokens = tokens[draw_subset(len(tokens), size, seed)]
        if options.objective == "masked":
            masking = Masking(options.mask_probability or Masking.probability)
        batches[key] = TextBatches(
            tokens,
            vocabulary,
            batch_size=batch_size if is_train else eval_batch_size,
            masking=masking,
            device=device,
            shuffle=is_train,
            seed=seed,
            process_index=process_index,
            num_processes=num_processes,
        )
    validation = batches.get("validation")
    return TextData(batches["train"], batches["eval"], names["eval"], validation, names.get("validation"))


def load_text_splits(
    name: str,
    config_name: str | None = None,
    cache_dir: str | os.PathLike | None = None,
    follow_links: bool = False,
) -> DatasetDict:
    """Load all splits of a text dataset.

    The name is a Hub id, a folder of parquet or text files (or its subfolder `config_name`, if that exists), or a
    single file, which becomes the split `train`. Links in a folder to files outside it are an error, unless links
    are followed.
    """
    path, cache = Path(name), None if cache_dir is None else str(cache_dir)
    if path.is_file() and path.suffix.lower() not in FILE_KINDS:
        raise ValueError(f"{name} is not a file of text; the supported kinds are: {', '.join(FILE_KINDS)}.")
    if path.is_file():
        return load_file(name, cache_dir=cache)
    folders.list_files(path, {*folders.TABLES, *FILE_KINDS}, follow_links=follow_links)
    if config_name is not None and (path / config_name).is_dir():
        return load_dataset(str(path / config_name), cache_dir=cache)
    splits = load_dataset(name, config_name, cache_dir=cache)
    if config_name is None and path.is_dir() and not folders.has_configs(path):
        folders.log_unread(path)
    return splits


def _choose_splits(splits: DatasetDict, options: TextDataOptions) -> dict[str, str]:
    """Return the names of the splits `train`, `eval` and `validation`; no `eval` if the held-out part replaces it."""
    validation, fraction = options.validation_split, options.validation_fraction
    names = {"train": options.train_split}
    eval_split = choose_eval_split(splits, options.eval_split, options.train_split)
    if eval_split is not None:
        names["eval"] = eval_split
    elif not fraction:
        how = "choose one with --eval_split, or hold out training text with --validation_fraction"
        raise ValueError(f"there is no split to report results on; the data has {', '.join(splits)}: {how}.")
    if validation is not None:
        check_validation_split(validation, names)
        names["validation"] = validation
    elif not fraction and "validation" in splits and "validation" not in names.values():
        names["validation"] = "validation"
    return names


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
