"""Heads: one file each, one interface (`base.py`), found by name.

A new head is a new file here with a subclass of `Head` that sets `name`.
"""

import importlib
import pkgutil
from typing import Any

from hf_sphere.nn.heads.base import Head, HeadOutput, option_names

__all__ = ["HEADS", "Head", "HeadOutput", "build_head"]


def _find_heads() -> dict[str, type[Head]]:
    """Import every file of this folder and list the heads by name."""
    for module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        importlib.import_module(module.name)
    heads: dict[str, type[Head]] = {}
    pending = [Head]
    while pending:
        head = pending.pop()
        pending += head.__subclasses__()
        if vars(head).get("name"):  # a name of its own: a nameless subclass must not take its parent's place
            heads[head.name] = head
    return dict(sorted(heads.items()))


HEADS: dict[str, type[Head]] = _find_heads()
"""Head classes by name; a head defined outside the library may be added to it."""


def build_head(name: str, embedding_dim: int, num_classes: int, **options: Any) -> Head:
    """Build a head by its name.

    Args:
        name: A key of `HEADS`.
        embedding_dim: Length d of the embeddings.
        num_classes: Number of classes K.
        **options: Keyword options of the head.

    Raises:
        ValueError: If the name or an option is unknown; the message lists the valid ones.
    """
    if name not in HEADS:
        raise ValueError(f"unknown head {name!r}; the heads are: {', '.join(HEADS)}.")
    head_class = HEADS[name]
    valid = option_names(head_class)
    unknown = sorted(set(options) - set(valid))
    if unknown:
        raise ValueError(f"head {name!r} has no option {', '.join(unknown)}; its options are: {', '.join(valid)}.")
    return head_class(embedding_dim, num_classes, **options)


def __getattr__(name: str) -> type[Head]:
    for head in HEADS.values():
        if head.__name__ == name:
            return head
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
