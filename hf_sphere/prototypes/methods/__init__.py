"""Placement methods: one file each, found by name. A new one is a new file with a subclass of `Method`."""

import importlib
import pkgutil

from hf_sphere.prototypes.methods.base import Candidate, Method, Task

__all__ = ["METHODS", "Candidate", "Method", "Task"]

for _module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
    importlib.import_module(_module.name)


def _named(parent: type[Method]) -> dict[str, type[Method]]:
    found = {parent.name: parent} if vars(parent).get("name") else {}
    for child in parent.__subclasses__():
        found |= _named(child)
    return found


METHODS: dict[str, type[Method]] = dict(sorted(_named(Method).items()))
"""Placement methods by name."""
