"""Classification heads; a subclass of `Head` that sets `name` is registered under it.

To add a head, add a file to this folder.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from hf_sphere.nn.heads.base import HEADS, Head, HeadOutput
from hf_sphere.utils.checks import check_names, check_types, keyword_options

__all__ = ["HEADS", "Head", "HeadOutput", "build_head"]


def build_head(name: str, embedding_dim: int, num_classes: int, **options: Any) -> Head:
    """Build a head by its name.

    Args:
        name: A key of `HEADS`.
        embedding_dim: Length d of the embeddings.
        num_classes: Number of classes K.
        **options: Keyword options of the head.

    Raises:
        ValueError: If the name or an option is unknown (the message lists the valid ones), or a type is wrong.

    Example:
        >>> build_head("cosine", 4, 3)(embeddings).logits.shape
        torch.Size([60, 3])
    """
    check_options(name, options)
    return HEADS[name](embedding_dim, num_classes, **options)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Check name and options of a head without building it; see `build_head`."""
    if name not in HEADS:
        raise ValueError(f"unknown head {name!r}; the heads are: {', '.join(HEADS)}.")
    valid = keyword_options(HEADS[name])
    check_names(f"head {name!r}", options, valid)
    check_types(f"head {name!r}", options, valid)


for module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
    importlib.import_module(module.name)  # which adds its heads to `HEADS`
