"""The optimizers by name, which is that of a file in `optimizers/`; listing them does not import torch."""

import importlib
import pkgutil
from typing import TYPE_CHECKING

from hf_sphere.optim import optimizers

if TYPE_CHECKING:
    from hf_sphere.optim.groups import NamedOptimizer


def optimizer_names() -> list[str]:
    """List the names of the optimizers in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(optimizers.__path__))


def optimizer_class(name: str) -> "type[NamedOptimizer]":
    """Import the class of an optimizer: the first subclass of `NamedOptimizer` that its file defines."""
    if name not in optimizer_names():
        raise ValueError(f"unknown optimizer {name!r}; the optimizers are: {', '.join(optimizer_names())}.")
    from hf_sphere.optim.groups import NamedOptimizer

    module = importlib.import_module(f"{optimizers.__name__}.{name}")
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, NamedOptimizer) and value.__module__ == module.__name__:
            return value
    raise ValueError(f"{module.__file__} defines no subclass of NamedOptimizer.")
