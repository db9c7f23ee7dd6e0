"""Placement methods.

To add a method, add a function decorated with `register_method` to a file of this folder. All files are imported here.
"""

import importlib
import pkgutil

from hf_sphere.prototypes.methods.base import METHODS, Candidate, Method, Task, register_method

__all__ = ["METHODS", "Candidate", "Method", "Task", "register_method"]

for _module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
    importlib.import_module(_module.name)
