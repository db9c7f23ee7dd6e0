"""The optimizers, one file per optimizer with its name; listing the names does not import torch.

To add an optimizer, add a file with a subclass of `SphereOptimizer`, or of another optimizer of this folder. The
Trainer, timm, the recipes and the shared tests of `tests/optim` then accept its name. If the file has a function of
this name, which states the update rule as `adam_s` does, the tests compare the optimizer with it. In a program of your
own, a subclass that sets `name` is registered under it when it is defined.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, cast

from hf_sphere.optim.own import OWN_OPTIMIZERS

if TYPE_CHECKING:
    from hf_sphere.optim.groups import NamedOptimizer


def optimizer_names() -> list[str]:
    """List the names of the optimizers in alphabetical order."""
    return sorted([*OWN_OPTIMIZERS, *(module.name for module in pkgutil.iter_modules(__path__))])


def optimizer_class(name: str) -> "type[NamedOptimizer]":
    """Import the class of an optimizer: the first subclass of `NamedOptimizer` that its file defines."""
    if name not in optimizer_names():
        raise ValueError(f"unknown optimizer {name!r}; the optimizers are: {', '.join(optimizer_names())}.")
    if name in OWN_OPTIMIZERS:
        return cast("type[NamedOptimizer]", OWN_OPTIMIZERS[name])
    from hf_sphere.optim.groups import NamedOptimizer

    module = importlib.import_module(f"{__name__}.{name}")
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, NamedOptimizer) and value.__module__ == module.__name__:
            return value
    raise ValueError(f"{module.__file__} defines no subclass of NamedOptimizer.")
