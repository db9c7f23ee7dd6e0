"""Classification heads; a subclass of `Head` that sets `name` is registered under it.

To add a head, add a file to this folder.
"""

import importlib
import pkgutil

from hf_sphere.nn.heads.base import HEADS, Head, HeadOutput, build_head

__all__ = ["HEADS", "Head", "HeadOutput", "build_head"]


def import_heads() -> None:
    """Import every file of this folder, which adds its heads to `HEADS`."""
    for module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        importlib.import_module(module.name)


import_heads()


def __getattr__(name: str) -> type[Head]:
    for head in HEADS.values():
        if head.__name__ == name:
            return head
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
