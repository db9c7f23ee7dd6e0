"""Maximum input length of text models."""

from typing import Any

UNLIMITED = 10**6
"""A `model_max_length` of a tokenizer from this value on means that the limit is unknown."""


def longest_input(model: Any, tokenizer: Any) -> int | None:
    """Return the maximum number of tokens, including special ones, of the tokenizer and the position embeddings.

    Args:
        model: Text model of transformers.
        tokenizer: Its tokenizer.

    Returns:
        The smaller of both limits; None if there is none.
    """
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < UNLIMITED else []
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions > 0:  # DeBERTa has -1 for no limit
        # RoBERTa and similar models count positions from padding_idx + 1; earlier rows are never used.
        tables = [table for path, table in model.named_modules() if path.endswith("position_embeddings")]
        unused = [table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None]
        limits.append(positions - max((number + 1 for number in unused), default=0))
    return min(limits, default=None)
