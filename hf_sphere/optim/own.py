"""Optimizers that are defined outside of this library, by name. Imports nothing heavy."""

import importlib.util
from collections.abc import Callable
from typing import Any

from hf_sphere.utils.imports import check_unique

TORCH_NAMES = ("adam", "adamw", "sgd")
"""Names of torch's optimizers."""

OWN_OPTIMIZERS: dict[str, type] = {}
"""Classes by name."""

listeners: list[Callable[[], None]] = []
"""Functions to call when a class has been added."""


def add_optimizer(kind: Any) -> None:
    """Register a class under its `name`, also with the libraries that have been imported."""
    file = f"{__package__}.optimizers.{kind.name}"
    is_ours = kind.name in TORCH_NAMES or importlib.util.find_spec(file) is not None
    before: Any = OWN_OPTIMIZERS.get(kind.name)
    check_unique("optimizer", kind.name, kind.__module__, __package__ if is_ours else before and before.__module__)
    OWN_OPTIMIZERS[kind.name] = kind
    for listener in listeners:
        listener()
