"""Placement methods.

To add a method, add a subclass of `Method` that sets `name` to a file of this folder. Defining a subclass registers it;
all files are imported here.
"""

import importlib
import pkgutil

from hf_sphere.prototypes.methods.base import METHODS, Candidate, Method, Task

__all__ = ["METHODS", "Candidate", "Method", "Task"]

for _module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
    importlib.import_module(_module.name)
