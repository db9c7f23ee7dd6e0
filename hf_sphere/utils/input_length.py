"""How long the inputs of a text model may be."""

from typing import Any

ENDLESS = 10**6
"""From so many tokens on, a tokenizer's `model_max_length` says that nobody knows."""


def longest_input(model: Any, tokenizer: Any) -> int | None:
    """Most tokens of an input, special ones included, by the tokenizer and by the table of positions.

    Args:
        model: Text model of transformers.
        tokenizer: Its tokenizer.

    Returns:
        The lesser of the two; None if nothing limits it.
    """
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < ENDLESS else []
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions > 0:  # DeBERTa says -1 where there is no limit
        # RoBERTa and its kin count positions from padding_idx + 1; the rows before that are never used.
        tables = [table for path, table in model.named_modules() if path.endswith("position_embeddings")]
        unused = [table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None]
        limits.append(positions - max((number + 1 for number in unused), default=0))
    return min(limits, default=None)
