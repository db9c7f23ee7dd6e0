"""The optimizers, one file per optimizer with its name; listing the names does not import torch.

To add an optimizer, add a file with a subclass of `SphereOptimizer`, or of another optimizer of this folder. The
Trainer, timm, the recipes and the shared tests of `tests/optim` then accept its name. If the file has a function of
this name, which states the update rule as `adam_s` does, the tests compare the optimizer with it. In a program of your
own, a subclass that sets `name` is registered under it when it is defined.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from hf_sphere.utils.checks import check_unique

OWN_OPTIMIZERS: dict[str, type[Any]] = {}
"""Classes by name that are defined outside of this folder."""

listeners: list[Callable[[], None]] = []
"""Functions to call when one has been added."""


def add_optimizer(kind: type[Any]) -> None:
    """Register a class under its `name`, also with the libraries that have been imported."""
    is_ours = kind.name in ("adam", "adamw", "sgd") or kind.name in {*optimizer_names()} - {*OWN_OPTIMIZERS}
    before = OWN_OPTIMIZERS.get(kind.name)
    used = "hf_sphere" if is_ours else before.__module__ if before else None
    check_unique("optimizer", kind.name, kind.__module__, used)
    OWN_OPTIMIZERS[kind.name] = kind
    for listener in listeners:
        listener()


def optimizer_names() -> list[str]:
    """List the names of the optimizers in alphabetical order."""
    return sorted([*OWN_OPTIMIZERS, *(module.name for module in pkgutil.iter_modules(__path__))])


def optimizer_class(name: str) -> type[Any]:
    """Import the class of an optimizer: the last one that forms parameter groups in its file."""
    if name in OWN_OPTIMIZERS:
        return OWN_OPTIMIZERS[name]
    module = importlib.import_module(f"{__name__}.{name}")
    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    return [value for value in own if hasattr(value, "form_groups")][-1]
